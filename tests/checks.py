"""A backend's op against the judge's, one function per op. Each returns what the backend gave."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from cases import Workload, judged_update, numbers, one_signed, update_of
from tolerance import accumulation, assert_close, assert_same_bits, step_bound, sum_bound
from torch import Tensor

from embedfuse import reference
from embedfuse.optim import Optimizer
from embedfuse.plan import COLUMN, DIM, NO_MAX_NORM, T_MAX_NORM
from embedfuse.torch.backends import Backend, Rows, Shards, Update

NUDGE = 1e-4
"""By which part the gradient is changed to see how a step depends on it."""


def scale_of(work: Workload) -> Tensor:
    """The scales of all bags as a backend gives them; empty if nothing is divided."""
    scales = reference.scales(work.group.features, work.judged()[2]) if work.group.normalised else np.zeros(0)
    return torch.from_numpy(scales).to(work.table.device, getattr(torch, accumulation(work.case.dtype)))


def condition_of(work: Workload) -> np.ndarray:
    """By how much the error of a bag's scale exceeds that of its largest weight, at least 1."""
    _, features, csr, _ = work.judged()
    total, magnitude = (reference.moments(features, csr, absolute) for absolute in (False, True))
    return 1 + np.divide(magnitude, np.abs(total), out=np.zeros_like(total), where=total != 0)


def in_columns(work: Workload, values: np.ndarray) -> np.ndarray:
    """One value a bag as `[B, width]`, repeated over its feature's columns."""
    out = np.zeros((work.csr.bags, work.group.width))
    for feature, of_bags in zip(work.group.features, np.split(values, len(work.group.features)), strict=True):
        out[:, feature[COLUMN] : feature[COLUMN] + feature[DIM]] = of_bags[:, None]
    return out


def check_lookup(work: Workload, backend: Backend) -> Tensor:
    """`pooled_lookup`: output and scales."""
    table, features, csr, _ = work.judged()
    width, dtype = work.group.width, work.case.dtype
    out, scale = backend.pooled_lookup(work.table, work.features, work.csr, width, work.group.normalised, "drop")
    expected, scales = reference.pooled_lookup(table, features, csr, width)
    magnitude, _ = reference.pooled_lookup(table, features, csr, width, absolute=True)
    condition = condition_of(work)
    assert (out.dtype, out.device) == (work.table.dtype, work.table.device)
    allowed = sum_bound(expected, magnitude * in_columns(work, condition), dtype, work.longest)
    assert_close(numbers(out), expected, allowed, "out")
    kind = accumulation(dtype)
    assert scale.dtype == getattr(torch, kind)
    if work.group.normalised:
        assert_close(numbers(scale), scales, sum_bound(scales, np.abs(scales) * condition, kind, work.longest), "scale")
    else:
        assert scale.shape == (0,)
    return out


def check_row_grad(work: Workload, backend: Backend, into: torch.dtype | None = None) -> Tensor:
    """`row_grad`, which leaves all other elements of its output at 0."""
    table, features, csr, grad = work.judged()
    scale = scale_of(work)
    out = torch.zeros_like(work.table, dtype=into)
    rows = Rows(work.table, work.tables) if work.is_cut else None
    backend.row_grad(out, work.features, work.csr, scale, work.grad, rows)
    arguments = work.group.size, work.group.tables, features, csr, numbers(scale), grad
    expected, magnitude = (reference.row_grad(*arguments, absolute, table) for absolute in (False, True))
    dtype = str(out.dtype).removeprefix("torch.")
    assert_close(numbers(out), expected, sum_bound(expected, magnitude, dtype, work.longest), "row_grad")
    filled = torch.full_like(out, torch.nan)
    backend.row_grad(filled, work.features, work.csr, scale, work.grad, rows, fill=True)
    assert_same_bits(numbers(filled), numbers(out), "row_grad with fill")
    return out


def check_row_grad_with_dots(work: Workload, backend: Backend) -> tuple[Tensor, Tensor]:
    """`row_grad` of bags that are not scaled, and the gradients of their weights beside."""
    table, features, csr, grad = work.judged()
    kind = accumulation(work.case.dtype)
    unscaled = torch.zeros(0, dtype=getattr(torch, kind), device=work.table.device)
    out, alone = torch.zeros_like(work.table), torch.zeros_like(work.table)
    dots = torch.zeros(csr.ids.shape, dtype=getattr(torch, kind), device=work.table.device)
    rows = Rows(work.table, work.tables)
    backend.row_grad(out, work.features, work.csr, unscaled, work.grad, rows, dots)
    # the sums are those of a call without dots; on a GPU a compiler may order the columns of a tile in another way
    backend.row_grad(alone, work.features, work.csr, unscaled, work.grad, rows)
    if not out.is_cuda:
        assert_same_bits(numbers(out), numbers(alone), "row_grad with dots")
    arguments = work.group.size, work.group.tables, features, csr, numbers(unscaled), grad
    expected, magnitude = (reference.row_grad(*arguments, absolute, table) for absolute in (False, True))
    assert_close(numbers(out), expected, sum_bound(expected, magnitude, work.case.dtype, work.longest), "row_grad")
    expected, magnitude = (
        reference.row_dots(table, work.group.tables, features, csr, grad, absolute) for absolute in (False, True)
    )
    assert_close(numbers(dots), expected, sum_bound(expected, magnitude, kind, work.longest), "dots")
    return out, dots


def check_coefficient_grad(work: Workload, backend: Backend) -> Tensor:
    """`coefficient_grad`."""
    table, features, csr, grad = work.judged()
    scale, kind = scale_of(work), accumulation(work.case.dtype)
    out = backend.coefficient_grad(work.table, work.features, work.csr, scale, work.grad)
    expected, magnitude = (
        reference.coefficient_grad(table, features, csr, numbers(scale), grad, absolute) for absolute in (False, True)
    )
    assert (out.shape, out.dtype) == (work.csr.ids.shape, getattr(torch, kind))
    # a dot over the row, then a sum and a moment over the bag
    length = work.longest + 2 * int(np.diff(csr.offsets).max(initial=0))
    magnitude = magnitude * condition_of(work).max(initial=1)
    assert_close(numbers(out), expected, sum_bound(expected, magnitude, kind, length), "coefficient_grad")
    return out


def check_square_sum(work: Workload, backend: Backend, update: Update) -> Tensor:
    """`row_square_sum`."""
    scale, kind = scale_of(work), accumulation(work.case.dtype)
    out = backend.row_square_sum(update, work.csr, scale, work.grad)
    table, features, csr, grad = work.judged()
    arguments = csr, numbers(scale), grad
    expected = reference.row_square_sum(judged_update(update), *arguments)
    sums, magnitudes = (
        reference.row_sums(table, work.group.tables, features, *arguments, absolute) for absolute in (False, True)
    )
    # each element's error is squared with it
    magnitude = expected + 2 * sum(float(np.sum(np.abs(sums[key]) * magnitudes[key])) for key in sums)
    assert (out.numel(), out.dtype) == (1, getattr(torch, kind))
    allowed = sum_bound(expected, magnitude, kind, work.longest + sum(g.size for g in sums.values()))
    assert_close(numbers(out).reshape(()), expected, allowed, "row_square_sum")
    return out


def trainable(work: Workload) -> Workload:
    """The same without sums that cancel, whose sign would be left to rounding: weights positive, columns one-signed."""
    weights = work.csr.weights
    csr = work.csr if weights is None else work.csr._replace(weights=weights.abs() + 0.25)
    return replace(work, grad=one_signed(work.grad), csr=csr)


def check_update(
    work: Workload, backend: Backend, optimizers: list[Optimizer | None], steps: int = 1, **options: Any
) -> Update:
    """`row_update`, each step judged from where the backend stood before it."""
    work = trainable(work)
    update, scale = update_of(work, optimizers), scale_of(work)
    # as if there had been steps before
    update.slots += 0.5 * torch.rand_like(update.slots)
    for name, value in options.items():
        setattr(update, name, torch.tensor(value, dtype=torch.float32, device=work.table.device))
    arguments = work.judged()[2], numbers(scale), numbers(work.grad)
    for step in range(1, steps + 1):
        update.steps.fill_(step)
        before = judged_update(update)
        backend.row_update(update, work.csr, scale, work.grad)
        check_step(work, update, before, reference.row_update(before, *arguments), arguments, f"step {step}")
    return update


def check_step(
    work: Workload, update: Update, before: reference.Update, expected: tuple[Any, Any], arguments: Any, what: str
) -> None:
    """Table and slots after a step, and that the rest was not touched."""
    up, down = (
        reference.row_update(before._replace(grad_scale=before.grad_scale * (1 + by)), *arguments)
        for by in (NUDGE, -NUDGE)
    )
    uncut = work.group.tables.copy()
    uncut[:, T_MAX_NORM] = NO_MAX_NORM
    touched = reference.row_grad(
        work.group.size, uncut, before.features, arguments[0], np.zeros(0), np.ones_like(arguments[2])
    )
    places = zip(("table", "slots"), (update.table, update.slots), before[:5:4], expected, up, down, strict=True)
    for name, actual, old, new, high, low in places:
        dtype = str(actual.dtype).removeprefix("torch.")
        slope = np.nan_to_num(high - low) / (2 * NUDGE)
        bound = step_bound(np.nan_to_num(old), np.nan_to_num(new), slope, dtype, work.longest)
        assert_close(numbers(actual), new, bound, f"{name} after {what}")
        if name == "table":
            still = touched == 0
            assert_same_bits(numbers(actual)[still], old[still], f"rows that were not looked up, after {what}")


def check_max(work: Workload, backend: Any) -> None:
    """`max_lookup`, whose winners must be the judge's, and `max_grad`."""
    table, features, csr, grad = work.judged()
    width, dtype = work.group.width, work.case.dtype
    out, winners = backend.max_lookup(work.table, work.features, work.csr, width, "drop")
    expected, won = reference.max_lookup(table, features, csr, width)
    assert (out.dtype, winners.dtype) == (work.table.dtype, torch.int64)
    assert_close(numbers(out), expected, sum_bound(expected, np.abs(expected), dtype, 1), "max")
    assert_same_bits(numbers(winners), won.astype(np.int64), "winners")
    flat = torch.zeros_like(work.table)
    backend.max_grad(flat, work.features, work.csr, winners, work.grad)
    expected, magnitude = (
        reference.max_grad(work.group.size, features, csr, won, grad, absolute) for absolute in (False, True)
    )
    assert_close(numbers(flat), expected, sum_bound(expected, magnitude, dtype, work.longest), "max_grad")


def check_sparse_row_grad(work: Workload, backend: Backend) -> None:
    """`sparse_row_grad`: which rows, and their sums."""
    table, features, csr, grad = work.judged()
    scale = scale_of(work)
    found = backend.sparse_row_grad(work.features, work.tables, work.table, work.csr, scale, work.grad)
    arguments = table, work.group.tables, features, csr, numbers(scale), grad
    sums, magnitudes = (reference.row_sums(*arguments, absolute) for absolute in (False, True))
    assert len(found) == len(work.group.tables)
    for number, (rows, g) in enumerate(found):
        assert numbers(rows).tolist() == sorted(row for table, row in sums if table == number)
        # in the type that gradients are given in
        for row, actual in zip(numbers(rows).tolist(), numbers(g.to(work.table.dtype)), strict=True):
            bound = sum_bound(sums[number, row], magnitudes[number, row], work.case.dtype, work.longest)
            assert_close(actual, sums[number, row], bound, f"row {row} of table {number}")


def check_prepared(work: Workload, backend: Backend, shards: Shards | None = None) -> None:
    """`prepare_ids`, to the last bit."""
    _, features, csr, _ = work.judged()
    made = backend.prepare_ids(work.features, work.csr, shards, "drop")
    expected = reference.prepare_ids(features, csr, *(() if shards is None else (numbers(shards[0]), *shards[1:])))
    for name, actual, right in zip(made._fields, made, expected, strict=True):
        assert (actual is None) == (right is None), name
        if actual is not None:
            assert_same_bits(numbers(actual), right, name)
            kind = work.csr.weights.dtype if name == "weights" and work.csr.weights is not None else torch.int64
            assert actual.dtype == kind, name
