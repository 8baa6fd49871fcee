"""A lookup in one table that is cut into several tensors of one device: one gather, one backward.

The kernels read rows by where they start, counted from the first of the tensors in memory, so nothing is copied.
Traced calls, and backends' fallbacks for tensors that cannot be addressed so, join the tensors first.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...plan import (
    DIM,
    FROZEN,
    ROWS,
    STRIDE,
    TABLE_WIDTH,
    PlannedFeature,
    PlannedTable,
    bits_of,
    plan_group,
)
from ..backends import Csr, Rows, Shards, select
from ..functions import call
from ..once import differentiable_once
from ..prepare import PrepareIds

ANYWHERE = 1 << 62
"""Rows of the table of all memory."""
UNIT = 16
"""Elements, at most, that starts of rows are counted in: what the widest load holds."""


class Question(NamedTuple):
    """What is asked of sharded tables, beside their ids; all that descriptors depend on."""

    sizes: tuple[int, ...]
    dim: int
    modulo: bool
    combiner: str
    flags: int
    max_norm: float
    default_id: int


class Described(NamedTuple):
    """Descriptors on the device."""

    ids: Tensor  # of the table as a whole, for ids
    places: Tensor  # of all memory, for starts of rows
    tables: Tensor  # of each shard
    shards: Shards
    normalised: bool


@lru_cache(maxsize=1024)
def describe(question: Question, starts: tuple[int, ...], device: torch.device) -> Described:
    total, dim = sum(question.sizes), question.dim
    feature = PlannedFeature(0, question.combiner, question.flags, question.default_id)
    group = plan_group([PlannedTable(total, dim, question.max_norm)], [feature])
    unit = UNIT
    while any(number % unit for number in (dim, *starts)):
        unit //= 2
    places = group.features.copy()
    places[0, ROWS], places[0, STRIDE], places[0, DIM] = ANYWHERE, unit, dim
    first = np.cumsum([0, *question.sizes])[:-1]
    tables = np.zeros((len(starts), TABLE_WIDTH), np.int64)
    for number, (rows, base, start) in enumerate(zip(question.sizes, first, starts, strict=True)):
        tables[number] = base * dim, rows, dim, base, FROZEN, 0, 0, start, bits_of(question.max_norm)
    shards = np.stack([first, question.sizes, np.array(starts) // unit], 1).astype(np.int64)
    with torch.inference_mode(False):
        ids, memory, own, described = (
            torch.from_numpy(array).to(device) for array in (group.features, places, tables, shards)
        )
    return Described(ids, memory, own, Shards(described, question.modulo, dim // unit), group.normalised)


def sharded_lookup(
    question: Question, tables: Sequence[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    """`[B, D]`; `tables` are contiguous, of one device, dtype and width.

    Raises:
        BadId: an id outside the tables.
    """
    bags = offsets.shape[0] - 1
    origin, starts = starts_of(tables)
    known = describe(question, starts, ids.device)
    rows, places, ends, moved, _ = call(PrepareIds, weights, known.ids, ids, offsets, bags, known.shards, "raise", 0)
    out, _ = call(
        ShardedLookup, None if weights is None else moved, rows, places, ends, known, origin, question, *tables
    )
    result: Tensor = out
    return result


def starts_of(tables: Sequence[Tensor]) -> tuple[int, tuple[int, ...]]:
    """Which tensor comes first in memory, and where each starts, counted from it."""
    addresses = [table.data_ptr() for table in tables]
    # an empty tensor has no address
    present = [address for address, table in zip(addresses, tables, strict=True) if table.numel()]
    low, size = min(present, default=0), tables[0].element_size()
    starts = tuple(
        (address - low) // size if table.numel() else 0 for address, table in zip(addresses, tables, strict=True)
    )
    return (addresses.index(low) if present else 0), starts


class ShardedLookup(torch.autograd.Function):
    """`(weights, …, *tables) → out [B, D]`, of ids that `prepare_ids` made; differentiable once."""

    @staticmethod
    def forward(
        weights: Tensor | None, rows: Tensor, places: Tensor, offsets: Tensor, known: Described, origin: int,
        question: Question, *tables: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        base, bags = tables[origin].detach().reshape(-1), offsets.shape[0] - 1
        csr = Csr(places, offsets, weights, bags)
        backend = select(base.device, base.dtype)
        return backend.pooled_lookup(base, known.places, csr, question.dim, known.normalised, "drop")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weights, rows, places, offsets, known, origin, question, *tables = inputs
        ctx.known, ctx.origin, ctx.question, ctx.count = known, origin, question, len(tables)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        needed = ctx.needs_input_grad[0] or question.max_norm != np.inf
        ctx.save_for_backward(weights, rows, places, offsets, output[1], *(tables if needed else ()))

    @staticmethod
    @differentiable_once(
        "the gradient of a lookup in shards cannot be differentiated again: join them, with torch.cat(shards) where "
        'they are of "div", and give the one table'
    )
    def backward(ctx: Any, grad: Tensor | None, _scale_grad: Any) -> Any:
        weights, rows, places, offsets, scale, *tables = ctx.saved_tensors
        known, question = ctx.known, ctx.question
        result: list[Any] = [None] * (7 + ctx.count)
        if grad is None:
            return tuple(result)
        backend, bags = select(grad.device, grad.dtype), offsets.shape[0] - 1
        base = tables[ctx.origin].detach().reshape(-1) if tables else None
        if base is not None and ctx.needs_input_grad[0]:
            csr = Csr(places, offsets, weights, bags)
            result[0] = backend.coefficient_grad(base, known.places, csr, scale, grad)
        if any(ctx.needs_input_grad[7:]):
            # shards of other devices lie in it, too, and stay 0
            flat = grad.new_zeros(sum(question.sizes) * question.dim)
            csr = Csr(rows, offsets, weights, bags)
            cut = None if base is None or question.max_norm == np.inf else Rows(base, known.tables)
            backend.row_grad(flat, known.ids, csr, scale, grad, cut)
            shares = flat.view(-1, question.dim).split(list(question.sizes))
            for number, share in enumerate(shares):
                if ctx.needs_input_grad[7 + number]:
                    result[7 + number] = share
        return tuple(result)
