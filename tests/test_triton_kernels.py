"""The Triton backend against plain float64 loops: on a GPU where there is one, else in Triton's interpreter.

Without a GPU these need TRITON_INTERPRET=1 in the environment before anything imports embedfuse.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedfuse.optim import FTRL, SGD, Adagrad, Adam, AdamW, Optimizer, RowWiseAdagrad
from embedfuse.optim.base import apply_rule
from embedfuse.plan import (
    ALIGNMENT,
    COLUMN,
    DIM,
    DROP_NEGATIVE_IDS,
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
from embedfuse.torch.backends import BadId, Csr, Update

pytest.importorskip("triton")

from embedfuse.kernels.configs import LookupConfig, UpdateConfig, lookup_config, power_of_two, update_config
from embedfuse.torch.backends import device_errors
from embedfuse.torch.backends.triton import INTERPRETED, TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1 in the environment"
)

Array = NDArray[Any]
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SHAPES = [(7, 3), (4, 65), (5, 1), (6, 64), (3, 7)]
FEATURES = [(0, "mean"), (1, "sum"), (1, "sqrtn"), (2, "mean_by_count"), (3, "mean"), (4, "sqrtn"), (0, "sum")]


def small_update(widest: int) -> UpdateConfig:
    """Tiles so small that few ids have cut runs, several folds, and more segments than fit in one tile."""
    return UpdateConfig(
        chunk=4, block=16, parts=2, segments=4, warps=1, join=2, join_warps=1, fold=2, edges=2,
        block_d=max(power_of_two(widest), 4),
    )  # fmt: skip


def lookup_of(short: bool, lanes: int, block_d: int) -> TritonBackend:
    config = LookupConfig(short=short, lanes=lanes, block_d=block_d, warps=1)
    return TritonBackend(lookup=lambda widest, length: config, update=small_update)


SMALL = TritonBackend(update=small_update)
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


# --- lookups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [
    lookup_of(True, 4, 32), lookup_of(False, 4, 128), lookup_of(False, 2, 32), DEFAULT,
], ids=["short", "long", "narrow", "default"])  # fmt: skip
@pytest.mark.parametrize("weighted", [True, False])
def test_pooled_lookup(backend: TritonBackend, weighted: bool) -> None:
    case = make(weighted=weighted)
    out, scale = backend.pooled_lookup(
        case.on_device(), put(case.features), case.csr(), case.width, True, "raise"
    )
    expected, size = judge_lookup(case)
    close(out, expected, size)
    close(scale, judge_scale(case), judge_scale(case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("short", [True, False])
def test_pooled_lookup_of_16_bit_tables(dtype: torch.dtype, short: bool) -> None:
    case = make(shapes=[(9, 8), (5, 16)], features=[(0, "mean"), (1, "sum")], dtype=dtype, kind=np.int32)
    out, scale = lookup_of(short, 4, 16).pooled_lookup(
        case.on_device(), put(case.features), case.csr(), case.width, True, "raise"
    )
    assert out.dtype == dtype and scale.dtype == torch.float32
    expected, size = judge_lookup(case)
    close(out, expected, size, dtype)


@pytest.mark.parametrize("short", [True, False])
def test_without_a_combiner_there_is_no_scale(short: bool) -> None:
    case = make(features=[(1, "sum"), (3, "sum")], weighted=False)
    out, scale = lookup_of(short, 4, 128).pooled_lookup(
        case.on_device(), put(case.features), case.csr(), case.width, False, "raise"
    )
    assert scale.shape == (0,)
    expected, size = judge_lookup(case)
    close(out, expected, size)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("flags", [0, DROP_NEGATIVE_IDS, DROP_NEGATIVE_IDS | DROP_NONPOSITIVE_WEIGHTS])
def test_absent_ids_add_nothing(short: bool, flags: int) -> None:
    case = make(flags=flags)
    assert case.weights is not None
    case.ids[::3] = [-1, -7, 9, 1000][flags] if flags < 3 else -3
    case.ids[1::7] = 2**40
    case.weights[::4] = 0
    case.weights[1::4] *= -1
    out, scale = lookup_of(short, 4, 128).pooled_lookup(
        case.on_device(), put(case.features), case.csr(), case.width, True, "drop"
    )
    # weights of both signs can cancel under a root of a negative number, which is no number for the judge either
    scale_expected = judge_scale(case)
    expected, size = judge_lookup(case)
    known = ~np.isnan(expected)
    assert (np.isnan(get(out)) == ~known).all() and (np.isnan(get(scale)) == np.isnan(scale_expected)).all()
    close(out[torch.from_numpy(known).to(DEVICE)], expected[known], size[known])


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU reports later")
def test_bad_ids_are_named(short: bool) -> None:
    case = make(flags=DROP_NEGATIVE_IDS, longest=3)
    backend = lookup_of(short, 2, 128)
    case.ids[5] = -1
    arguments = (case.on_device(), put(case.features), case.csr(), case.width, True, "raise")
    backend.pooled_lookup(*arguments)  # type: ignore[arg-type]
    case.ids[-1], case.ids[12], case.ids[20] = 99, 99, 99
    arguments = (case.on_device(), put(case.features), case.csr(), case.width, True, "raise")
    with pytest.raises(BadId) as caught:
        backend.pooled_lookup(*arguments)  # type: ignore[arg-type]
    assert caught.value.position == 12


def test_a_bad_id_is_encoded_with_its_feature() -> None:
    assert device_errors.decode(0) is None
    assert device_errors.decode(((2**40 - 1 - 12) << 20) | 3) == (12, 3)


def test_empty_batches() -> None:
    none = make(bags=0, longest=0)
    out, scale = DEFAULT.pooled_lookup(none.on_device(), put(none.features), none.csr(), none.width, True, "raise")
    assert out.shape == (0, none.width) and scale.shape == (0,)
    case = make(longest=0)
    out, scale = DEFAULT.pooled_lookup(case.on_device(), put(case.features), case.csr(), case.width, True, "raise")
    assert not out.any() and scale.shape == (len(FEATURES) * case.bags,)
    flat = torch.zeros(len(case.table), device=DEVICE)
    for empty in (none, case):
        DEFAULT.row_grad(flat, put(empty.features), empty.csr(), scale[:0], gradient(empty))
        assert DEFAULT.coefficient_grad(
            empty.on_device(), put(empty.features), empty.csr(), scale[:0], gradient(empty)
        ).shape == (0,)
    assert not flat.any()


def test_tables_need_not_lie_in_one_tensor() -> None:
    case = make(features=[(0, "sum"), (3, "sum")])
    first = case.table[: 7 * 3]
    last = case.table[case.tables[3, T_OFFSET] :][: 6 * 64]
    parts = [put(first, torch.float32), put(last, torch.float32)]
    features = case.features.copy()
    features[0, OFFSET] = (parts[0].data_ptr() - parts[1].data_ptr()) // 4
    features[1, OFFSET] = 0
    out, _ = DEFAULT.pooled_lookup(parts[1], put(features), case.csr(), case.width, False, "raise")
    close(out, *judge_lookup(case))


# --- sums by row ---------------------------------------------------------------------------------------------------


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


OPTIMIZERS: list[Optimizer] = [
    SGD(0.1), SGD(0.1, momentum=0.9), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), AdamW(0.1), FTRL(0.1),
    Adagrad(0.1, clipvalue=0.5, weight_decay_factor=0.1, clip_weight_min=-0.5, clip_weight_max=0.4),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_row_update(optimizer: Optimizer) -> None:
    check_update(SMALL, make(), [optimizer] * 5)


def test_row_update_with_several_rules_and_frozen_tables() -> None:
    own = [Adagrad(0.1), RowWiseAdagrad(0.2), None, SGD(0.3), Adagrad(0.4, epsilon=0.1)]
    check_update(SMALL, make(seed=2), own)
    check_update(SMALL, make(seed=3), [None, None, SGD(0.1), None, None])
    check_update(SMALL, make(seed=3), [None] * 5)


@pytest.mark.parametrize("layout", ["transposed", "one row", "one number", "sliced"])
def test_row_update_takes_any_strides(layout: str) -> None:
    check_update(SMALL, make(seed=4, longest=3), [RowWiseAdagrad(0.1)] * 5, layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_row_update_of_16_bit_tables(dtype: torch.dtype) -> None:
    case = make(shapes=[(9, 8), (5, 16)], features=[(0, "mean"), (1, "sum")], dtype=dtype, kind=np.int32)
    check_update(SMALL, case, [Adagrad(0.1), RowWiseAdagrad(0.1)])
    check_update(SMALL, case, [Adagrad(0.1), RowWiseAdagrad(0.1)], grad_dtype=torch.float32)


def test_row_update_joins_records() -> None:
    check_update(SMALL, make(records=2, bags=2, longest=3), [Adagrad(0.1)] * 5)


def test_row_update_without_weights_or_scale() -> None:
    check_update(SMALL, make(weighted=False), [SGD(0.1)] * 5)
    check_update(SMALL, make(weighted=False, features=[(0, "sum"), (3, "sum")]), [SGD(0.1)] * 5, scaled=False)
    check_update(SMALL, make(features=[(0, "sum"), (3, "sum")]), [SGD(0.1)] * 5, scaled=False)


@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_row_update_with_a_scale_for_the_gradient(skip: float | None) -> None:
    check_update(SMALL, make(longest=3), [RowWiseAdagrad(0.1)] * 5, grad_scale=0.125, skip=skip)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_row_update_of_rows_that_hold_the_batch(rows: int) -> None:
    # runs of many chunks: whole folds of them, the windows around, and cut runs side by side
    case = make(shapes=[(rows, 5)], features=[(0, "sum")], bags=30, longest=6, seed=rows)
    check_update(SMALL, case, [RowWiseAdagrad(0.01)])


def test_row_update_with_the_default_tiles() -> None:
    case = make(shapes=[(3, 33), (40, 4)], features=[(0, "mean"), (1, "sum")], bags=40, longest=4)
    check_update(DEFAULT, case, [RowWiseAdagrad(0.1), Adagrad(0.1)])


def test_row_update_leaves_bad_ids_alone() -> None:
    case = make(flags=DROP_NONPOSITIVE_WEIGHTS)
    assert case.weights is not None
    case.ids[::3], case.ids[1::5] = -1, 50
    case.weights[::4] = 0
    check_update(SMALL, case, [Adagrad(0.1)] * 5)


def test_row_grad() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = make(dtype=dtype, bags=3)
        scale = judge_scale(case).astype(np.float32)
        grad = gradient(case)
        out = torch.zeros(len(case.table), dtype=dtype, device=DEVICE)
        SMALL.row_grad(out, put(case.features), case.csr(), put(scale), grad)
        expected = np.zeros(len(case.table))
        for (table, number), g in judge_sums(case, scale, get(grad)).items():
            start = case.tables[table, T_OFFSET] + number * case.tables[table, T_DIM]
            expected[start : start + len(g)] = g
        close(out, expected, 16.0, dtype)


def test_row_square_sum() -> None:
    case = make(shapes=[(2, 3), (9, 5)], features=[(0, "mean"), (1, "sum")], bags=12, longest=4)
    for optimizers in ([SGD(), SGD()], [None, SGD()], [None, None]):
        update, _ = state_of(case, optimizers)
        # neither plays a part
        update.grad_scale, update.skip = torch.tensor(0.5, device=DEVICE), torch.tensor(1.0, device=DEVICE)
        scale = judge_scale(case).astype(np.float32)
        grad = gradient(case)
        total = SMALL.row_square_sum(update, case.csr(), put(scale), grad)
        learns = np.array([o is not None for o in optimizers])
        expected = sum((float((g * g).sum()) for g in judge_sums(case, scale, get(grad), learns).values()), 0.0)
        assert total.shape == () and total.dtype == torch.float32
        assert float(total) == pytest.approx(expected, rel=1e-5)


# --- gradients of coefficients and of maxima -----------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("layout", ["plain", "transposed", "one number"])
def test_coefficient_grad(weighted: bool, layout: str) -> None:
    case = make(weighted=weighted, longest=10, bags=2)
    case.ids[::6] = -1
    scale, moments = judge_scale(case).astype(np.float32), judge_moments(case)
    grad = gradient(case, layout)
    actual = DEFAULT.coefficient_grad(case.on_device(), put(case.features), case.csr(), put(scale), grad)
    expected, products = np.zeros(len(case.ids)), {}
    shared = np.zeros(len(moments))
    for position, bag, feature, row, number, weight in each_id(case):
        columns = slice(feature[COLUMN], feature[COLUMN] + feature[DIM])
        products[position] = row_of(case, feature, number) @ get(grad)[row, columns]
        shared[bag] += weight * products[position]
    for position, bag, feature, _, _, weight in each_id(case):
        p, q = int(feature[MOMENT]), int(feature[POWER])
        expected[position] = scale[bag] * products[position]
        if p and q and moments[bag]:
            slope = q / 2 * p * weight ** (p - 1) / moments[bag]
            expected[position] -= slope * scale[bag] * shared[bag]
    close(actual, expected, 64.0)


def test_max_lookup_and_its_gradient() -> None:
    case = make(shapes=[(6, 7), (4, 33)], features=[(0, "sum"), (1, "sum"), (1, "sum")], bags=4, longest=5)
    # few values, so that rows tie, and a NaN
    case.table = np.round(case.table)
    case.table[case.ids[2] * 7 + 1] = np.nan
    assert case.weights is not None
    case.weights = np.exp2(np.round(case.weights))
    case.ids[::7] = -1
    out, winners = SMALL.max_lookup(case.on_device(), put(case.features), case.csr(), case.width, "drop")
    expected, winner = np.zeros((case.bags, case.width)), np.full((case.bags, case.width), -1)
    for position, _, feature, row, number, weight in each_id(case):
        for place in range(feature[DIM]):
            value, column = weight * row_of(case, feature, number)[place], feature[COLUMN] + place
            best = expected[row, column]
            if winner[row, column] < 0 or value > best or (np.isnan(value) and not np.isnan(best)):
                expected[row, column], winner[row, column] = value, position
    assert np.isnan(expected).any() and np.array_equal(get(out), expected, equal_nan=True)
    assert (get(winners) == winner).all()

    for layout in ("plain", "transposed"):
        grad = gradient(case, layout)
        flat = torch.zeros(len(case.table), device=DEVICE)
        SMALL.max_grad(flat, put(case.features), case.csr(), winners, grad)
        sums = np.zeros(len(case.table))
        for position, _, feature, row, number, weight in each_id(case):
            for place in range(feature[DIM]):
                if winner[row, feature[COLUMN] + place] == position:
                    start = feature[OFFSET] + number * feature[DIM]
                    sums[start + place] += weight * get(grad)[row, feature[COLUMN] + place]
        close(flat, sums, 8.0)


# --- what holds for all --------------------------------------------------------------------------------------------


def test_results_repeat_bit_for_bit() -> None:
    case = make(shapes=[(2, 9), (30, 6)], features=[(0, "mean"), (1, "sum")], bags=5)
    grad, results = gradient(case), []
    for _ in range(2):
        update, _ = state_of(case, [Adagrad(0.1), RowWiseAdagrad(0.1)])
        out, scale = SMALL.pooled_lookup(update.table, update.features, case.csr(), case.width, True, "raise")
        SMALL.row_update(update, case.csr(), scale, grad)
        results.append((out, scale, update.table, update.slots))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_is_served() -> None:
    assert DEFAULT.supports(DEVICE, torch.bfloat16) is None
    assert "float64" in str(DEFAULT.supports(DEVICE, torch.float64))
    assert DEFAULT.supports(torch.device("meta"), torch.float32)


@pytest.mark.parametrize("widest", [1, 2, 3, 16, 63, 64, 128, 144, 288, 512, 1000, 4096, 8192, 40000])
def test_tile_sizes_fit_together(widest: int) -> None:
    for length in (0.5, 4, 5, 100):
        lookup = lookup_config(widest, length)
        assert lookup.short == (length <= 4)
    update = update_config(widest)
    assert update.block_d >= widest and update.block % update.chunk == 0
    for size in (lookup.lanes, lookup.block_d, lookup.warps, *dataclasses.astuple(update)):
        assert size == power_of_two(size)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_gpu_reports_bad_ids_at_a_later_call() -> None:
    case = make(longest=3)
    arguments = (case.on_device(), put(case.features))
    DEFAULT.pooled_lookup(*arguments, case.csr(), case.width, True, "raise")
    device_errors.report(DEVICE, wait=True)
    case.ids[9] = 1000
    DEFAULT.pooled_lookup(*arguments, case.csr(), case.width, True, "raise")
    with pytest.raises(device_errors.LateBadId) as caught:
        device_errors.report(DEVICE, wait=True)
    assert caught.value.position == 9
    device_errors.report(DEVICE, wait=True)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_nothing_is_compiled_anew_when_the_batch_changes() -> None:
    from embedfuse.kernels.pooled_lookup import pooled_long_kernel, pooled_short_kernel
    from embedfuse.kernels.row_update import join_kernel, segments_kernel
    from embedfuse.kernels.runs import key_kernel, segment_kernel

    kernels = (pooled_long_kernel, pooled_short_kernel, segments_kernel, join_kernel, key_kernel, segment_kernel)
    counts = []
    for bags in (16, 17, 160, 1, 333):
        case = make(features=[(3, "mean"), (1, "sum")], bags=bags, longest=3)
        update, _ = state_of(case, [Adagrad(0.1)] * 5)
        _, scale = DEFAULT.pooled_lookup(update.table, update.features, case.csr(), case.width, True, "raise")
        DEFAULT.row_update(update, case.csr(), scale, gradient(case))
        counts.append(sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()))
    assert counts[-1] == counts[1]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_graph_can_be_captured() -> None:
    case = make(bags=64, longest=5)
    update, _ = state_of(case, [Adagrad(0.1)] * 5)
    csr, grad, start = case.csr(), gradient(case), update.table.clone()
    slots = update.slots.clone()

    def work() -> Tensor:
        out, scale = DEFAULT.pooled_lookup(update.table, update.features, csr, case.width, True, "raise")
        DEFAULT.row_update(update, csr, scale, grad)
        return out

    work()
    expected = update.table.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    update.table.copy_(start)
    update.slots.copy_(slots)
    graph.replay()
    assert torch.equal(update.table, expected) and out.shape == (64, case.width)
