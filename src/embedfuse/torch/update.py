"""One optimizer step of one group: join what the lookups left behind, and change the rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..optim import apply_rule
from ..plan import COLUMN, ROW_BASE, ROWS, TABLE
from .backends import Csr, Rows, Update, accumulation_dtype, count, select
from .backends.rounding import rounded
from .bags import joined
from .ledger import Record
from .state import GroupState
from .zero_pages import zero_pages

Joined = tuple[Tensor, Csr, Tensor, Tensor]
"""`features`, `csr`, `scale`, `grad` as the backends take them."""


class Work(NamedTuple):
    """A step of one group, checked and ready."""

    state: GroupState
    records: list[Record]
    learns: tuple[bool, ...]
    rates: list[float]
    hyper: np.ndarray | None


def run(work: Work, grad_scale: Tensor | None, skip: Tensor | None) -> None:
    """Makes the step; the two scalars may be elsewhere than the tables."""
    grad_scale = None if grad_scale is None else grad_scale.to(work.state.slots.device)
    skip = None if skip is None else skip.to(work.state.slots.device)
    if work.hyper is not None:
        work.state.set_hyper(work.rates, work.hyper)
    step(work.state, work.records, work.learns, grad_scale, skip)


def ready(records: Sequence[Record], buffer: Tensor, learns: Sequence[bool]) -> list[Record]:
    """The records as one step of the tables that learn can take them.

    On the tables' device, should these have moved; multiplied by factors of their own; and without the features whose
    table was frozen when backward ran, if another record of the step trains it.
    """
    return [_ready(record, buffer, learns) for record in records]


def _ready(record: Record, buffer: Tensor, learns: Sequence[bool]) -> Record:
    device, dtype = buffer.device, accumulation_dtype(buffer.dtype)
    csr, scale, grad = record.csr, record.scale, record.grad
    if grad.device != device or scale.dtype != dtype:
        weights = None if csr.weights is None else csr.weights.to(device, dtype)
        csr = Csr(csr.ids.to(device), csr.offsets.to(device), weights, csr.bags)
        record = replace(record, csr=csr, scale=scale.to(device, dtype), grad=grad.to(device))
    if record.factor is not None:
        factor = record.factor.to(device, dtype)
        record = replace(record, grad=record.grad.to(dtype) * factor)
    if record.learns != tuple(learns):
        features = record.launch.features.clone()
        frozen = ~torch.tensor(record.learns, device=device)
        # a table of no rows has no ids
        features[:, ROWS].masked_fill_(frozen[features[:, TABLE]], 0)
        record = replace(record, launch=replace(record.launch, features=features))
    return record


def join(records: Sequence[Record]) -> Joined:
    """Several lookups as one, so that a row they share is stepped once, with the sum of their gradients."""
    first = records[0]
    if len(records) == 1:
        return first.launch.features, first.csr, first.scale, first.grad
    if any(record.launch is not first.launch for record in records):
        return _side_by_side(records)
    bags = max(record.csr.bags for record in records)
    records = [_filled_up(record, bags) for record in records]
    csr = _joined_csr(records, bags)
    scale = torch.cat([record.scale for record in records])
    return first.launch.features, csr, scale, torch.cat([record.grad for record in records])


def _side_by_side(records: Sequence[Record]) -> Joined:
    """Lookups of different features: their descriptors and columns one after the other, as one wider lookup."""
    bags = max(record.csr.bags for record in records)
    normalised = any(record.launch.normalised for record in records)
    filled = [_filled_up(record, bags) for record in records]
    features, scales, column = [], [], 0
    for record in filled:
        own = record.launch.features.clone()
        own[:, COLUMN] += column
        column += record.launch.width
        features.append(own)
        missing = normalised and not record.launch.normalised
        scales.append(record.scale.new_ones(own.shape[0] * bags) if missing else record.scale)
    return (
        torch.cat(features), _joined_csr(filled, bags), torch.cat(scales), torch.cat([r.grad for r in filled], 1),
    )  # fmt: skip


def _joined_csr(records: Sequence[Record], bags: int) -> Csr:
    return Csr(*joined([record.csr for record in records]), bags)


def _filled_up(record: Record, bags: int) -> Record:
    """The same lookup with empty bags after the real ones."""
    have = record.csr.bags
    if have == bags:
        return record
    features = record.launch.features.shape[0]
    starts = record.csr.offsets[:-1].view(features, have)
    ends = record.csr.offsets[1:].view(features, have)[:, -1:] if have else starts.new_zeros(features, 1)
    offsets = torch.cat([starts, ends.expand(features, bags - have)], 1).reshape(-1)
    scale = record.scale
    if scale.shape[0] or record.launch.normalised:
        scale = torch.nn.functional.pad(scale.view(features, have), (0, bags - have)).reshape(-1)
    grad = torch.nn.functional.pad(record.grad, (0, 0, 0, bags - have))
    csr = record.csr._replace(offsets=torch.cat([offsets, record.csr.offsets[-1:]]), bags=bags)
    return replace(record, csr=csr, scale=scale, grad=grad)


def square_sum(state: GroupState, records: Sequence[Record], learns: Sequence[bool]) -> Tensor:
    """The sum of squares of all row gradients of the tables that learn, each row's contributions added first."""
    features, csr, scale, grad = join(records)
    tables, _ = state.masked(learns)
    update = _update(state, features, tables, None, None)
    return select(grad.device, state.arena.buffer.dtype).row_square_sum(update, csr, scale, grad)


def step(
    state: GroupState, records: Sequence[Record], learns: Sequence[bool], grad_scale: Tensor | None, skip: Tensor | None
) -> None:
    """One step of every table that learns.

    Args:
        state: the group's state; written, as are the tables.
        records: the lookups since the last step.
        learns: for each table, whether it does.
        grad_scale: scalar the gradients are multiplied by.
        skip: scalar; if not 0, nothing changes, not even the step counters.
    """
    features, csr, scale, grad = join(records)
    described, ones = state.masked(learns)
    counted: Tensor | None = ones
    backend = select(grad.device, state.arena.buffer.dtype)
    tables = state.by_mode(tuple(learns))
    if tables.keys() != {"rows"}:
        # passes of other kinds read the counters, too
        count(_update(state, features, described, grad_scale, skip, counted))
        counted = None
    if "rows" in tables:
        update = state.update_of(features, tables["rows"], counted)
        if grad_scale is not None or skip is not None:
            update = replace(update, grad_scale=grad_scale, skip=skip)
        backend.row_update(update, csr, scale, grad)
    if "each" in tables:
        update = _update(state, features, tables["each"], grad_scale, skip)
        for ids in _one_by_one(features, csr):
            backend.row_update(update, csr._replace(ids=ids), scale, grad)
    if "all" in tables:
        _step_all_rows(state, (features, csr, scale, grad), learns, grad_scale, skip)
    state.arena.written()


def _update(
    state: GroupState, features: Tensor, tables: Tensor, grad_scale: Tensor | None, skip: Tensor | None,
    counted: Tensor | None = None,
) -> Update:  # fmt: skip
    return Update(
        state.arena.buffer, features, tables, state.rules, state.slots, state.hyper, state.steps, grad_scale, skip,
        counted, state.at_random,
    )  # fmt: skip


def _one_by_one(features: Tensor, csr: Csr) -> list[Tensor]:
    """The ids in rounds, each row at most once in a round, in the order of the batch; waits for the device."""
    lengths = csr.offsets.diff()
    bag = torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)
    feature = (bag // max(csr.bags, 1)) % features.shape[0]
    present = (csr.ids >= 0) & (csr.ids < features[feature, ROWS])
    keys = torch.where(present, features[feature, ROW_BASE] + csr.ids, -1)
    order = torch.argsort(keys, stable=True)
    ordered = keys[order]
    first = torch.searchsorted(ordered, ordered)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first
    rank = torch.where(present, rank, -1)
    rounds = int(rank.max()) + 1 if len(rank) else 0
    return [torch.where(rank == number, csr.ids, -1) for number in range(rounds)]


def _step_all_rows(
    state: GroupState, joined: Joined, learns: Sequence[bool], grad_scale: Tensor | None, skip: Tensor | None
) -> None:
    """Dense semantics: every row of the table steps, with gradient 0 where it was not looked up."""
    features, csr, scale, grad = joined
    arena = state.arena
    # summed in the accumulation type: the tables' own may be too coarse for a gradient
    flat = zero_pages((arena.size,), arena.buffer, state.slots.dtype)
    # whole tables: a feature whose table was frozen in one of several lookups says it has no rows
    rows = Rows(arena.buffer.to(flat.dtype) if arena.is_cut else flat, state.masked([True] * len(learns))[0])
    select(grad.device, flat.dtype).row_grad(flat, features, csr, scale, grad, rows)
    for number, (table, start) in enumerate(zip(arena.parameters, arena.starts, strict=True)):
        if not learns[number] or state.modes[number] != "all":
            continue
        with torch.no_grad():
            g = flat[start : start + table.numel()].view(table.shape).to(state.slots.dtype)
            if grad_scale is not None:
                g = g * grad_scale
            old = [state.view(number, slot) for slot in state.names(number)]
            hyper = state.hyper[number].to(state.slots.dtype)
            rule = state.optimizers[number].kernel_class()
            w, new = apply_rule(rule, table.to(g.dtype), g, tuple(old), hyper, state.steps[number], torch)
            every = torch.arange(table.shape[0], device=table.device)
            w = rounded(w, table.dtype, state.hyper[number], state.steps[number], every)
            for target, value in ((table, w), *zip(old, new, strict=True)):
                target.copy_(value if skip is None else torch.where(skip == 0, value, target.to(value.dtype)))
