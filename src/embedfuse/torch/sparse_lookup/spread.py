"""A lookup in a table whose shards lie on several devices: one gather on each, and their sums added up.

Ids are looked through once, where they are. Each device gets those of its shards; what comes back is `[B, D]`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...combiners import COMBINERS
from ...plan import NO_DEFAULT
from ..functions import call
from ..prepare import PrepareIds
from .shards import ANYWHERE, Question, ShardedLookup, describe, starts_of


def home_of(table: Tensor) -> torch.device:
    """Where a shard lies."""
    return table.device


def spread_lookup(
    question: Question, tables: Sequence[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    """`[B, D]` on the device of the ids.

    Raises:
        BadId: an id outside the tables.
    """
    bags, device = offsets.shape[0] - 1, ids.device
    homes: dict[torch.device, list[int]] = {}
    for number, table in enumerate(tables):
        homes.setdefault(home_of(table), []).append(number)
    starts = [0] * len(tables)
    for members in homes.values():
        _, of_members = starts_of([tables[number] for number in members])
        for number, start in zip(members, of_members, strict=True):
            starts[number] = start
    known = describe(question, tuple(starts), device)
    rows, places, ends, moved, _ = call(PrepareIds, weights, known.ids, ids, offsets, bags, known.shards, "raise", 0)
    if weights is None:
        moved = None
    first = known.shards.described[:, 0].contiguous()
    shard = torch.searchsorted(first, rows.clamp(min=0), right=True) - 1
    total = torch.zeros((), dtype=tables[0].dtype, device=device)
    for home, members in homes.items():
        own = [tables[number] for number in members]
        # the sums alone, of rows numbered within this device: what divides them is known only where the ids are
        plain = question._replace(
            combiner="sum", flags=0, default_id=NO_DEFAULT, sizes=tuple(len(table) for table in own)
        )
        origin, own_starts = starts_of(own)
        described = describe(plain, own_starts, home)
        shift = torch.full_like(first, -ANYWHERE)
        shift[members] = described.shards.described[:, 0].to(device) - first[members]
        own_rows = (rows + shift[shard]).clamp(min=-1)
        own_places = torch.where(own_rows >= 0, places, -1)
        batch = (own_rows.to(home), own_places.to(home), ends.to(home))
        own_weights = None if moved is None else moved.to(home)
        out, _ = call(ShardedLookup, own_weights, *batch, described, origin, plain, *own)
        total = total + out.to(device)
    return total if COMBINERS[question.combiner].power == 0 else total * _scale(question, rows, ends, moved, total)


def _scale(question: Question, rows: Tensor, offsets: Tensor, weights: Tensor | None, like: Tensor) -> Tensor:
    """`1 / (Σ w**p) ** (q / 2)` of each bag, `[B, 1]`, 0 where that divides by 0; differentiable."""
    combiner, bags = COMBINERS[question.combiner], offsets.shape[0] - 1
    bag = torch.repeat_interleave(torch.arange(bags, device=rows.device), offsets.diff(), output_size=rows.shape[0])
    here = rows >= 0
    # weights that do not count may be NaN, whose powers' gradients are too
    powers = here.float() if weights is None else torch.where(here, weights, 0).pow(combiner.moment) * here
    moment = powers.new_zeros(bags).index_add(0, bag, powers)
    safe = torch.where(moment == 0, 1, moment)
    root = safe if combiner.power == 2 else safe.sqrt()
    return torch.where(moment == 0, 0, 1 / root).to(like.dtype)[:, None]
