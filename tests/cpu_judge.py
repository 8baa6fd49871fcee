"""What the tests of the native engine share: batches, float64 loops for every op and rule, and tolerances."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embedfuse import cpu
from embedfuse.plan import FEATURE_WIDTH, NO_MAX_NORM, TABLE_WIDTH, bits_of
from embedfuse.torch.backends import Csr

Array = NDArray[Any]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DIMS = [1, 3, 7, 63, 64, 144]
COMBINERS = {"sum": (0, 0), "mean": (1, 2), "sqrtn": (2, 1), "mean_by_count": (0, 2)}  # (moment, power)
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-13}
DROP_NEGATIVE, DROP_NONPOSITIVE = 1, 2
NUMERICAL = (
    "wide or convert or 4096 or many_tables or without_native or adam or ftrl or rowwise or cut"
    " or ((pooled_lookup or max_pooling or gradients) and True and not int32)"
)
"""The tests that are run again on lesser instruction sets."""
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
