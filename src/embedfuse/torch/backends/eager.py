"""Plain PyTorch: any device, any float type, no native code. The fallback, and the second opinion on the others.

Ids that count are listed once, with the place of their row and of their gradient; all features of one width then go
through the same few calls. Sums are made in pieces, and the pieces' sums likewise: the order is fixed and no long sum
loses its small terms. Ids out of range are reported on every device, at the price of a synchronisation; the policy
"ignore" means "drop" here.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...optim.base import apply_rule
from ...plan import (
    COLUMN,
    DEFAULT_ID,
    DIM,
    FROZEN,
    MOMENT,
    OFFSET,
    POWER,
    ROWS,
    STRIDE,
    T_DIM,
    T_OFFSET,
    T_RULE,
    T_SLOT0,
)
from . import Csr, Policy, Prepared, Rows, Shards, Update, accumulation_dtype, count
from .eager_sums import (
    blocks,
    by_width,
    grad_of,
    ids_of_bags,
    join_offsets,
    moments,
    read,
    row_sums,
    rows_of,
    runs,
    scales,
    sum_runs,
    tables_of,
    view_of_table,
    weighted,
    write_columns,
)
from .rounding import rounded


class EagerBackend:
    """See `Backend`. Reading and summing is shared by all ops; each only says what is done with a row."""

    name = "eager"

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @torch.no_grad()
    def pooled_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, normalised: bool, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(table.dtype)
        ids = read(features, csr, table.dtype, policy)
        scale = scales(features, csr, ids, dtype) if normalised else table.new_empty(0, dtype=dtype)
        out = table.new_zeros((csr.bags, width))
        for dim, numbers, mine in by_width(features, ids):
            rows = weighted(rows_of(table, features, mine, dim), mine.weight)
            sums = sum_runs(rows, ids_of_bags(csr, mine), dim, dtype)
            write_columns(out, features, numbers, sums * scale[:, None] if normalised else sums)
        return out, scale

    @torch.no_grad()
    def row_update(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> None:
        count(update)
        if update.skip is not None and float(update.skip) != 0:
            return
        for number, table, rows, g in _sums_of_learners(update, csr, scale, grad):
            if update.grad_scale is not None:
                g = g * update.grad_scale
            rule = update.rules[table[T_RULE]]
            weights = view_of_table(update.table, table, T_OFFSET, "element")
            slots = [view_of_table(update.slots, table, T_SLOT0 + i, kind) for i, kind in enumerate(rule.slot_kinds)]
            old = tuple(slot.index_select(0, rows) for slot in slots)
            w = weights.index_select(0, rows).to(g.dtype)
            w, new = apply_rule(rule, w, g, old, update.hyper[number], update.steps[number], torch)
            w = rounded(w, weights.dtype, update.hyper[number], update.steps[number], rows)
            weights.index_copy_(0, rows, w)
            for slot, value in zip(slots, new, strict=True):
                slot.index_copy_(0, rows, value)

    @torch.no_grad()
    def row_grad(
        self, out: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor, rows: Rows | None = None,
        dots: Tensor | None = None, fill: bool = False,
    ) -> None:  # fmt: skip
        if dots is not None and rows is None:
            raise ValueError("`rows` must be given with `dots`, which are made with them")
        if fill:
            out.zero_()
        source, tables = rows or (None, tables_of(features))
        for _, table, row, g in row_sums(features, tables, source, csr, scale, grad, out.dtype, dots=dots):
            view_of_table(out, table, T_OFFSET, "element").index_copy_(0, row, g.to(out.dtype))

    @torch.no_grad()
    def sparse_row_grad(
        self, features: Tensor, tables: Tensor, source: Tensor, csr: Csr, scale: Tensor, grad: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        found = {
            number: (rows, g)
            for number, _, rows, g in row_sums(features, tables, source, csr, scale, grad, source.dtype)
        }
        none = csr.offsets.new_empty(0)
        return [
            found.get(number, (none, grad.new_empty((0, dim)))) for number, dim in enumerate(tables[:, T_DIM].tolist())
        ]

    def join_offsets(self, offsets: Tensor) -> Tensor:
        return join_offsets(offsets)

    @torch.no_grad()
    def row_square_sum(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        dtype = accumulation_dtype(update.table.dtype)
        squares = [g.square().sum(1) for _, _, _, g in _sums_of_learners(update, csr, scale, grad)]
        flat = torch.cat([*squares, torch.zeros(1, dtype=dtype, device=grad.device)])
        whole = torch.full((1,), flat.shape[0], device=grad.device)
        return sum_runs(lambda part: flat[part, None], whole, 1, dtype).squeeze()

    @torch.no_grad()
    def prepare_ids(self, features: Tensor, csr: Csr, shards: Shards | None, policy: Policy) -> Prepared:
        if shards is not None:
            # out of range, too, if beyond the end of its shard
            beyond = (csr.ids >= 0) & (csr.ids < features[0, ROWS]) & (_in_shards(csr.ids, shards)[0] < 0)
            csr = csr._replace(ids=torch.where(beyond, features[0, ROWS], csr.ids))
        ids = read(features, csr, torch.float64, policy)
        count, all_bags = csr.ids.shape[0], csr.offsets.shape[0] - 1
        bag = torch.arange(all_bags, device=csr.ids.device)
        places = torch.arange(count, device=bag.device) + torch.repeat_interleave(bag, csr.offsets.diff())
        rows = torch.full((count + all_bags,), -1, dtype=torch.int64, device=bag.device)
        rows[places[ids.position]] = ids.id
        ends = csr.offsets[1:] + bag
        empty = torch.bincount(ids.bag, minlength=all_bags) == 0
        default = features[:, DEFAULT_ID][bag // max(csr.bags, 1) % max(features.shape[0], 1)]
        rows[ends] = torch.where(empty, default, -1)
        weights = None
        if csr.weights is not None:
            weights = csr.weights.new_zeros(rows.shape[0])
            weights[places] = csr.weights
            weights[ends] = (rows[ends] >= 0).to(weights.dtype)
        starts = None
        if shards is not None:
            rows, starts = _in_shards(rows, shards)
        return Prepared(rows, starts, csr.offsets + torch.arange(all_bags + 1, device=bag.device), weights, places)

    @torch.no_grad()
    def coefficient_grad(self, table: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        dtype = accumulation_dtype(table.dtype)
        ids = read(features, csr, table.dtype)
        dots = torch.zeros(csr.ids.shape[0], dtype=dtype, device=table.device)
        for dim, _, mine in by_width(features, ids):
            rows = rows_of(table, features, mine, dim)
            upstream = grad_of(features, mine, grad, dim, dtype)
            for part in blocks(mine.id.shape[0], dim):
                dots[mine.position[part]] = (rows(part) * upstream(part)).sum(1)
        out = torch.zeros_like(dots)
        result = dots[ids.position]
        power, moment = features[:, POWER][ids.feature], features[:, MOMENT][ids.feature]
        if bool(((power != 0) & (moment != 0)).any()):
            weight = torch.ones_like(result) if ids.weight is None else ids.weight
            products = weight * result
            pooled = sum_runs(lambda part: products[part, None], ids_of_bags(csr, ids), 1, dtype).squeeze(1)
            total = moments(features, csr, ids, dtype)
            ratio = torch.where(total == 0, 0, pooled / torch.where(total == 0, 1, total))
            slope = power / 2 * moment * weight.pow((moment - 1).clamp(min=0))
            result = result - slope.to(dtype) * ratio[ids.bag]
        out[ids.position] = result if scale.shape[0] == 0 else result * scale.to(dtype)[ids.bag]
        return out

    @torch.no_grad()
    def max_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """`out[b, columns] = max_i w_i row(id_i)` elementwise `[B, width]`; and the position in `csr.ids` that each
        element came from, int64 `[B, width]`, -1 in an empty bag, whose `out` is 0.

        The first of equal values wins, and the first NaN over all numbers.
        """
        dtype = accumulation_dtype(table.dtype)
        ids = read(features, csr, table.dtype, policy)
        out = table.new_zeros((csr.bags, width))
        winners = torch.full((csr.bags, width), -1, device=table.device)
        for dim, numbers, mine in by_width(features, ids):
            shape = (csr.offsets.shape[0] - 1, dim)
            values = weighted(rows_of(table, features, mine, dim), mine.weight)(slice(None))
            bag = mine.bag[:, None].expand_as(values)
            best = torch.full(shape, -torch.inf, dtype=dtype, device=table.device)
            best.scatter_reduce_(0, bag, values, "amax")
            wins = (values == best[mine.bag]) | values.isnan()
            last = csr.ids.shape[0]
            place = torch.where(wins, mine.position[:, None], last)
            first = torch.full(shape, last, device=table.device).scatter_reduce_(0, bag, place, "amin")
            empty = first == last
            write_columns(out, features, numbers, best.masked_fill(empty, 0))
            write_columns(winners, features, numbers, first.masked_fill(empty, -1))
        return out, winners

    @torch.no_grad()
    def max_grad(self, out: Tensor, features: Tensor, csr: Csr, winners: Tensor, grad: Tensor) -> None:
        """`w * grad` of each element that won, summed into `out` (flat, zero on entry) at its element of the table."""
        dtype = accumulation_dtype(out.dtype)
        dims = features[:, DIM]
        number = torch.repeat_interleave(torch.arange(dims.shape[0], device=grad.device), dims)
        lane = torch.arange(number.shape[0], device=grad.device) - (dims.cumsum(0) - dims)[number]
        column = features[number, COLUMN] + lane
        won = winners[:, column]
        bag, at = (won >= 0).nonzero(as_tuple=True)
        position = won[bag, at]
        start = features[number[at], OFFSET] + csr.ids[position].long() * features[number[at], STRIDE] + lane[at]
        values = grad.detach()[bag, column[at]].to(dtype)
        if csr.weights is not None:
            values = values * csr.weights[position].to(dtype)
        start, order = start.sort(stable=True)
        values = values[order]
        leaders, lengths = runs(start)
        out[start[leaders]] = sum_runs(lambda part: values[part, None], lengths, 1, dtype).squeeze(1).to(out.dtype)


def _sums_of_learners(update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> Iterator[Any]:
    return row_sums(
        update.features, update.tables, update.table, csr, scale, grad, update.table.dtype,
        lambda table: table[T_RULE] != FROZEN,
    )  # fmt: skip


def _in_shards(ids: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    """Rows counted shard after shard, and where they start; -1 for ids that are negative or beyond their shard."""
    first, rows, start = shards.described.unbind(1)
    if shards.modulo:
        shard, row = ids.clamp(min=0) % len(rows), ids.clamp(min=0) // len(rows)
    else:
        # shards without rows share their start with the next: the last of them has the row
        shard = torch.searchsorted(first.contiguous(), ids.clamp(min=0), right=True) - 1
        row = ids - first[shard]
    counts = (ids >= 0) & (row < rows[shard])
    starts = torch.where(counts, start[shard] + row * shards.stride, -1)
    return torch.where(counts, first[shard] + row, -1), starts


BACKEND = EagerBackend()
