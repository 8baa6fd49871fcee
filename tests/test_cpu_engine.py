"""The native engine against float64 loops of its own: every op, type and rule, every instruction set, any threads."""

import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedfuse import cpu
from embedfuse.optim.base import OWN_HYPER, Optimizer, Slot
from embedfuse.plan import DEFAULT_ID, FEATURE_WIDTH, MAX_NORM, NO_MAX_NORM, STRIDE, T_SOURCE, TABLE_WIDTH, bits_of
from embedfuse.torch.backends import BadId, Csr, Prepared, Rows, Shards, Update
from embedfuse.torch.backends.cpu import BACKEND

Array = NDArray[Any]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DIMS = [1, 3, 7, 63, 64, 144]
COMBINERS = {"sum": (0, 0), "mean": (1, 2), "sqrtn": (2, 1), "mean_by_count": (0, 2)}  # (moment, power)
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-13}
DROP_NEGATIVE, DROP_NONPOSITIVE = 1, 2


# --- cases -----------------------------------------------------------------------------------------------------------


NUMERICAL = (
    "wide or convert or 4096 or many_tables or without_native or adam or ftrl or rowwise or cut"
    " or ((pooled_lookup or max_pooling or gradients) and True and not int32)"
)
"""The tests that are run again on lesser instruction sets."""


@dataclass
class Batch:
    """Tables, the features that read them, and a batch: what the engine is given, as NumPy sees it."""

    shapes: list[tuple[int, int]]
    features: Array
    tables: Array
    ids: Array
    offsets: Array
    weights: Array | None
    bags: int
    size: int  # elements of the arena

    @property
    def width(self) -> int:
        return int(self.features[:, 3].sum())

    @property
    def max_norms(self) -> list[float]:
        return [float(number) for number in self.tables[:, 8].copy().view(np.float64)]

    @property
    def records(self) -> int:
        return (len(self.offsets) - 1) // (len(self.features) * self.bags)

    def csr(self, dtype: torch.dtype) -> Csr:
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        weights = None if self.weights is None else torch.from_numpy(self.weights).to(kind)
        return Csr(torch.from_numpy(self.ids), torch.from_numpy(self.offsets), weights, self.bags)


def make_batch(
    shapes: list[tuple[int, int]],
    reads: list[tuple[int, str, int]],
    *,
    bags: int = 6,
    records: int = 1,
    longest: int = 9,
    weighted: bool = False,
    absent: bool = True,
    ids_dtype: Any = np.int64,
    max_norms: Sequence[float] = (),
    seed: int = 0,
) -> Batch:
    """`reads` are the features: table, combiner, flags. Many duplicates, some empty bags, some ids outside."""
    random = np.random.default_rng(seed)
    tables = np.zeros((len(shapes), TABLE_WIDTH), np.int64)
    offset, base = 5, 0
    for number, (rows, dim) in enumerate(shapes):
        longest_row = bits_of(max_norms[number]) if max_norms else NO_MAX_NORM
        tables[number] = offset, rows, dim, base, -1, 0, 0, offset, longest_row
        offset, base = offset + rows * dim + number, base + rows
    features = np.zeros((len(reads), FEATURE_WIDTH), np.int64)
    column = 0
    for number, (table, combiner, flags) in enumerate(reads):
        rows, dim = shapes[table]
        start, _, _, row_base = tables[table, :4]
        described = table, start, rows, dim, column, row_base, *COMBINERS[combiner], flags, dim, tables[table, 8], -1
        features[number] = described
        column += dim
    lengths = random.integers(0, longest + 1, records * len(reads) * bags)
    lengths[random.random(len(lengths)) < 0.2] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows_of = np.repeat(np.tile(np.repeat(features[:, 2], bags), records), lengths)
    ids = (random.random(len(rows_of)) ** 2 * rows_of).astype(ids_dtype)
    if absent:
        ids = np.where(random.random(len(ids)) < 0.1, random.choice([-1, -7, 10**6], len(ids)), ids).astype(ids_dtype)
    weights = random.normal(0.7, 1.0, len(ids)).astype(np.float32).astype(np.float64) if weighted else None
    return Batch(shapes, features, tables, ids, offsets, weights, bags, offset)


def random_tensor(shape: Any, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def close(actual: Tensor | Array, expected: Array, dtype: torch.dtype, scale: float = 4.0) -> None:
    """To a few roundings of `dtype`, relative to the largest value around."""
    found = actual.double().numpy() if isinstance(actual, Tensor) else actual
    bound = EPSILON[dtype] * scale
    np.testing.assert_allclose(
        found, expected, rtol=bound, atol=bound * max(1.0, float(np.abs(expected).max(initial=0)))
    )


# --- the judge -------------------------------------------------------------------------------------------------------


def counted(batch: Batch) -> list[tuple[int, int, int, int, float]]:
    """`(position, feature, bag, row of the output, weight)` of each id that counts."""
    found = []
    for bag in range(len(batch.offsets) - 1):
        record, feature, place = (
            bag // (len(batch.features) * batch.bags), bag // batch.bags % len(batch.features), bag % batch.bags
        )  # fmt: skip
        for position in range(batch.offsets[bag], batch.offsets[bag + 1]):
            weight = 1.0 if batch.weights is None else float(batch.weights[position])
            drops = batch.features[feature, 8] & DROP_NONPOSITIVE and weight <= 0
            if 0 <= batch.ids[position] < batch.features[feature, 2] and not drops:
                found.append((position, feature, bag, record * batch.bags + place, weight))
    return found


def judge_scale(batch: Batch) -> Array:
    total = np.zeros(len(batch.offsets) - 1)
    for _, feature, bag, _, weight in counted(batch):
        total[bag] += weight ** int(batch.features[feature, 6])
    scale = np.ones(len(total))
    for bag in range(len(total)):
        power = batch.features[bag // batch.bags % len(batch.features), 7]
        if power:
            scale[bag] = 0.0 if total[bag] == 0 else total[bag] ** (-power / 2)
    return scale


def cut(row: Array, max_norm: float) -> Array:
    length = np.sqrt(np.sum(row**2))
    return row * max_norm / length if length > max_norm else row


def judge_cut(batch: Batch, arena: Array, sums: dict[tuple[int, int], Array]) -> dict[tuple[int, int], Array]:
    """From gradients of cut rows to those of the rows: through the differential of `m e / ||e||`."""
    result = {}
    for (table, row), g in sums.items():
        start, m = int(batch.tables[table, 0]) + row * len(g), batch.max_norms[table]
        e = arena[start : start + len(g)]
        length = np.sqrt(e @ e)
        result[table, row] = m * (g / length - e * (e @ g) / length**3) if length > m else g
    return result


def cut_arena(batch: Batch, arena: Array) -> Array:
    """The tables with all their rows cut."""
    result = arena.copy()
    for (start, rows, dim), m in zip(batch.tables[:, :3].tolist(), batch.max_norms, strict=True):
        for row in result[start : start + rows * dim].reshape(rows, dim):
            row[:] = cut(row, m)
    return result


def row_of(batch: Batch, feature: int, position: int) -> slice:
    start = batch.features[feature, 1] + batch.ids[position] * batch.features[feature, 3]
    return slice(start, start + batch.features[feature, 3])


def columns_of(batch: Batch, feature: int) -> slice:
    return slice(batch.features[feature, 4], batch.features[feature, 4] + batch.features[feature, 3])


def judge_lookup(batch: Batch, arena: Array) -> Array:
    out = np.zeros((batch.records * batch.bags, batch.width))
    scale = judge_scale(batch)
    for position, feature, bag, row, weight in counted(batch):
        out[row, columns_of(batch, feature)] += scale[bag] * weight * arena[row_of(batch, feature, position)]
    return out


def judge_row_sums(batch: Batch, scale: Array, grad: Array) -> dict[tuple[int, int], Array]:
    sums: dict[tuple[int, int], Array] = {}
    for position, feature, bag, row, weight in counted(batch):
        key = int(batch.features[feature, 0]), int(batch.ids[position])
        value = weight * scale[bag] * grad[row, columns_of(batch, feature)]
        sums[key] = sums.get(key, np.zeros(len(value))) + value
    return sums


def judge_rule(name: str, w: Array, g: Array, s0: Any, s1: Any, h: Array, step: int) -> tuple[Array, Any, Any]:
    """One row by the book: new row and state."""
    lr, own = h[0], h[6:]
    if name == "sgd":
        return w - lr * g, s0, s1
    if name == "momentum":
        m = own[0] * s0 + g
        return w - lr * (own[0] * m + g if own[1] else m), m, s1
    if name == "adagrad":
        a = s0 + g**2
        return w - lr * g / (np.sqrt(a) + own[0]), a, s1
    if name == "rowwise_adagrad":
        a = s0 + np.mean(g**2)
        return w - lr * g / (np.sqrt(a) + own[0]), a, s1
    if name in ("adam", "adamw"):
        m, v = own[0] * s0 + (1 - own[0]) * g, own[1] * s1 + (1 - own[1]) * g**2
        if own[3]:
            return w - lr * (m / (1 - own[0] ** step)) / (np.sqrt(v / (1 - own[1] ** step)) + own[2]), m, v
        return w - lr * m / (np.sqrt(v + own[2] ** 2) if own[4] else np.sqrt(v) + own[2]), m, v
    if name == "ftrl":
        p, l1, l2, beta, multiply, shrinkage = own[:6]
        a = s0 + g**2
        g = g + 2 * shrinkage * w
        if multiply:
            z = s1 + lr * g - (a**p - s0**p) * w
            return (np.clip(z, -lr * l1, lr * l1) - z) / (a**p + 2 * lr * l2 + beta), a, z
        z = s1 + g - (a**p - s0**p) / lr * w
        return (np.clip(z, -l1, l1) - z) / ((a**p + beta) / lr + 2 * l2), a, z
    assert name == "adagrad_momentum"
    a = s0 + g**2 if own[3] == 1 else own[3] * s0 + (1 - own[3]) * g**2
    s = g * (a + own[4]) ** (-1 / own[2])
    m = own[0] * s1 + s
    return w - lr * (own[0] * m + s if own[1] else m), a, m


# --- lookups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pooled_lookup(dtype: torch.dtype, weighted: bool, ids_dtype: Any) -> None:
    for dim in DIMS:
        reads = [(t, combiner, t % 4) for t, combiner in enumerate(COMBINERS)]
        shapes = [(11, dim), (30, 5), (4, dim), (9, 1)]
        batch = make_batch(shapes, [*reads, (0, "mean", 3)], weighted=weighted, ids_dtype=ids_dtype)
        arena = random_tensor(batch.size, dtype)
        out, scale = BACKEND.pooled_lookup(
            arena, torch.from_numpy(batch.features), batch.csr(dtype), batch.width, True, "drop"
        )
        # a mean of weights that nearly cancel is large, and as wrong as it is large
        close(out, judge_lookup(batch, arena.double().numpy()), dtype, 200.0 if weighted else 4.0)
        close(scale, judge_scale(batch), torch.float64 if dtype == torch.float64 else torch.float32, 200.0)
        assert out.dtype == dtype


def test_plain_sums_have_no_scale() -> None:
    batch = make_batch([(11, 8)], [(0, "sum", 0)])
    arena = random_tensor(batch.size, torch.float32)
    arguments = (arena, torch.from_numpy(batch.features), batch.csr(torch.float32), batch.width)
    out, scale = BACKEND.pooled_lookup(*arguments, False, "ignore")
    assert scale.shape == (0,)
    torch.testing.assert_close(out, BACKEND.pooled_lookup(*arguments, True, "ignore")[0], rtol=0, atol=0)


@pytest.mark.parametrize("dim", [4096, 300, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rows_and_long_bags(dim: int, dtype: torch.dtype) -> None:
    batch = make_batch([(50, dim)], [(0, "sqrtn", 0)], bags=2, longest=3000, absent=False)
    arena = random_tensor(batch.size, dtype)
    out, _ = BACKEND.pooled_lookup(arena, torch.from_numpy(batch.features), batch.csr(dtype), dim, True, "raise")
    matrix = np.stack([np.bincount(part, minlength=50) for part in np.split(batch.ids, batch.offsets[1:-1])])
    table = arena[5 : 5 + 50 * dim].double().numpy().reshape(50, dim)
    close(out, matrix @ table * judge_scale(batch)[:, None], dtype, 40.0)


@pytest.mark.parametrize("op", ["pooled", "max"])
def test_first_bad_id_is_raised(op: str) -> None:
    reads = [(0, "sum", 0), (1, "sum", DROP_NEGATIVE), (2, "sum", 0)]
    batch = make_batch([(100, 4)] * 3, reads, bags=2000, absent=False)
    spans = batch.offsets[:: batch.bags]
    features, arena = torch.from_numpy(batch.features), random_tensor(batch.size, torch.float32)

    def position() -> int | None:
        csr = batch.csr(torch.float32)
        try:
            if op == "pooled":
                BACKEND.pooled_lookup(arena, features, csr, batch.width, False, "raise")
            else:
                BACKEND.max_lookup(arena, features, csr, batch.width, "raise")
        except BadId as error:
            return error.position
        return None

    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert position() is None
        batch.ids[spans[2] - 1] = -3
        # negative ids of the second feature are dropped
        assert position() is None
        batch.ids[[spans[3] - 1, spans[2] + 5, spans[2] + 9]] = 100, -1, 10**9
        assert position() == spans[2] + 5
        batch.ids[spans[1] + 3] = 100
        assert position() == spans[1] + 3
        batch.ids[:] = np.clip(batch.ids, 0, 99)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_max_pooling(dtype: torch.dtype, weighted: bool) -> None:
    for dim in DIMS:
        batch = make_batch([(20, dim), (8, 3)], [(0, "sum", 0), (1, "sum", 2), (0, "sum", 1)], weighted=weighted)
        # few values, so that ties are many
        arena = torch.from_numpy(np.random.default_rng(2).integers(-2, 3, batch.size)).to(dtype)
        arena[[7, 9, 30]] = torch.nan
        features, csr = torch.from_numpy(batch.features), batch.csr(dtype)
        out, winners = BACKEND.max_lookup(arena, features, csr, batch.width, "drop")
        expected, first = np.zeros((batch.bags, batch.width)), np.full((batch.bags, batch.width), -1)
        values = arena.double().numpy()
        for position, feature, _, row, weight in counted(batch):
            for lane in range(batch.features[feature, 3]):
                column = batch.features[feature, 4] + lane
                value = weight * values[row_of(batch, feature, position)][lane]
                best = expected[row, column]
                if first[row, column] < 0 or value > best or (np.isnan(value) and not np.isnan(best)):
                    expected[row, column], first[row, column] = value, position
        np.testing.assert_array_equal(winners.numpy(), first)
        close(out, expected, dtype)

        grad = random_tensor((batch.bags, batch.width), dtype, seed=3)
        found = torch.zeros(batch.size, dtype=dtype)
        BACKEND.max_grad(found, features, csr, winners, grad)
        gradient = np.zeros(batch.size)
        for position, feature, _, row, weight in counted(batch):
            won = first[row, columns_of(batch, feature)] == position
            gradient[row_of(batch, feature, position)] += (
                won * weight * grad[row, columns_of(batch, feature)].double().numpy()
            )
        close(found, gradient, dtype)


# --- sums of gradients -----------------------------------------------------------------------------------------------

FORMS = ["plain", "strided", "expanded", "scalar", "other type"]


def make_grad(form: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    grad = random_tensor((rows, width), dtype, seed=4)
    if form == "strided":
        return random_tensor((width, 2 * rows), dtype, seed=4)[:, ::2].t()
    if form == "expanded":
        return grad[:1].expand(rows, width)
    if form == "scalar":
        return random_tensor(1, dtype, seed=4).expand(rows, width)
    if form == "other type":
        return grad.to(torch.float64 if dtype != torch.float64 else torch.float16)
    return grad


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype, weighted: bool, ids_dtype: Any) -> None:
    for dim, form in zip(DIMS, [*FORMS, "plain"], strict=True):
        reads = [(0, "mean", 0), (1, "sum", 1), (0, "sqrtn", 2), (2, "mean_by_count", 0)]
        batch = make_batch([(11, dim), (30, 5), (4, 2)], reads, records=2, weighted=weighted, ids_dtype=ids_dtype)
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        features, csr = torch.from_numpy(batch.features), batch.csr(dtype)
        scale = random_tensor(len(batch.offsets) - 1, kind, seed=5)
        grad = make_grad(form, batch.records * batch.bags, batch.width, dtype)
        sums = judge_row_sums(batch, scale.double().numpy(), grad.double().numpy())

        found, expected = torch.zeros(batch.size, dtype=dtype), np.zeros(batch.size)
        BACKEND.row_grad(found, features, csr, scale, grad)
        for (table, row), value in sums.items():
            start = batch.tables[table, 0] + row * batch.tables[table, 2]
            expected[start : start + len(value)] = value
        close(found, expected, dtype)

        tables = batch.tables.copy()
        tables[:, 4] = 0, -1, 0
        update = Update(found, features, torch.from_numpy(tables), [Optimizer], torch.zeros(1, dtype=kind),
                        torch.zeros(3, 16, dtype=torch.float64), torch.ones(3, dtype=torch.int64))  # fmt: skip
        total = sum(float(value @ value) for (table, _), value in sums.items() if table != 1)
        close(BACKEND.row_square_sum(update, csr, scale, grad), np.array(total), kind, 20.0)

        arena = random_tensor(batch.size, dtype)
        coefficients = BACKEND.coefficient_grad(arena, features, csr, scale, grad)
        close(coefficients, judge_coefficients(batch, arena, scale, grad), kind, 200.0)


def judge_coefficients(batch: Batch, arena: Tensor, scale: Tensor, grad: Tensor) -> Array:
    values, factors, upstream = (tensor.double().numpy() for tensor in (arena, scale, grad))
    out, dots = np.zeros(len(batch.ids)), np.zeros(len(batch.ids))
    pooled, total = np.zeros(len(batch.offsets) - 1), np.zeros(len(batch.offsets) - 1)
    for position, feature, bag, row, weight in counted(batch):
        dots[position] = values[row_of(batch, feature, position)] @ upstream[row, columns_of(batch, feature)]
        pooled[bag] += weight * dots[position]
        total[bag] += weight ** int(batch.features[feature, 6])
    for position, feature, bag, _, weight in counted(batch):
        p, q = int(batch.features[feature, 6]), int(batch.features[feature, 7])
        out[position] = factors[bag] * dots[position]
        if p and q and total[bag]:
            out[position] -= q / 2 * p * weight ** (p - 1) / total[bag] * factors[bag] * pooled[bag]
    return out


# --- updates ---------------------------------------------------------------------------------------------------------

RULES: list[tuple[str, tuple[float, ...]]] = [
    ("sgd", ()),
    ("momentum", (0.9, 0)),
    ("momentum", (0.9, 1)),
    ("adagrad", (0.0,)),
    ("adagrad", (1e-3,)),
    ("rowwise_adagrad", (1e-8,)),
    *[
        (name, (0.9, 0.99, 1e-3, corrected, inside, float(np.log(0.9)), float(np.log(0.99))))
        for name, corrected, inside in [("adam", 0, 1), ("adam", 0, 0), ("adam", 1, 0), ("adamw", 1, 0)]
    ],
    ("ftrl", (0.5, 0.0, 0.0, 0.0, 0, 0.0)),
    ("ftrl", (0.5, 0.3, 0.2, 0.1, 0, 0.05)),
    ("ftrl", (0.5, 0.3, 0.2, 0.1, 1, 0.05)),
    ("ftrl", (0.3, 0.3, 0.2, 0.1, 0, 0.0)),
    ("adagrad_momentum", (0.9, 0, 2, 1.0, 1e-10)),
    ("adagrad_momentum", (0.9, 1, 2, 0.9, 1e-3)),
    ("adagrad_momentum", (0.8, 1, 3, 0.9, 1e-3)),
]
TWO_SLOTS = {"adam", "adamw", "ftrl", "adagrad_momentum"}


@dataclass
class Tables:
    """What `embedfuse.cpu.row_update` asks of an update."""

    table: Any
    features: Any
    tables: Any
    slots: Any
    hyper: Any
    steps: Any


def common_hyper(low: float = -np.inf, high: float = np.inf, decay: float = 0.0) -> list[float]:
    return [0.1, low, high, decay, low, high]


def make_update(batch: Batch, own: list[tuple[str, tuple[float, ...]] | None], dtype: torch.dtype) -> Tables:
    """One rule a table, None for one that does not learn; every other table clips and decays."""
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    tables, hyper = batch.tables.copy(), np.zeros((len(own), 16))
    tables[:, 4] = [-1 if rule is None else number for number, rule in enumerate(own)]
    tables[:, 5] = tables[:, 0]
    tables[:, 6] = tables[:, 0] + batch.size
    for number, rule in enumerate(own):
        constants = () if rule is None else rule[1]
        common = common_hyper() if number % 2 == 0 else common_hyper(-0.6, 0.5, 0.2)
        hyper[number, : 6 + len(constants)] = [*common, *constants]
    slots = random_tensor(2 * batch.size, kind, seed=6).abs() + 0.3
    return Tables(
        random_tensor(batch.size, dtype, seed=7), torch.from_numpy(batch.features), torch.from_numpy(tables), slots,
        torch.from_numpy(hyper), torch.arange(3, 3 + len(own)),
    )  # fmt: skip


def judge_update(
    batch: Batch, update: Tables, own: list[tuple[str, tuple[float, ...]] | None], sums: Any, grad_scale: float
) -> tuple[Array, Array]:
    arena, slots = update.table.double().numpy(), update.slots.double().numpy()
    for (table, row), g in sums.items():
        rule = own[table]
        if rule is None:
            continue
        start, _, dim, _, _, slot0, slot1 = (int(number) for number in update.tables[table, :7])
        h = update.hyper[table].numpy()
        per = 1 if rule[0] == "rowwise_adagrad" else dim
        weights = arena[start + row * dim : start + (row + 1) * dim]
        states = [slots[slot + row * per : slot + (row + 1) * per] for slot in (slot0, slot1)]
        w, s0, s1 = judge_rule(
            rule[0], weights * (1 - h[3]), np.clip(g * grad_scale, h[1], h[2]), *(state.copy() for state in states), h,
            int(update.steps[table]),
        )  # fmt: skip
        weights[:] = np.clip(w, h[4], h[5])
        states[0][:] = s0
        if rule[0] in TWO_SLOTS:
            states[1][:] = s1
    return arena, slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule[0]}{list(rule[1][:5])}")
def test_rules(rule: tuple[str, tuple[float, ...]], dtype: torch.dtype) -> None:
    for dim in DIMS:
        own: list[tuple[str, tuple[float, ...]] | None] = [rule, rule]
        batch = make_batch([(12, dim), (9, dim)], [(0, "sum", 0), (1, "mean", 0), (0, "mean", 0)], records=2)
        update = make_update(batch, own, dtype)
        check_update(batch, update, own, dtype, grad_scale=0.5)


def check_update(
    batch: Batch, update: Tables, own: list[tuple[str, tuple[float, ...]] | None], dtype: torch.dtype, grad_scale: float
) -> None:
    csr = batch.csr(dtype)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    scale = torch.from_numpy(judge_scale(batch)).to(kind)
    grad = random_tensor((batch.records * batch.bags, batch.width), dtype, seed=8)
    sums = judge_row_sums(batch, scale.double().numpy(), grad.double().numpy())
    arena, slots = judge_update(batch, replace(update), own, sums, grad_scale)
    numbers = [-1 if rule is None else cpu.rule_number(rule[0]) for rule in own]
    cpu.row_update(update, csr, scale, grad, numbers, grad_scale=grad_scale)
    # a power of a difference of powers loses some digits
    close(update.table, arena, dtype, 100.0)
    close(update.slots, slots, kind, 400.0)


def test_many_tables_and_rules_at_once() -> None:
    own: list[tuple[str, tuple[float, ...]] | None] = [RULES[3], None, RULES[6], RULES[0], RULES[5]]
    shapes = [(40, 64), (30, 7), (9, 33), (50, 1), (12, 16)]
    reads = [(4, "sum", 0), (2, "mean", 3), (0, "sum", 0), (1, "sum", 0), (3, "sqrtn", 2), (0, "mean", 1)]
    for weighted in (False, True):
        batch = make_batch(shapes, reads, bags=30, records=3, weighted=weighted)
        update = make_update(batch, own, torch.float32)
        before = update.table.clone(), update.slots.clone()
        check_update(batch, update, own, torch.float32, grad_scale=1.0)
        frozen = slice(int(batch.tables[1, 0]), int(batch.tables[2, 0]))
        assert torch.equal(update.table[frozen], before[0][frozen])
        assert torch.equal(update.slots[frozen], before[1][frozen])


class Halving(Optimizer):
    """A rule the engine does not have: half the way to minus the gradient, and a count a row."""

    slot_kinds = ("row",)

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("count", "row"),)

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        return 0.5 * w - h[OWN_HYPER] * g, (slots[0] + step,)


class Sgd(Optimizer):
    """One it has."""

    native = "sgd"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rule_without_native_form(dtype: torch.dtype) -> None:
    batch = make_batch([(12, 6), (9, 7), (8, 2)], [(1, "sum", 0), (0, "mean", 0), (1, "mean", 0), (2, "sum", 0)])
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    tables = batch.tables.copy()
    tables[:, 4] = 0, 1, -1
    tables[:, 5] = 0, 100, 0
    hyper = torch.zeros(3, 16, dtype=torch.float64)
    hyper[:, :7] = torch.tensor([*common_hyper(), 0.25], dtype=torch.float64)
    arena, slots = random_tensor(batch.size, dtype), torch.zeros(200, dtype=kind)
    update = Update(arena.clone(), torch.from_numpy(batch.features), torch.from_numpy(tables), [Sgd, Halving], slots,
                    hyper, torch.tensor([4, 5, 6]), grad_scale=torch.tensor(2.0))  # fmt: skip
    scale = torch.from_numpy(judge_scale(batch)).to(kind)
    grad = random_tensor((batch.bags, batch.width), dtype, seed=8)
    skipped = replace(update, skip=torch.tensor(1.0))
    BACKEND.row_update(skipped, batch.csr(dtype), scale, grad)
    assert torch.equal(update.table, arena)
    BACKEND.row_update(update, batch.csr(dtype), scale, grad)
    expected, counts = arena.double().numpy(), np.zeros(200)
    for (table, row), g in judge_row_sums(batch, scale.double().numpy(), grad.double().numpy()).items():
        start, _, dim = batch.tables[table, :3]
        weights = expected[start + row * dim : start + (row + 1) * dim]
        if table == 0:
            weights -= 0.1 * 2 * g
        elif table == 1:
            weights[:] = 0.5 * weights - 0.25 * 2 * g
            counts[100 + row] = 5
    close(update.table, expected, dtype)
    np.testing.assert_array_equal(slots.double().numpy(), counts)


# --- rows cut to a length --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cut_rows(dtype: torch.dtype, weighted: bool, ids_dtype: Any) -> None:
    for dim in (1, 3, 63, 130, 4100):
        reads = [(0, "mean", 0), (1, "sum", 1), (0, "sqrtn", 2), (2, "mean_by_count", 0), (3, "sum", 0)]
        # about half of the rows are longer; all; none
        max_norms = [float(np.sqrt(dim)) * 0.9, 0.0, np.inf, 1.0]
        batch = make_batch([(11, dim), (30, 5), (4, 2), (8, dim)], reads, weighted=weighted, ids_dtype=ids_dtype,
                           max_norms=max_norms)  # fmt: skip
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        arena, csr = random_tensor(batch.size, dtype), batch.csr(dtype)
        features, tables = torch.from_numpy(batch.features), torch.from_numpy(batch.tables)
        values = arena.double().numpy()
        shortened = cut_arena(batch, values)

        out, scale = BACKEND.pooled_lookup(arena, features, csr, batch.width, True, "drop")
        close(out, judge_lookup(batch, shortened), dtype, 200.0 if weighted else 4.0)
        close(scale, judge_scale(batch), kind, 200.0)
        grad = random_tensor((batch.bags, batch.width), dtype, seed=8)
        coefficients = BACKEND.coefficient_grad(arena, features, csr, scale, grad)
        upright = torch.from_numpy(shortened)
        close(coefficients, judge_coefficients(batch, upright, scale, grad), kind, 400.0)

        sums = judge_cut(batch, values, judge_row_sums(batch, scale.double().numpy(), grad.double().numpy()))
        found, expected = torch.zeros(batch.size, dtype=dtype), np.zeros(batch.size)
        BACKEND.row_grad(found, features, csr, scale, grad, Rows(arena, tables))
        for (table, row), g in sums.items():
            start = int(batch.tables[table, 0]) + row * len(g)
            expected[start : start + len(g)] = g
            if max_norms[table] == 0:
                assert not found[start : start + len(g)].any()
        close(found, expected, dtype, 20.0)

        own: list[tuple[str, tuple[float, ...]] | None] = [RULES[3], RULES[0], None, RULES[5]]
        update = make_update(batch, own, dtype)
        update.table.copy_(arena)
        total = sum(float(g @ g) for (table, _), g in sums.items() if table != 2)
        close(np.array(cpu.row_square_sum(update, csr, scale, grad)), np.array(total), kind, 40.0)
        rows, collected = cpu.collect_rows(update, csr, scale, grad, 0)
        assert rows.tolist() == sorted(row for table, row in sums if table == 0)
        for row, g in zip(rows.tolist(), collected, strict=True):
            close(g, sums[0, row], kind, 100.0)
        stepped, slots = judge_update(batch, replace(update), own, sums, 0.5)
        numbers = [-1 if rule is None else cpu.rule_number(rule[0]) for rule in own]
        cpu.row_update(update, csr, scale, grad, numbers, grad_scale=0.5)
        close(update.table, stepped, dtype, 100.0)
        close(update.slots, slots, kind, 400.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_pooling_of_cut_rows(dtype: torch.dtype) -> None:
    for dim in (3, 63, 130):
        batch = make_batch([(20, dim), (8, 3)], [(0, "sum", 0), (1, "sum", 2)], weighted=True,
                           max_norms=[float(np.sqrt(dim)), 1.5])  # fmt: skip
        arena, features = random_tensor(batch.size, dtype), torch.from_numpy(batch.features)
        out, winners = BACKEND.max_lookup(arena, features, batch.csr(dtype), batch.width, "drop")
        shortened, kind = cut_arena(batch, arena.double().numpy()), torch.float64
        free = batch.features.copy()
        free[:, MAX_NORM] = NO_MAX_NORM
        expected, first = BACKEND.max_lookup(
            torch.from_numpy(shortened), torch.from_numpy(free), batch.csr(kind), batch.width, "drop"
        )
        close(out, expected.numpy(), dtype)
        np.testing.assert_array_equal(winners.numpy(), first.numpy())


def test_a_row_too_long_for_its_square_is_cut() -> None:
    batch = make_batch([(3, 4)], [(0, "sum", 0)], max_norms=[2.0])
    arena = torch.full((batch.size,), 1e30)
    csr = Csr(torch.tensor([1]), torch.tensor([0, 1]), None, 1)
    out, _ = BACKEND.pooled_lookup(arena, torch.from_numpy(batch.features), csr, 4, False, "raise")
    torch.testing.assert_close(out, torch.ones(1, 4))


# --- rows in other places --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_overlap_or_lie_apart(dtype: torch.dtype) -> None:
    for stride in (1, 5, 9, 70):
        batch = make_batch([(40, 9), (6, 5)], [(0, "mean", 0), (1, "sum", 0), (0, "sum", 0)])
        spread = batch.features.copy()
        spread[[0, 2], STRIDE] = stride
        spread[[0, 2], 1] = 3
        arena = random_tensor(batch.size + 40 * 70, dtype)
        joined = arena.clone()
        start = int(batch.tables[0, 0])
        joined[start : start + 360] = torch.cat([arena[3 + stride * row :][:9] for row in range(40)])
        joined[int(batch.tables[1, 0]) :] = arena[int(batch.tables[1, 0]) :]
        grad, csr = random_tensor((batch.bags, batch.width), dtype), batch.csr(dtype)
        results = []
        for table, described in ((arena, spread), (joined, batch.features)):
            features = torch.from_numpy(described)
            out, scale = BACKEND.pooled_lookup(table, features, csr, batch.width, True, "drop")
            largest, winners = BACKEND.max_lookup(table, features, csr, batch.width, "drop")
            slopes = BACKEND.coefficient_grad(table, features, csr, scale, grad)
            sums = torch.zeros(batch.size, dtype=dtype)
            BACKEND.row_grad(sums, torch.from_numpy(batch.features), csr, scale, grad)
            results.append([out, scale, largest, winners, slopes, sums])
        for apart, close_by in zip(*results, strict=True):
            assert torch.equal(apart, close_by)


def judge_prepared(batch: Batch, places: list[tuple[int, int]]) -> Prepared:
    """`places` are row and element of each id of the one feature (or of all)."""
    counts = {position for position, *_ in counted(batch)}
    rows, elements, weights, went = [], [], [], []
    for bag in range(len(batch.offsets) - 1):
        empty = True
        for position in range(batch.offsets[bag], batch.offsets[bag + 1]):
            found = position in counts
            empty &= not found
            went.append(len(rows))
            rows.append(places[batch.ids[position]][0] if found else -1)
            elements.append(places[batch.ids[position]][1] if found else -1)
            weights.append(1.0 if batch.weights is None else float(batch.weights[position]))
        default = int(batch.features[bag // batch.bags % len(batch.features), DEFAULT_ID])
        default = default if empty else -1
        rows.append(places[default][0] if default >= 0 else -1)
        elements.append(places[default][1] if default >= 0 else -1)
        weights.append(float(default >= 0))
    offsets = batch.offsets + np.arange(len(batch.offsets))
    made = (np.array(values, np.int64) for values in (rows, elements))
    return Prepared(*(torch.from_numpy(array) for array in (*made, offsets, np.array(weights), np.array(went))))


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_prepare_ids(weighted: bool, ids_dtype: Any) -> None:
    reads = [(0, "mean", 0), (1, "sum", 3), (0, "sqrtn", 2), (2, "sum", 1)]
    for bags, records in ((7, 2), (3000, 1)):
        batch = make_batch([(11, 4), (30, 5), (4, 2)], reads, bags=bags, records=records, longest=4,
                           weighted=weighted, ids_dtype=ids_dtype)  # fmt: skip
        batch.features[:, DEFAULT_ID] = 0, 29, -1, 2
        expected = judge_prepared(batch, [(row, row) for row in range(30)])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for dtype in (torch.float32, torch.float64) if weighted else (torch.float32,):
                found = BACKEND.prepare_ids(torch.from_numpy(batch.features), batch.csr(dtype), None, "drop")
                assert torch.equal(found.rows, expected.rows) and torch.equal(found.offsets, expected.offsets)
                assert torch.equal(found.places, expected.places) and found.starts is None
                assert (found.weights is None) != weighted
                if found.weights is not None and expected.weights is not None:
                    assert torch.equal(found.weights, expected.weights.to(dtype))
    with pytest.raises(BadId):
        BACKEND.prepare_ids(torch.from_numpy(batch.features), batch.csr(torch.float32), None, "raise")


def shard(batch: Batch, sizes: list[int], modulo: bool) -> tuple[Shards, list[tuple[int, int]], Array]:
    """The first table of a batch in parts, out of order and with gaps: row and element of each id; the parts."""
    dim, parts = int(batch.features[0, 3]), np.zeros((len(sizes), TABLE_WIDTH), np.int64)
    starts = np.cumsum([0, *(size * dim + 3 for size in reversed(sizes))])[:-1][::-1]
    before = np.cumsum([0, *sizes])[:-1]
    for number, (first, rows, start) in enumerate(zip(before, sizes, starts, strict=True)):
        parts[number] = start, rows, dim, first, -1, 0, 0, start, batch.tables[0, 8]
    places = []
    for number in range(sum(sizes)):
        part = number % len(sizes) if modulo else int(np.searchsorted(np.cumsum(sizes), number, side="right"))
        row = number // len(sizes) if modulo else number - int(before[part])
        places.append((int(before[part]) + row, int(starts[part]) + row * dim))
    return Shards(torch.from_numpy(np.stack([before, sizes, starts], 1)), modulo, dim), places, parts


@pytest.mark.parametrize("modulo", [False, True])
@pytest.mark.parametrize("sizes", [[40], [20, 20], [14, 13, 13], [10, 0, 25, 5]], ids=str)
def test_shards(sizes: list[int], modulo: bool) -> None:
    if modulo and 0 in sizes:
        sizes = [1, 1, 1, 1, 1]
    rows, dim, dtype = sum(sizes), 9, torch.float32
    for max_norm in (np.inf, 2.7):
        batch = make_batch([(rows, dim)], [(0, "mean", 0)], bags=50, max_norms=[max_norm])
        batch.features[0, DEFAULT_ID] = rows - 1
        shards, places, parts = shard(batch, sizes, modulo)
        whole = random_tensor((rows, dim), dtype)
        spread = torch.full((int(parts[:, 0].max()) + rows * dim + 100,), torch.nan)
        for number, (_, element) in enumerate(places):
            spread[element : element + dim] = whole[number]
        found = BACKEND.prepare_ids(torch.from_numpy(batch.features), batch.csr(dtype), shards, "drop")
        expected = judge_prepared(batch, places)
        for name in ("rows", "starts", "offsets", "places"):
            assert torch.equal(getattr(found, name), getattr(expected, name))

        # looking up by element, and by row in a table that was never cut up
        by_element, in_one = batch.features.copy(), batch.features.copy()
        by_element[0, [1, 2, STRIDE]] = 0, len(spread), 1
        in_one[0, 1] = 0
        elements, features = torch.from_numpy(by_element), torch.from_numpy(in_one)
        order = torch.tensor([row for row, _ in places])
        ordered = torch.empty_like(whole)
        ordered[order] = whole
        csr_rows, csr_elements = (Csr(ids, found.offsets, None, 50) for ids in (found.rows, found.starts))
        out, scale = BACKEND.pooled_lookup(ordered.view(-1), features, csr_rows, dim, True, "drop")
        other, _ = BACKEND.pooled_lookup(spread, elements, csr_elements, dim, True, "drop")
        assert torch.equal(out, other) and not out.isnan().any()
        grad = random_tensor((50, dim), dtype, seed=9)
        assert torch.equal(
            BACKEND.coefficient_grad(ordered.view(-1), features, csr_rows, scale, grad),
            BACKEND.coefficient_grad(spread, elements, csr_elements, scale, grad),
        )
        one, apart = torch.zeros(rows * dim), torch.zeros_like(spread)
        table = batch.tables.copy()
        table[0, [0, T_SOURCE]] = 0
        for into, source, tables in ((one, ordered.view(-1), table), (apart, spread, parts)):
            BACKEND.row_grad(into, features, csr_rows, scale, grad, Rows(source, torch.from_numpy(tables)))
        for number, (row, element) in enumerate(places):
            assert torch.equal(apart[element : element + dim], one.view(rows, dim)[row]), number
        assert int(apart.count_nonzero()) == int(one.count_nonzero())
        # the same sums again, to another place
        moved = torch.zeros(len(spread) + 11)
        parts[:, 0] += 11
        BACKEND.row_grad(moved, features, csr_rows, scale, grad, Rows(spread, torch.from_numpy(parts)))
        assert torch.equal(moved[11:], apart)

        largest, winners = BACKEND.max_lookup(spread, elements, csr_elements, dim, "drop")
        assert torch.equal(largest, BACKEND.max_lookup(ordered.view(-1), features, csr_rows, dim, "drop")[0])
        one.zero_()
        apart.zero_()
        BACKEND.max_grad(one, features, csr_rows, winners, grad)
        BACKEND.max_grad(apart, elements, csr_elements, winners, grad)
        for row, element in places:
            assert torch.equal(apart[element : element + dim], one.view(rows, dim)[row])


def test_tables_without_rows_hide_no_other() -> None:
    batch = make_batch([(0, 3), (5, 4)], [(0, "sum", 0), (1, "sum", 0)], absent=False)
    batch.ids[:] = batch.ids.clip(0)
    update = make_update(batch, [RULES[0], RULES[0]], torch.float32)
    before = update.table.clone()
    grad = torch.ones(batch.bags, batch.width)
    cpu.row_update(update, batch.csr(torch.float32), None, grad, [0, 0])
    assert not torch.equal(update.table, before)


# --- extremes --------------------------------------------------------------------------------------------------------


def copies_of_one_id(count: int, bags: int, dim: int) -> Batch:
    batch = make_batch([(7, dim)], [(0, "sum", 0)], bags=bags, absent=False)
    offsets = np.linspace(0, count, bags + 1).astype(np.int64)
    return replace(batch, ids=np.full(count, 3), offsets=offsets)


def test_4096_duplicates_in_bfloat16() -> None:
    batch = copies_of_one_id(4096, 4096, 3)
    out = torch.zeros(batch.size, dtype=torch.bfloat16)
    grad = torch.ones(batch.bags, 3, dtype=torch.bfloat16)
    BACKEND.row_grad(out, torch.from_numpy(batch.features), batch.csr(out.dtype), torch.empty(0), grad)
    assert out[5 + 9 : 5 + 12].tolist() == [4096.0] * 3


def test_3000000_copies_of_one_id() -> None:
    batch = copies_of_one_id(3_000_000, 1000, 4)
    update = make_update(batch, [RULES[0]], torch.float32)
    update.table.zero_()
    cpu.row_update(update, batch.csr(torch.float32), None, torch.ones(1000, 4), [cpu.rule_number("sgd")], threads=2)
    expected = torch.zeros(batch.size)
    expected[5 + 12 : 5 + 16] = -torch.tensor(0.1) * 3_000_000
    assert torch.equal(update.table, expected)


def test_table_of_more_than_32_bits() -> None:
    rows = 2**32 + 9
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    table = np.frombuffer(mmap.mmap(-1, 2 * rows, flags=flags), np.float16)
    batch = make_batch([(7, 1)], [(0, "sum", 0)], absent=False)
    features = batch.features.copy()
    features[0, :3] = 0, 0, rows
    ids = np.array([rows - 1, 5, rows - 1, 2**31, rows, 5 + 2**32])
    csr = Csr(*(torch.from_numpy(array) for array in (ids, np.array([0, 3, 6]))), None, 2)
    grad = np.array([[1.0], [10.0]], np.float16)
    cpu.row_grad(table, features, csr, None, grad)
    assert table[[rows - 1, 5, 2**31, 5 + 2**32]].tolist() == [2.0, 1.0, 10.0, 10.0]
    out = np.empty((2, 1), np.float16)
    assert cpu.pooled_lookup(table, features, csr, out) == 4
    assert out.tolist() == [[5.0], [20.0]]


def test_empty_batches() -> None:
    for bags in (0, 3):
        batch = make_batch([(7, 5), (3, 2)], [(0, "mean", 0), (1, "sum", 0)], bags=3, longest=0)
        batch = replace(batch, bags=bags, offsets=np.zeros(2 * bags + 1, np.int64))
        features, csr = torch.from_numpy(batch.features), batch.csr(torch.float32)
        arena, grad = random_tensor(batch.size, torch.float32), torch.ones(bags, 7)
        out, scale = BACKEND.pooled_lookup(arena, features, csr, 7, True, "raise")
        assert torch.equal(out, torch.zeros(bags, 7))
        out, winners = BACKEND.max_lookup(arena, features, csr, 7, "raise")
        assert torch.equal(out, torch.zeros(bags, 7)) and bool((winners == -1).all())
        assert BACKEND.coefficient_grad(arena, features, csr, scale, grad).shape == (0,)
        found = torch.zeros(batch.size)
        BACKEND.row_grad(found, features, csr, scale, grad)
        BACKEND.max_grad(found, features, csr, winners, grad)
        assert not found.any()
        update = make_update(batch, [RULES[0], RULES[3]], torch.float32)
        before = update.table.clone()
        cpu.row_update(update, csr, scale, grad, [0, 2])
        assert torch.equal(update.table, before)


def test_half_precision_numbers_convert_as_in_numpy() -> None:
    table = np.arange(2**16, dtype=np.uint16).view(np.float16)
    batch = make_batch([(2**16, 1)], [(0, "sum", 0)], absent=False)
    features = batch.features.copy()
    features[0, 1] = 0
    csr = Csr(torch.arange(2**16), torch.arange(2**16 + 1), None, 2**16)
    out = np.empty((2**16, 1), np.float16)
    assert cpu.pooled_lookup(table, features, csr, out) is None
    np.testing.assert_array_equal(out[:, 0], table)
    # and every other float32 near them, halfway cases included, on the way back
    values = np.unique(np.abs(table[np.isfinite(table)])).astype(np.float32)
    steps = np.concatenate([values, (values[1:] + values[:-1]) / 2, [65519.0, 65520.0, 1e9]]).astype(np.float32)
    grads = np.concatenate([steps, np.nextafter(steps, np.float32(np.inf)), -np.nextafter(steps, np.float32(0))])
    features[0, 2] = len(grads)
    csr = Csr(torch.arange(len(grads)), torch.arange(len(grads) + 1), None, len(grads))
    for kind in (torch.float16, torch.bfloat16):
        found = torch.zeros(len(grads), dtype=kind)
        cpu.row_grad(found, features, csr, None, grads[:, None])
        torch.testing.assert_close(found, torch.from_numpy(grads).to(kind), rtol=0, atol=0)


# --- threads, instruction sets, arrays of other libraries ------------------------------------------------------------


@pytest.mark.parametrize("shapes", [[(3000, 16)], [(500, 16)] * 9], ids=["one table", "many tables"])
def test_threads_change_no_bit(shapes: list[tuple[int, int]]) -> None:
    reads = [(table, "mean", 0) for table in range(len(shapes))]
    max_norms = [(np.inf, 3.0)[table % 2] for table in range(len(shapes))] if len(shapes) > 1 else [3.9]
    batch = make_batch(shapes, reads, bags=20_000 // len(shapes), weighted=True, max_norms=max_norms)
    batch.ids[::3] = 1
    features, csr = torch.from_numpy(batch.features), batch.csr(torch.float32)
    own: list[tuple[str, tuple[float, ...]] | None] = [RULES[3 + 3 * (t % 2)] for t in range(len(shapes))]
    numbers = [cpu.rule_number(rule[0]) for rule in own if rule]
    arena, grad = random_tensor(batch.size, torch.float32), random_tensor((batch.bags, batch.width), torch.float32)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        out, scale = BACKEND.pooled_lookup(arena, features, csr, batch.width, True, "drop")
        pooled, winners = BACKEND.max_lookup(arena, features, csr, batch.width, "drop")
        sums, won = torch.zeros(batch.size), torch.zeros(batch.size)
        BACKEND.row_grad(
            sums, features, csr, scale, grad.t().contiguous().t(), Rows(arena, torch.from_numpy(batch.tables))
        )
        BACKEND.max_grad(won, features, csr, winners, grad)
        update = make_update(batch, own, torch.float32)
        norm = cpu.row_square_sum(update, csr, scale, grad, threads=threads)
        cpu.row_update(update, csr, scale, grad, numbers, threads=threads)
        coefficients = BACKEND.coefficient_grad(arena, features, csr, scale, grad)
        rows, _, offsets, weights, places = BACKEND.prepare_ids(features, csr, None, "drop")
        assert weights is not None
        results.append([out, scale, pooled, sums, won, torch.tensor(norm), update.table, update.slots, coefficients,
                        rows, offsets, weights, places])  # fmt: skip
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


def run_python(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("isa", [name for name in cpu.isas() if name != cpu.isa()])
def test_other_instruction_sets(isa: str) -> None:
    arguments = ["-q", "-x", "-p", "no:cacheprovider", __file__, "-k", NUMERICAL]
    code = (
        f"import sys, pytest, embedfuse.cpu; assert embedfuse.cpu.isa() == {isa!r}; sys.exit(pytest.main({arguments}))"
    )
    done = run_python(code, EMBEDFUSE_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("name", ["sse9", "AVX2"])
def test_unknown_instruction_set_is_refused(name: str) -> None:
    done = run_python("import embedfuse.cpu as c; c.isa()", EMBEDFUSE_CPU_ISA=name)
    assert done.returncode != 0
    assert f"`EMBEDFUSE_CPU_ISA` must be one of {', '.join(cpu.isas())} on this machine, got '{name}'" in done.stderr


def test_numpy_alone() -> None:
    done = run_python(
        """
import sys
from types import SimpleNamespace
import numpy as np
from embedfuse import cpu
from embedfuse.plan import PlannedFeature, plan_group
group = plan_group([(4, 3)], [PlannedFeature(0, "mean")])
csr = SimpleNamespace(ids=np.array([0, 2, 2], np.int32), offsets=np.array([0, 1, 3]), weights=None, bags=2)
table = np.arange(32, dtype=np.float32)
out, scale = np.empty((2, 3), np.float32), np.empty(2, np.float32)
assert cpu.pooled_lookup(table, group.features, csr, out, scale) is None
assert out.tolist() == [[0, 1, 2], [6, 7, 8]] and scale.tolist() == [1, 0.5]
grad = np.zeros(32, np.float32)
cpu.row_grad(grad, group.features, csr, scale, np.ones((2, 6), np.float32)[:, ::2])
assert grad[:12].tolist() == [1] * 3 + [0] * 3 + [1] * 3 + [0] * 3
assert "torch" not in sys.modules
"""
    )
    assert done.returncode == 0, done.stderr


def test_wrong_arrays_are_refused() -> None:
    batch = make_batch([(7, 4)], [(0, "sum", 0)])
    arena, features, csr = np.zeros(batch.size, np.float32), batch.features, batch.csr(torch.float32)
    out = np.zeros((batch.bags, 4), np.float32)
    with pytest.raises(TypeError, match="`out` must be of type float32, got float64"):
        cpu.pooled_lookup(arena, features, csr, out.astype(np.float64))
    with pytest.raises(ValueError, match="`out` must be contiguous"):
        cpu.pooled_lookup(arena, features, csr, out.T)
    with pytest.raises(ValueError, match="`features` must have 12 columns, got 9"):
        cpu.pooled_lookup(arena, features[:, :9], csr, out)
    with pytest.raises(TypeError, match="`rows` must be of the type of `out`, float32, got"):
        rows = Rows(torch.zeros(9, dtype=torch.float16), torch.from_numpy(batch.tables))
        cpu.row_grad(arena, features, csr, None, out, rows)
    with pytest.raises(TypeError, match="`ids` must be int32 or int64"):
        cpu.pooled_lookup(arena, features, csr._replace(ids=csr.ids.double()), out)
    with pytest.raises(TypeError, match="`dtype` must be one of float32, float16"):
        cpu.pooled_lookup(arena.astype(np.int32), features, csr, out)


def test_large_pages_change_no_value() -> None:
    array = np.empty(2**20, np.float32)
    assert cpu.prefer_large_pages(array) in (True, False)
    array[:] = 3
    assert float(array.sum()) == 3 * 2**20
    assert cpu.prefer_large_pages(torch.empty(2**20)) == cpu.prefer_large_pages(array)
    assert not cpu.prefer_large_pages(np.empty(3, np.float32))


def test_the_backend_serves_cpu_tensors_only() -> None:
    assert BACKEND.supports(torch.device("cpu"), torch.bfloat16) is None
    assert "memory of the CPU" in str(BACKEND.supports(torch.device("meta"), torch.float32))
    assert "not torch.int64" in str(BACKEND.supports(torch.device("cpu"), torch.int64))


def test_sources_are_in_sight_of_the_build() -> None:
    rules = Path(cpu.__file__).parent / "rules" / "registry.h"
    if rules.exists():
        assert all(f'RULE("{name}"' in rules.read_text() for name in cpu.rule_names())
