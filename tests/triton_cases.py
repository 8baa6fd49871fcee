"""What the tests of the Triton backend share: batches, and a judge of plain float64 loops."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedfuse.optim import SGD, Optimizer
from embedfuse.optim.base import apply_rule
from embedfuse.plan import (
    ALIGNMENT,
    COLUMN,
    DIM,
    DROP_NONPOSITIVE_WEIGHTS,
    FLAGS,
    FROZEN,
    MOMENT,
    OFFSET,
    POWER,
    ROWS,
    T_DIM,
    T_OFFSET,
    T_ROWS,
    T_RULE,
    T_SLOT0,
    TABLE,
    PlannedFeature,
    plan_group,
)
from embedfuse.torch.backends import Csr, Update

pytest.importorskip("triton")

from embedfuse.kernels.configs import LookupConfig, UpdateConfig, power_of_two
from embedfuse.torch.backends.triton import INTERPRETED, TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
needs_kernels = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1 in the environment"
)

Array = NDArray[Any]
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SHAPES = [(7, 3), (4, 65), (5, 1), (6, 64), (3, 7)]
FEATURES = [(0, "mean"), (1, "sum"), (1, "sqrtn"), (2, "mean_by_count"), (3, "mean"), (4, "sqrtn"), (0, "sum")]


def small_update(widest: int) -> UpdateConfig:
    """Tiles so small that few ids have cut runs, several folds, and more segments than fit in one tile."""
    return UpdateConfig(
        keys=8, some=48, few=64, whole=24, window=16, chunk=8, block=16, parts=2, segments=4, warps=1, long=2, terms=2,
        long_warps=1, long_programs=3, join=2, join_warps=1, joiners=3, fold=2, narrow=4,
        block_d=max(power_of_two(widest), 4),
    )  # fmt: skip


def lookup_of(short: bool, lanes: int, block_d: int, turns: int = 1, group: int = 1, narrow: int = 1) -> TritonBackend:
    config = LookupConfig(short=short, lanes=lanes, block_d=block_d, warps=1, turns=turns, group=group, narrow=narrow)
    return TritonBackend(lookup=lambda widest, length: config, update=small_update)


SMALL = TritonBackend(update=small_update)
SINGLE = TritonBackend(update=lambda widest: dataclasses.replace(small_update(widest), segments=1))
ONE_WINDOW = TritonBackend(update=lambda widest: dataclasses.replace(small_update(widest), chunk=16))
"""Runs are cut between blocks only, as those of wide rows are."""
DEFAULT = TritonBackend()


@dataclasses.dataclass
class Case:
    """A batch, as the judge reads it (float64) and as the backend does."""

    features: Array
    tables: Array
    table: Array  # rounded to `dtype`
    ids: Array
    offsets: Array
    weights: Array | None
    bags: int
    records: int
    width: int
    dtype: torch.dtype

    def csr(self) -> Csr:
        weights = None if self.weights is None else put(self.weights, torch.float32)
        return Csr(put(self.ids), put(self.offsets), weights, self.bags)

    def on_device(self) -> Tensor:
        return put(self.table, self.dtype)


def put(values: Array, dtype: torch.dtype | None = None) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=DEVICE, dtype=dtype)


def get(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().cpu().double().numpy())


def make(
    shapes: Sequence[tuple[int, int]] = SHAPES, features: Sequence[tuple[int, str]] = FEATURES, bags: int = 4,
    longest: int = 4, weighted: bool = True, dtype: torch.dtype = torch.float32, kind: Any = np.int64, records: int = 1,
    flags: int = 0, seed: int = 0,
) -> Case:  # fmt: skip
    rng = np.random.default_rng(seed)
    group = plan_group(shapes, [PlannedFeature(table, combiner, flags) for table, combiner in features])
    count = records * len(features) * bags
    lengths = rng.integers(0, longest + 1, count)
    lengths[:: max(longest, 1) + 3] = 0
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    rows = np.repeat(np.tile(np.repeat(group.features[:, ROWS], bags), records), lengths)
    ids = rng.integers(0, np.maximum(rows, 1)).astype(kind)
    weights = rng.uniform(0.25, 2, len(ids)).astype(np.float32) if weighted else None
    table = torch.from_numpy(rng.normal(size=group.size)).to(dtype).double().numpy()
    return Case(group.features, group.tables, table, ids, offsets, weights, bags, records, group.width, dtype)


# --- the judge -----------------------------------------------------------------------------------------------------


def each_id(case: Case) -> Any:
    """(position, bag, feature, gradient row, id, weight) of every id that counts."""
    total = len(case.features) * case.bags
    for bag in range(len(case.offsets) - 1):
        feature = case.features[(bag % total) // case.bags]
        row = bag // total * case.bags + bag % case.bags
        for position in range(case.offsets[bag], case.offsets[bag + 1]):
            weight = 1.0 if case.weights is None else float(case.weights[position])
            number = int(case.ids[position])
            if number < 0 or number >= feature[ROWS]:
                continue
            if feature[FLAGS] & DROP_NONPOSITIVE_WEIGHTS and weight <= 0:
                continue
            yield position, bag, feature, row, number, weight


def row_of(case: Case, feature: Array, number: int) -> Array:
    start = feature[OFFSET] + number * feature[DIM]
    return case.table[start : start + feature[DIM]]


def judge_moments(case: Case) -> Array:
    total = np.zeros(len(case.offsets) - 1)
    for _, bag, feature, _, _, weight in each_id(case):
        total[bag] += weight ** feature[MOMENT]
    return total


def judge_scale(case: Case) -> Array:
    total = judge_moments(case)
    scale = np.ones_like(total)
    for bag in range(len(total)):
        power = case.features[bag // case.bags % len(case.features), POWER]
        if power:
            scale[bag] = total[bag] ** (-power / 2) if total[bag] else 0
    return scale


def judge_lookup(case: Case) -> tuple[Array, Array]:
    """The result, and the sum of the absolute values of its terms."""
    scale = judge_scale(case)
    out, size = np.zeros((2, case.bags, case.width))
    for _, bag, feature, row, number, weight in each_id(case):
        columns = slice(feature[COLUMN], feature[COLUMN] + feature[DIM])
        out[row, columns] += scale[bag] * weight * row_of(case, feature, number)
        size[row, columns] += np.abs(scale[bag] * weight * row_of(case, feature, number))
    return out, size


def judge_sums(case: Case, scale: Array, grad: Array, learns: Array | None = None) -> dict[tuple[int, int], Array]:
    """The gradient of every row in the batch: `[table, id]` → row."""
    sums: dict[tuple[int, int], Array] = {}
    for _, bag, feature, row, number, weight in each_id(case):
        if learns is not None and not learns[feature[TABLE]]:
            continue
        value = weight * scale[bag] * grad[row, feature[COLUMN] : feature[COLUMN] + feature[DIM]]
        key = int(feature[TABLE]), number
        sums[key] = sums.get(key, 0) + value
    return sums


def judge_gradient(case: Case, scale: Array, grad: Array) -> Array:
    """The gradient of the whole table."""
    expected = np.zeros(len(case.table))
    for (table, number), value in judge_sums(case, scale, grad).items():
        start = case.tables[table, T_OFFSET] + number * case.tables[table, T_DIM]
        expected[start : start + len(value)] = value
    return expected


def close(actual: Tensor, expected: Array, size: Array | float, dtype: torch.dtype = torch.float32) -> None:
    """Within a few roundings of the terms' size in float32, and one rounding to the storage type."""
    bound = 64 * EPSILON[torch.float32] * (np.abs(size) + 1e-3) + EPSILON[dtype] * np.abs(expected) + 1e-7
    error = np.abs(get(actual) - expected)
    assert not np.isnan(get(actual)).any()
    assert (error <= bound).all(), f"error {error.max()} where {bound.flat[error.argmax()]} is allowed"


def gradient(case: Case, layout: str = "plain", dtype: torch.dtype | None = None, seed: int = 1) -> Tensor:
    """An upstream gradient `[R * B, width]` with the strides that `layout` names."""
    rows, rng = case.records * case.bags, np.random.default_rng(seed)
    kind = dtype or case.dtype
    if layout == "transposed":
        return put(rng.normal(size=(case.width, rows)), kind).t()
    if layout == "one row":
        return put(rng.normal(size=(1, case.width)), kind).expand(rows, case.width)
    if layout == "one number":
        return put(rng.normal(size=(1, 1)), kind).expand(rows, case.width)
    if layout == "sliced":
        return put(rng.normal(size=(rows, case.width + 5)), kind)[:, 3:-2]
    return put(rng.normal(size=(rows, case.width)), kind)


def state_of(case: Case, optimizers: Sequence[Optimizer | None], steps: int = 3) -> tuple[Update, dict[int, Any]]:
    """An `Update` in which table `t` learns by `optimizers[t]`, and the slots of each table as `[V, D]` or `[V, 1]`."""
    rules = list(dict.fromkeys(o.kernel_class() for o in optimizers if o))
    tables, total = case.tables.copy(), 0
    slots: dict[int, Any] = {}
    flat: list[Array] = []
    for table, optimizer in enumerate(optimizers):
        tables[table, T_RULE] = FROZEN if optimizer is None else rules.index(optimizer.kernel_class())
        rows, dim = case.tables[table, T_ROWS], case.tables[table, T_DIM]
        slots[table] = []
        for number, slot in enumerate(optimizer.slots() if optimizer else ()):
            shape = (rows, dim if slot.per == "element" else 1)
            tables[table, T_SLOT0 + number] = total
            start = np.full(-(-shape[0] * shape[1] // ALIGNMENT) * ALIGNMENT, slot.initial + 0.25)
            slots[table].append((total, shape))
            flat.append(start)
            total += len(start)
    hyper = [(o or SGD()).hyper((o or SGD()).current_learning_rate()) for o in optimizers]
    update = Update(
        case.on_device(), put(case.features), put(tables), rules, put(np.concatenate([*flat, [0.0]]), torch.float32),
        put(np.array(hyper)), put(np.full(len(optimizers), steps)),
    )  # fmt: skip
    return update, slots


def check_update(
    backend: TritonBackend, case: Case, optimizers: Sequence[Optimizer | None], layout: str = "plain",
    grad_scale: float | None = None, skip: float | None = None, scaled: bool = True, grad_dtype: Any = None,
) -> None:  # fmt: skip
    update, slots = state_of(case, optimizers)
    if grad_scale is not None:
        update.grad_scale = torch.tensor(grad_scale, device=DEVICE)
    if skip is not None:
        update.skip = torch.tensor(skip, device=DEVICE)
    grad = gradient(case, layout, grad_dtype)
    scale = judge_scale(case).astype(np.float32) if scaled else np.zeros(0, np.float32)
    before = get(update.slots)
    backend.row_update(update, case.csr(), put(scale), grad)

    learns = np.array([o is not None and not skip for o in optimizers])
    sums = judge_sums(case, scale if scaled else np.ones(len(case.offsets) - 1), get(grad), learns)
    expected, after = case.table.copy(), before.copy()
    for (table, number), g in sums.items():
        optimizer = optimizers[table]
        assert optimizer is not None
        dim = case.tables[table, T_DIM]
        start = case.tables[table, T_OFFSET] + number * dim
        places = [slice(s + number * shape[1], s + (number + 1) * shape[1]) for s, shape in slots[table]]
        w, new = apply_rule(
            optimizer.kernel_class(), expected[None, start : start + dim], g[None] * (grad_scale or 1),
            tuple(before[None, place] for place in places), optimizer.hyper(optimizer.current_learning_rate()), 3, np,
        )  # fmt: skip
        expected[start : start + dim] = w[0]
        for place, value in zip(places, new, strict=True):
            after[place] = value[0]
    close(update.table, expected, 8.0, case.dtype)
    close(update.slots, after, np.abs(after) + 8)
