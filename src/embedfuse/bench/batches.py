"""Drawing a case: first weights, batches of ids, upstream gradients; and counting the bytes that must move."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import BYTES, Case

BATCHES = 3
FACTOR = 2_147_483_629
"""A prime, so that popular rows are not neighbours in memory and no two ranks meet."""
STATES = {"sgd": 0, "adagrad": 1, "adam": 2}
"""Elements of float32 state per element of a row."""


@dataclass(frozen=True)
class Batch:
    """One batch on its device: feature after feature, within a feature bag after bag."""

    ids: Tensor  # [N]
    offsets: Tensor  # int64 [T * B + 1]
    weights: Tensor | None  # float32 [N]
    starts: tuple[int, ...]  # where each feature's ids begin, and N
    grad: Tensor  # [B, width]


@dataclass(frozen=True)
class Workload:
    """A case with its numbers drawn."""

    case: Case
    device: torch.device
    weights: Sequence[Tensor]  # of each table, what every provider starts from
    batches: Sequence[Batch]
    again: Batch  # ids of the first batch, gradient of the second, for a second checked step

    def features(self, batch: Batch) -> Iterator[tuple[int, slice, slice, Tensor]]:
        """Of each table: its number, its ids' place, its columns, and its offsets from 0."""
        column, bags = 0, self.case.bags
        for number, dim in enumerate(self.case.dims):
            place = slice(batch.starts[number], batch.starts[number + 1])
            offsets = batch.offsets[number * bags : (number + 1) * bags + 1] - batch.starts[number]
            yield number, place, slice(column, column + dim), offsets
            column += dim


def draw(case: Case, device: torch.device, seed: int = 0) -> Workload:
    """Weights even in [-1, 1), some batches, gradients from a normal distribution."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    weights = [
        torch.empty(rows, dim, dtype=dtype, device=device).uniform_(-1, 1, generator=generator)
        for rows, dim in zip(case.rows, case.dims, strict=True)
    ]
    batches = [_batch(case, device, generator) for _ in range(BATCHES)]
    first = batches[0]
    again = Batch(first.ids, first.offsets, first.weights, first.starts, batches[1].grad)
    return Workload(case, device, weights, batches, again)


def draw_ids(kind: str, rows: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` ids of a table, int64 on the generator's device."""
    device = generator.device
    if kind == "unique":
        if count > rows:
            raise ValueError(f"`rows` must be at least the number of unique ids, {count}, got {rows}")
        return torch.randperm(rows, generator=generator, device=device)[:count]
    if kind.startswith("zipf"):
        power = 1 - float(kind.split()[1])
        drawn = torch.rand(count, generator=generator, dtype=torch.float64, device=device)
        rank = (((float(rows) ** power - 1) * drawn + 1) ** (1 / power)).long().clamp(1, rows) - 1
        scattered: Tensor = rank * FACTOR % rows
        return scattered
    ids = torch.randint(rows, (count,), generator=generator, device=device)
    if kind == "hot":
        ids[::2] = 0
    return ids


def _batch(case: Case, device: torch.device, generator: torch.Generator) -> Batch:
    lengths, ids, starts = [], [], [0]
    for rows, (low, high) in zip(case.rows, case.lengths, strict=True):
        own = torch.randint(low, high + 1, (case.bags,), generator=generator, device=device)
        lengths.append(own)
        starts.append(starts[-1] + int(own.sum()))
        ids.append(draw_ids(case.ids, rows, starts[-1] - starts[-2], generator))
    offsets = torch.zeros(len(case.rows) * case.bags + 1, dtype=torch.int64, device=device)
    offsets[1:] = torch.cat(lengths).cumsum(0)
    weights = None
    if case.weights != "none":
        weights = torch.empty(starts[-1], device=device).uniform_(0.5, 2, generator=generator)
    grad = torch.empty(case.bags, case.width, dtype=getattr(torch, case.dtype), device=device)
    grad.normal_(generator=generator)
    return Batch(torch.cat(ids).to(getattr(torch, case.index)), offsets, weights, tuple(starts), grad)


@dataclass(frozen=True)
class Bytes:
    """What a pass cannot avoid to move, the mean over the batches: each touched row once in (and once out)."""

    ids: float
    unique: float  # distinct rows
    forward: float
    backward: float  # with the optimizer
    asked: float  # forward, with every id's row counted

    def of(self, phase: str) -> float:
        """Of a phase."""
        found: float = self.forward + self.backward if phase == "train" else getattr(self, phase)
        return found


def count_bytes(work: Workload) -> Bytes:
    """Counts distinct rows on the device."""
    case, size = work.case, BYTES[work.case.dtype]
    ids = unique = rows_in = states = asked = 0.0
    for batch in work.batches:
        for number, place, _, _ in work.features(batch):
            dim = case.dims[number]
            distinct = len(batch.ids[place].unique())
            state = 4 if case.optimizer == "rowwise_adagrad" else 4 * dim * STATES[case.optimizer]
            ids += place.stop - place.start
            unique += distinct
            rows_in += distinct * dim * size
            states += distinct * state
            asked += (place.stop - place.start) * dim * size
    ids, unique, rows_in, states, asked = (total / len(work.batches) for total in (ids, unique, rows_in, states, asked))
    pooled = case.bags * case.width * size
    index = ids * (work.batches[0].ids.element_size() + (0 if case.weights == "none" else 4))
    forward = rows_in + pooled + index
    # gradients of weights read the rows' values, which the update reads anyway
    backward = 2 * rows_in + 2 * states + pooled + index + (4 * ids if case.weights == "learned" else 0)
    return Bytes(ids, unique, forward, backward, asked + pooled + index)
