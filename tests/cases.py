"""Workloads by name, for tests and benchmarks: tables, features and how ids, lengths and weights are drawn.

`build` draws one: descriptors, arena, ids and upstream gradient. Every gap between tables holds NaN, so that reading or
writing past a row's end shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from embedfuse import reference
from embedfuse.optim.base import HYPER_WIDTH, Optimizer
from embedfuse.plan import (
    ALIGNMENT,
    DROP_NEGATIVE_IDS,
    DROP_NONPOSITIVE_WEIGHTS,
    FROZEN,
    NO_DEFAULT,
    T_DIM,
    T_OFFSET,
    T_ROWS,
    T_RULE,
    T_SLOT0,
    Group,
    PlannedFeature,
    plan_group,
)
from embedfuse.torch.backends import Csr, Update

DROP_BOTH = DROP_NEGATIVE_IDS | DROP_NONPOSITIVE_WEIGHTS


@dataclass(frozen=True)
class Case:
    """One workload.

    Attributes:
        tables: `(rows, dim)` of each, or `(rows, dim, max_norm)`.
        features: what is looked up where.
        bags: B.
        lengths: ids of a bag are at least and at most so many, evenly spread.
        ids: "uniform"; "zipf", exponent 1.05; "hot", every second id is row 0; "same", all ids are row 0.
        weights: none, all positive, or of both signs with zeros among them.
        absent: share of ids that are outside of their table, half of them negative.
        index: type of the ids.
        dtype: type of the tables.
    """

    name: str
    tables: tuple[tuple[int, int] | tuple[int, int, float], ...]
    features: tuple[PlannedFeature, ...]
    bags: int
    lengths: tuple[int, int] = (0, 4)
    ids: Literal["uniform", "zipf", "hot", "same"] = "uniform"
    weights: Literal["none", "positive", "signed"] = "none"
    absent: float = 0.0
    index: Literal["int64", "int32"] = "int64"
    dtype: str = "float32"


def one(table: int = 0, combiner: str = "sum", flags: int = 0, default_id: int = NO_DEFAULT) -> PlannedFeature:
    """A feature, in short."""
    return PlannedFeature(table, combiner, flags, default_id)


def each(tables: int, combiner: str = "sum") -> tuple[PlannedFeature, ...]:
    """One feature per table."""
    return tuple(one(table, combiner) for table in range(tables))


_MIXED = ((7, 1), (11, 2), (5, 3), (9, 13), (20, 63), (6, 65), (1, 1))
_COMBINERS = ("sum", "mean", "sqrtn", "mean_by_count", "sum", "mean", "sqrtn")

CASES = {
    case.name: case
    for case in (
        Case("plain", ((10, 4),), each(1), bags=5),
        Case("means", ((10, 8), (6, 8), (7, 8)), (one(0, "mean"), one(1, "sqrtn"), one(2, "mean_by_count")), bags=4),
        Case("weighted", ((10, 4), (9, 6)), (one(0), one(1, "sqrtn")), bags=5, weights="signed"),
        Case("weighted_means", ((10, 8), (6, 8), (7, 8)), (one(0, "mean"), one(1, "sqrtn"), one(2, "mean_by_count")),
             bags=4, weights="positive"),
        Case("mixed_dims", _MIXED, tuple(one(i, c) for i, c in enumerate(_COMBINERS)), bags=4, weights="positive"),
        Case("shared_table", ((8, 5), (30, 4)), (one(1, "mean"), one(0), one(1), one(1, "sqrtn")), bags=4),
        Case("permuted", ((10, 4), (300, 3), (5, 4)), (one(1), one(0), one(2)), bags=3, lengths=(1, 2)),
        Case("unread_table", ((10, 4), (12, 4), (5, 4)), (one(2),), bags=3),
        Case("absent", ((10, 4), (6, 3)), (one(0), one(1, "mean")), bags=6, absent=0.4),
        Case("dropping", ((10, 4), (6, 3), (8, 2)), (one(0, "sum", DROP_NEGATIVE_IDS), one(1, "mean", DROP_BOTH),
             one(2, "sqrtn", DROP_BOTH)), bags=6, weights="signed", absent=0.3),
        Case("no_bags", ((10, 4), (6, 3)), (one(0), one(1, "mean")), bags=0),
        Case("no_ids", ((10, 4), (6, 3)), (one(0), one(1, "mean")), bags=4, lengths=(0, 0)),
        Case("mostly_empty", ((10, 4),), (one(0, "mean"),), bags=12, lengths=(-6, 1)),
        Case("single_ids", ((10, 16), (6, 16)), each(2), bags=40, lengths=(1, 1)),
        Case("one_row", ((1, 1),), each(1), bags=3, lengths=(0, 3)),
        Case("int32", ((10, 4), (6, 3)), (one(0), one(1, "mean")), bags=4, index="int32"),
        Case("same_row", ((4, 6),), each(1), bags=3, lengths=(90, 90), ids="same"),
        Case("hot_row", ((50, 9), (20, 9)), (one(0, "mean"), one(1)), bags=6, lengths=(30, 60), ids="hot",
             weights="positive"),
        Case("zipf", ((1000, 7),), (one(0, "mean"),), bags=16, lengths=(10, 30), ids="zipf"),
        Case("many_tables", tuple((3 + i, 4) for i in range(40)), each(40, "mean"), bags=2),
        Case("many_features", ((20, 4),), tuple(one(0) for _ in range(30)), bags=2, lengths=(1, 1)),
        # rows have lengths of about 0.58 √dim
        Case("cut", ((10, 4, 1.0), (9, 6, 1.5), (7, 3)), (one(0), one(1, "sqrtn"), one(2, "mean"), one(1, "mean")),
             bags=6, weights="positive"),
        Case("cut_to_nothing", ((6, 5, 0.0), (5, 3, 100.0)), each(2, "mean"), bags=4),
        Case("cut_odd", ((9, 1, 0.5), (6, 63, 4.5), (12, 130, 6.5)), (one(0), one(1, "mean"), one(2, "sqrtn")), bags=5,
             weights="signed", absent=0.2),
        Case("cut_hot_row", ((20, 9, 1.7),), (one(0, "mean"),), bags=6, lengths=(60, 90), ids="hot"),
        Case("cut_wide", ((5, 1030, 18.5), (4, 2, 1.0)), (one(0, "mean"), one(1)), bags=3, weights="positive"),
        Case("defaults", ((10, 4), (6, 3), (8, 2)), (one(0, "sum", DROP_NEGATIVE_IDS, 3), one(1, "mean", DROP_BOTH),
             one(2, "sqrtn", DROP_BOTH, 0)), bags=9, lengths=(-2, 3), weights="signed", absent=0.4),
        Case("wide", ((9, 1028), (5, 1536)), (one(0), one(1, "mean")), bags=3),
        Case("very_wide", ((6, 4096),), (one(0, "mean"),), bags=2, weights="positive"),
    )
}  # fmt: skip
"""Small ones, for right and wrong."""


def _like_table(tables: int, bags: int, length: int, rows: int, dim: int, name: str) -> Case:
    return Case(name, ((rows, dim),) * tables, each(tables), bags, (length, length), index="int32")


BENCHMARKS = {
    case.name: case
    for uniform in (
        _like_table(10, 2048, 20, 1_000_000, 128, "ten_tables"),
        _like_table(26, 65536, 1, 500_000, 128, "single_ids"),
        _like_table(8, 4096, 64, 2_000_000, 64, "long_bags"),
        _like_table(1, 8192, 128, 1_000_000, 512, "memory_layer"),
        _like_table(32, 512, 20, 100_000, 128, "fbgemm_default"),
        _like_table(2, 32, 10, 1000, 64, "tiny"),
        _like_table(500, 512, 2, 1000, 32, "many_tiny_tables"),
    )
    for case in (uniform, replace(uniform, name=f"{uniform.name}_zipf", ids="zipf"))
}
"""Large ones, for time."""


@dataclass
class Workload:
    """A case with its numbers drawn."""

    case: Case
    group: Group
    table: Tensor  # the arena
    features: Tensor
    tables: Tensor
    csr: Csr
    grad: Tensor  # [R * B, width]
    longest: int  # terms of the longest sum that any op makes

    @property
    def is_cut(self) -> bool:
        """Whether any table has a MAX_NORM."""
        return any(len(table) > 2 for table in self.case.tables)

    def judged(self) -> tuple[np.ndarray, np.ndarray, reference.Csr, np.ndarray]:
        """Arena, features, ids and gradient as the judge takes them."""
        return numbers(self.table), self.group.features, judged_csr(self.csr), numbers(self.grad)


def numbers(tensor: Tensor) -> np.ndarray:
    """A copy of a tensor as NumPy's float64, or as it is if it holds integers."""
    kind = torch.float64 if tensor.is_floating_point() else tensor.dtype
    array: np.ndarray = tensor.detach().to("cpu", kind, copy=True).numpy()
    return array


def bits(tensor: Tensor) -> np.ndarray:
    """A tensor's elements as they are stored, as integers."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    array: np.ndarray = tensor.detach().cpu().contiguous().view(kinds[tensor.element_size()]).numpy()
    return array


def judged_csr(csr: Csr) -> reference.Csr:
    """Ids as the judge takes them."""
    weights = None if csr.weights is None else numbers(csr.weights)
    return reference.Csr(numbers(csr.ids), numbers(csr.offsets), weights, csr.bags)


def draw_ids(case: Case, rows: int, count: int, random: np.random.Generator) -> np.ndarray:
    """`count` ids of a table."""
    if case.ids == "same":
        return np.zeros(count, np.int64)
    if case.ids == "zipf":
        exponent = 1.05
        top = float(rows) ** (1 - exponent) - 1
        rank = ((top * random.random(count) + 1) ** (1 / (1 - exponent))).astype(np.int64).clip(1, rows) - 1
        # popular rows are not neighbours in memory; the factor is a prime, so no two ranks meet
        ids = rank * 2_147_483_629 % rows
    else:
        ids = random.integers(0, rows, count)
    if case.ids == "hot":
        ids[::2] = 0
    wrong = random.random(count) < case.absent
    # most often just outside
    far = np.where(random.random(count) < 0.5, -1 - ids // 4, rows + ids // 4)
    return np.where(wrong, far, ids)


def _draw_csr(case: Case, records: int, random: np.random.Generator, device: str) -> Csr:
    low, high = case.lengths
    lengths, ids = [], []
    for _ in range(records):
        for feature in case.features:
            lengths.append(random.integers(low, high + 1, case.bags).clip(0))
            ids.append(draw_ids(case, case.tables[feature.table][0], int(lengths[-1].sum()), random))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    flat = np.concatenate(ids).astype(case.index)
    weights = None
    if case.weights != "none":
        drawn = random.uniform(0.5, 2.0, len(flat))
        if case.weights == "signed":
            drawn *= random.choice([-1.0, 0.0, 1.0, 1.0], len(flat))
        weights = torch.from_numpy(drawn).to(torch.float64 if case.dtype == "float64" else torch.float32).to(device)
    return Csr(torch.from_numpy(flat).to(device), torch.from_numpy(offsets).to(device), weights, case.bags)


def _longest_sum(case: Case, csr: Csr) -> int:
    ids, offsets = numbers(csr.ids), numbers(csr.offsets)
    bag = int(np.diff(offsets).max(initial=0))
    count, per_feature = len(case.features), np.diff(offsets).reshape(-1, max(case.bags, 1)).sum(1)
    tables = np.repeat([case.features[i % count].table for i in range(len(per_feature))], per_feature)
    _, repeats = np.unique(np.stack([tables, ids]), axis=1, return_counts=True)
    return max(bag, int(repeats.max(initial=0)), max(table[1] for table in case.tables))


def build(case: Case, device: str = "cpu", records: int = 1, seed: int = 0, measured: bool = True) -> Workload:
    """Draws a case. `measured=False` saves the time that finding the longest sum takes."""
    random = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)
    group = plan_group(case.tables, case.features)
    dtype = getattr(torch, case.dtype)
    table = torch.full((group.size,), torch.nan, dtype=dtype, device=device)
    for start, rows, dim in group.tables[:, [T_OFFSET, T_ROWS, T_DIM]].tolist():
        table[start : start + rows * dim].uniform_(-1, 1, generator=generator)
    csr = _draw_csr(case, records, random, device)
    grad = torch.randn((records * case.bags, group.width), dtype=dtype, device=device, generator=generator)
    described = [torch.from_numpy(array).to(device) for array in (group.features, group.tables)]
    longest = _longest_sum(case, csr) if measured else 0
    return Workload(case, group, table, described[0], described[1], csr, grad, longest)


def one_signed(grad: Tensor) -> Tensor:
    """A gradient whose columns are all positive or all negative, so that no sum of a column cancels."""
    sign = torch.ones(grad.shape[1], dtype=grad.dtype, device=grad.device)
    sign[1::2] = -1
    return (grad.abs() + 0.25) * sign


def update_of(work: Workload, optimizers: Sequence[Optimizer | None], step: int = 1) -> Update:
    """Everything `row_update` needs for one optimizer a table; None freezes a table. Gaps between slots hold NaN."""
    rules = list(dict.fromkeys(optimizer.kernel_class() for optimizer in optimizers if optimizer is not None))
    tables = work.group.tables.copy()
    hyper = np.zeros((len(tables), HYPER_WIDTH))
    pieces: list[np.ndarray] = []
    size = 0
    for row, optimizer, constants in zip(tables, optimizers, hyper, strict=True):
        if optimizer is None:
            row[T_RULE] = FROZEN
            continue
        row[T_RULE] = rules.index(optimizer.kernel_class())
        constants[:] = optimizer.hyper(optimizer.current_learning_rate())
        for number, slot in enumerate(optimizer.slots()):
            count = int(row[T_ROWS] * (row[T_DIM] if slot.per == "element" else 1))
            row[T_SLOT0 + number] = size
            gap = np.full(-count % ALIGNMENT, np.nan)
            pieces += [np.full(count, slot.initial), gap]
            size += count + len(gap)
    kind = torch.float64 if work.table.dtype == torch.float64 else torch.float32
    slots = torch.from_numpy(np.concatenate([np.zeros(0), *pieces])).to(kind).to(work.table.device)
    on_device: list[Any] = [torch.from_numpy(array).to(work.table.device) for array in (tables, hyper)]
    steps = torch.full((len(tables),), step, device=work.table.device)
    return Update(work.table, work.features, on_device[0], rules, slots, on_device[1], steps)


def judged_update(update: Update) -> reference.Update:
    """An update as the judge takes it."""
    scale = 1.0 if update.grad_scale is None else float(update.grad_scale)
    skip = update.skip is not None and float(update.skip) != 0
    arrays = (numbers(update.table), numbers(update.features), numbers(update.tables))
    state = (numbers(update.slots), numbers(update.hyper), numbers(update.steps))
    return reference.Update(*arrays, update.rules, *state, scale, skip)
