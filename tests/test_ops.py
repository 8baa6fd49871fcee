"""Every op of every backend on every case and type, against the judge (`embedfuse.reference`)."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, Case, Workload, build, each, numbers, one, update_of
from checks import (
    check_coefficient_grad,
    check_lookup,
    check_max,
    check_prepared,
    check_row_grad,
    check_row_grad_with_dots,
    check_sparse_row_grad,
    check_square_sum,
    check_update,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import assert_close, sum_bound
from torch import Tensor

from embedfuse.combiners import COMBINERS
from embedfuse.optim import FTRL, OPTIMIZERS, SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from embedfuse.plan import DROP_NEGATIVE_IDS, DROP_NONPOSITIVE_WEIGHTS, PlannedFeature
from embedfuse.torch.backends import Backend, BadId, Shards

DTYPES = ("float32", "bfloat16", "float16", "float64")
SLOW = {"cut_wide", "wide", "very_wide", "zipf", "many_tables", "hot_row", "same_row"}
"""Not for the interpreter."""
FEW = {"dropping", "no_ids", "cut"}
"""What the interpreter has time for in types other than float32."""


@cache
def _drawn(case: Case, device: str, records: int = 1) -> Workload:
    return build(case, device, records)


def draw(case: Case, device: str, records: int = 1) -> Workload:
    """A case with numbers, to be written at will."""
    drawn = _drawn(case, device, records)
    return replace(drawn, table=drawn.table.clone())


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest, backend: Backend, device: str) -> str:
    """Each storage type that the backend serves."""
    reason = backend.supports(torch.device(device), getattr(torch, request.param))
    if reason:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(params=list(CASES))
def work(request: pytest.FixtureRequest, dtype: str, device: str, interpreted: bool) -> Workload:
    """Each case in each type."""
    if interpreted and (request.param in SLOW or (dtype != "float32" and request.param not in FEW)):
        pytest.skip("too slow in the interpreter")
    return draw(replace(CASES[request.param], dtype=dtype), device)


def some_optimizers(count: int) -> list[Optimizer | None]:
    """One a table, of all kinds of state, the last one frozen if there are several."""
    kinds = [Adagrad(0.1), RowWiseAdagrad(0.1), SGD(0.1), SGD(0.1, momentum=0.9)]
    chosen: list[Optimizer | None] = [kinds[i % len(kinds)] for i in range(count)]
    return [*chosen[:-1], None] if count > 2 else chosen


def test_pooled_lookup(work: Workload, backend: Backend) -> None:
    check_lookup(work, backend)


def test_row_grad(work: Workload, backend: Backend) -> None:
    check_row_grad(work, backend)


def test_row_grad_with_dots(work: Workload, backend: Backend) -> None:
    check_row_grad_with_dots(work, backend)


def test_sparse_row_grad(work: Workload, backend: Backend) -> None:
    check_sparse_row_grad(work, backend)


@pytest.mark.parametrize("shape", [(1, 0), (1, 5), (3, 7), (70, 2), (2, 1100)])
def test_join_offsets(shape: tuple[int, int], backend: Backend, device: str) -> None:
    lengths = torch.randint(0, 4, shape, device=device)
    offsets = torch.nn.functional.pad(lengths.cumsum(1), (1, 0))
    joined = backend.join_offsets(offsets)
    assert torch.equal(joined, torch.nn.functional.pad(lengths.reshape(-1).cumsum(0), (1, 0)))


def test_coefficient_grad(work: Workload, backend: Backend) -> None:
    check_coefficient_grad(work, backend)


def test_row_square_sum(work: Workload, backend: Backend) -> None:
    check_square_sum(work, backend, update_of(work, some_optimizers(len(work.case.tables))))


def test_row_update(work: Workload, backend: Backend) -> None:
    check_update(work, backend, some_optimizers(len(work.case.tables)))


def test_max(work: Workload, backend: Backend) -> None:
    check_max(work, backend)


def test_prepare_ids(work: Workload, backend: Backend) -> None:
    check_prepared(work, backend)


@pytest.mark.parametrize("modulo", [False, True])
@pytest.mark.parametrize("sizes", [(7,), (3, 2, 2), (1, 5, 0, 9), (2, 2, 2, 2, 2, 1), (6, 1, 3)])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_prepare_ids_of_shards(sizes: tuple[int, ...], modulo: bool, index: Any, backend: Backend, device: str) -> None:
    work, shards = sharded(sizes, modulo, index, device)
    check_prepared(work, backend, shards)


@pytest.mark.parametrize("policy", ["raise", "ignore"])
@pytest.mark.parametrize("modulo", [False, True])
def test_prepare_ids_tells_the_first_bad_one(modulo: bool, policy: Any, backend: Backend, device: str) -> None:
    work, shards = sharded((4, 1, 3), modulo, "int64", device)
    # with `modulo`, id 4 is row 1 of the shard that has one
    work.csr.ids.copy_(torch.tensor([0, 4, 8, -1, 3]) if modulo else torch.tensor([0, 7, 8, 9, -1]))
    position = 1 if modulo else 2
    if policy == "ignore":
        made = backend.prepare_ids(work.features, work.csr, shards, policy)
        assert numbers(made.rows)[numbers(made.places)].tolist()[position] == -1
    elif device == "cpu":
        with pytest.raises(BadId) as caught:
            backend.prepare_ids(work.features, work.csr, shards, policy)
        assert caught.value.position == position
    work.csr.ids.fill_(0)
    backend.prepare_ids(work.features, work.csr, shards, policy)


def sharded(sizes: tuple[int, ...], modulo: bool, index: Any, device: str) -> tuple[Workload, Shards]:
    """Ids of one table, some absent, and where its shards lie, out of order and with gaps."""
    dim, rows = 3, sum(sizes)
    lengths = (1, 1) if rows == 8 else (0, 4)
    feature = one(0, "mean", 0 if rows == 8 else DROP_NEGATIVE_IDS, 1)
    case = Case("sharded", ((rows, dim),), (feature,), bags=5 if rows == 8 else 9, lengths=lengths, absent=0.2,
                index=index)  # fmt: skip
    described = torch.zeros(len(sizes), 3, dtype=torch.int64)
    described[:, 1] = torch.tensor(sizes)
    described[:, 0] = described[:, 1].cumsum(0) - described[:, 1]
    described[:, 2] = torch.arange(len(sizes)).flip(0) * 1000 + 7
    return draw(case, device), Shards(described.to(device), modulo, 5)


# --- several records, other gradients ------------------------------------------------------------------------------


@pytest.fixture(params=["shared_table", "weighted_means", "many_features", "absent", "no_bags"])
def records(request: pytest.FixtureRequest, device: str) -> Workload:
    """Three lookups that are to be updated together."""
    return draw(CASES[request.param], device, records=3)


def test_row_grad_of_several_records(records: Workload, backend: Backend) -> None:
    check_row_grad(records, backend)


def test_update_of_several_records(records: Workload, backend: Backend) -> None:
    optimizers = some_optimizers(len(records.case.tables))
    check_update(records, backend, optimizers)
    check_square_sum(records, backend, update_of(records, optimizers))


def _expanded(grad: Tensor) -> Tensor:
    return torch.ones((), dtype=grad.dtype, device=grad.device).expand(grad.shape)


def _every_other(grad: Tensor) -> Tensor:
    return grad.repeat_interleave(2, 1).repeat_interleave(2, 0)[::2, ::2]


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": _expanded,
    "one row for all": lambda grad: grad[:1].expand(grad.shape),
    "one column for all": lambda grad: grad[:, :1].expand(grad.shape),
    "transposed": lambda grad: grad.t().contiguous().t(),
    "every other": _every_other,
    "part of a wider one": lambda grad: torch.nn.functional.pad(grad, (3, 5), value=torch.nan)[:, 3:-5],
    "float32": lambda grad: grad.float(),
    "float64": lambda grad: grad.double(),
    "bfloat16": lambda grad: grad.bfloat16(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_gradient_of_any_strides_and_type(
    form: str, kind: str, backend: Backend, device: str, interpreted: bool
) -> None:
    if interpreted and kind != "float32" and form != "float32":
        pytest.skip("too slow in the interpreter")
    case = Case("two", ((5, 3), (4, 6)), (one(0, "mean"), one(1, "sqrtn")), 4, weights="positive", dtype=kind)
    work = draw(case, device)
    work = replace(work, grad=FORMS[form](work.grad))
    check_row_grad(work, backend)
    check_coefficient_grad(work, backend)
    if interpreted:
        return
    check_square_sum(work, backend, update_of(work, some_optimizers(2)))
    # a step may differ by rounding: a GPU's compiler fuses other operations for other strides
    tables = []
    for grad in (work.grad, work.grad.contiguous()):
        update = update_of(replace(work, table=work.table.clone()), some_optimizers(2))
        backend.row_update(update, work.csr, torch.ones(8, device=device), grad)
        tables.append(numbers(update.table))
    magnitude = np.nan_to_num(np.abs(tables[1])) + 1
    assert_close(*tables, 2 * sum_bound(magnitude, magnitude, kind, work.longest), "table")


@pytest.mark.parametrize("form", FORMS)
def test_max_with_gradient_of_any_strides_and_type(form: str, backend: Backend, device: str) -> None:
    work = draw(CASES["means"], device)
    check_max(replace(work, grad=FORMS[form](work.grad)), backend)


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_row_grad_into_another_type_than_the_gradient(into: torch.dtype, backend: Backend, device: str) -> None:
    check_row_grad(draw(replace(CASES["means"], dtype="bfloat16"), device), backend, into)


# --- optimizers ----------------------------------------------------------------------------------------------------

VARIANTS: dict[str, list[Optimizer]] = {
    "SGD": [SGD(0.1), SGD(0.1, momentum=0.9), SGD(0.1, momentum=0.9, nesterov=True)],
    "Adam": [Adam(0.1), Adam(0.1, sum_inside_sqrt=False), Adam(0.1, bias_correction=True)],
    "FTRL": [
        FTRL(0.1, l1_regularization_strength=0.2, l2_regularization_strength=0.1, beta=0.1),
        FTRL(0.1, learning_rate_power=-0.3, l2_shrinkage_regularization_strength=0.1),
        FTRL(0.1, multiply_linear_by_learning_rate=True),
    ],
}
"""More than the defaults, by class."""
COMMON = [
    Adagrad(0.1, clip_weight_min=-0.2, clip_weight_max=0.3),
    Adagrad(0.1, weight_decay_factor=0.25),
    RowWiseAdagrad(0.1, weight_decay_factor=0.5, multiply_weight_decay_factor_by_learning_rate=True),
    SGD(0.1, clipvalue=0.5),
    SGD(0.1, clipvalue=(None, 0.4)),
]
"""Settings that all optimizers share."""
SOLVERS = [solver for name, kind in OPTIMIZERS.items() for solver in VARIANTS.get(name, [kind(0.1)])] + COMMON


def _names(solver: Optimizer) -> str:
    changed = {k: v for k, v in solver.describe().items() if v != type(solver)().describe()[k]}
    return "-".join([type(solver).__name__, *(f"{k}={v}" for k, v in changed.items() if k != "learning_rate")])


@pytest.mark.parametrize("solver", SOLVERS, ids=_names)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
def test_optimizer(solver: Optimizer, kind: str, backend: Backend, device: str, interpreted: bool) -> None:
    reason = backend.supports(torch.device(device), getattr(torch, kind))
    if reason or (interpreted and kind != "float32"):
        pytest.skip(reason or "too slow in the interpreter")
    case = Case("two", ((4, 5), (3, 63)), (one(0, "mean"), one(1)), 3, dtype=kind)
    check_update(draw(case, device), backend, [solver, solver], steps=1 if interpreted else 3)


def test_tables_with_different_optimizers(backend: Backend, device: str) -> None:
    optimizers: list[Optimizer | None] = [kind(0.1) for kind in OPTIMIZERS.values()]
    tables = tuple((4, 3 + i) for i in range(len(optimizers)))
    check_update(draw(Case("all kinds", tables, each(len(tables)), 2), device), backend, optimizers)


def test_grad_scale(backend: Backend, device: str) -> None:
    check_update(draw(CASES["means"], device), backend, some_optimizers(3), grad_scale=0.125)
    check_update(draw(CASES["means"], device), backend, some_optimizers(3), grad_scale=0.5, skip=0.0)


@pytest.mark.parametrize("skip", [1.0, -0.5, np.inf])
def test_skip_leaves_every_bit(skip: float, backend: Backend, device: str) -> None:
    work = draw(CASES["means"], device)
    work.grad[0] = torch.inf
    update = update_of(work, some_optimizers(3))
    table, slots = update.table.clone(), update.slots.clone()
    update.skip = torch.tensor(skip, device=device)
    backend.row_update(update, work.csr, torch.ones(12, device=device), work.grad)
    assert torch.equal(update.table.nan_to_num(), table.nan_to_num())
    assert torch.equal(update.slots.nan_to_num(), slots.nan_to_num())


@pytest.mark.parametrize("skip", [None, 0.0, 1.0, float("inf")])
@pytest.mark.parametrize("bags", [0, 2])
def test_the_step_is_counted_first(skip: float | None, bags: int, backend: Backend, device: str) -> None:
    # more tables than one block of the kernel that counts
    features = (one(1), one(1099, "mean"))
    work = build(Case("counted", ((3, 2),) * 1100, features, bags), device)
    solvers: list[Optimizer | None] = [Adam(0.1) if number % 3 else None for number in range(1100)]
    update = update_of(work, solvers, step=4)
    update.counted = torch.tensor([number % 3 != 0 for number in range(1100)], device=device).long()
    update.skip = None if skip is None else torch.tensor(skip, device=device)
    moves = not skip
    expected = update_of(replace(work, table=work.table.clone()), solvers, step=5)
    scale = torch.ones(len(features) * bags, device=device)
    if moves:
        backend.row_update(expected, work.csr, scale, work.grad)
    before = update.steps.clone()
    backend.row_update(update, work.csr, scale, work.grad)
    torch.testing.assert_close(update.steps, before + moves * update.counted)
    torch.testing.assert_close(update.table, expected.table, rtol=0, atol=0, equal_nan=True)


# --- whatever comes ------------------------------------------------------------------------------------------------


@st.composite
def _cases(draws: st.DrawFn) -> Case:
    tables = draws(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=4))
    flags = st.sampled_from([0, DROP_NEGATIVE_IDS, DROP_NONPOSITIVE_WEIGHTS, 3])
    feature = st.builds(PlannedFeature, st.integers(0, len(tables) - 1), st.sampled_from(list(COMBINERS)), flags)
    features = draws(st.lists(feature, min_size=1, max_size=5))
    return Case(
        "random", tuple(tables), tuple(features), bags=draws(st.integers(0, 5)),
        lengths=draws(st.sampled_from([(0, 1), (-3, 2), (0, 5), (70, 140)])),
        ids=draws(st.sampled_from(["uniform", "zipf", "hot"])),
        weights=draws(st.sampled_from(["none", "positive", "signed"])),
        absent=draws(st.sampled_from([0.0, 0.2])), index=draws(st.sampled_from(["int32", "int64"])),
        dtype=draws(st.sampled_from(["float32", "bfloat16", "float16"])),
    )  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=_cases(), seed=st.integers(0, 9), records=st.integers(1, 2))
def test_random_cases(case: Case, seed: int, records: int, backend: Backend, device: str, interpreted: bool) -> None:
    if interpreted:
        pytest.skip("too slow in the interpreter")
    work = build(case, device, seed=seed)
    check_lookup(work, backend)
    check_coefficient_grad(work, backend)
    check_max(work, backend)
    work = build(case, device, records, seed)
    check_row_grad(work, backend)
    check_update(work, backend, some_optimizers(len(case.tables)))
