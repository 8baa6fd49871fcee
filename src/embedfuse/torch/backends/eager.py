"""Plain PyTorch: any device, any float type, no native code. The fallback, and the second opinion on the others.

Ids that count are listed once, with the place of their row and of their gradient; all features of one width then go
through the same few calls. Sums are made in pieces of `PIECE`, and the pieces' sums likewise: the order is fixed and no
long sum loses its small terms. Ids out of range are reported on every device, at the price of a synchronisation; the
policy "ignore" means "drop" here.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...combiners import scale_of
from ...optim.base import apply_rule
from ...plan import (
    COLUMN,
    DIM,
    DROP_NEGATIVE_IDS,
    DROP_NONPOSITIVE_WEIGHTS,
    FLAGS,
    FROZEN,
    MOMENT,
    OFFSET,
    POWER,
    ROW_BASE,
    ROWS,
    T_DIM,
    T_OFFSET,
    T_ROWS,
    T_RULE,
    T_SLOT0,
    TABLE,
)
from . import BadId, Csr, Policy, Update, accumulation_dtype
from .rounding import rounded

PIECE = 64
"""Terms that are added one after the other."""
BLOCK = 1 << 22
"""Elements that are gathered at a time, which bounds the memory in use."""


class _Ids(NamedTuple):
    """The ids that count, in the order of the batch. All `[M]`, int64."""

    position: Tensor  # in `csr.ids`
    id: Tensor
    feature: Tensor
    bag: Tensor  # in `csr.offsets`
    row: Tensor  # of `out` and `grad`
    weight: Tensor | None  # of the accumulation type

    def take(self, index: Tensor | slice) -> "_Ids":
        weight = None if self.weight is None else self.weight[index]
        return _Ids(self.position[index], self.id[index], self.feature[index], self.bag[index], self.row[index], weight)


# --- reading the batch ---------------------------------------------------------------------------------------------


def _read(features: Tensor, csr: Csr, dtype: torch.dtype, policy: Policy = "drop") -> _Ids:
    bags, count = max(csr.bags, 1), max(features.shape[0], 1)
    lengths = csr.offsets.diff()
    bag = torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)
    feature = bag // bags % count
    row = bag // (bags * count) * bags + bag % bags
    ids, flags = csr.ids.long(), features[:, FLAGS][feature]
    inside = (ids >= 0) & (ids < features[:, ROWS][feature])
    if policy == "raise":
        bad = ~inside & ~((ids < 0) & (flags & DROP_NEGATIVE_IDS != 0))
        if bool(bad.any()):
            raise BadId(int(bad.nonzero()[0]))
    weight = None if csr.weights is None else csr.weights.to(accumulation_dtype(dtype))
    if weight is not None:
        inside &= ~((flags & DROP_NONPOSITIVE_WEIGHTS != 0) & (weight <= 0))
    position = inside.nonzero().squeeze(1)
    return _Ids(torch.arange(ids.shape[0], device=ids.device), ids, feature, bag, row, weight).take(position)


def _by_width(features: Tensor, ids: _Ids) -> Iterator[tuple[int, Tensor, _Ids]]:
    """For each width: `dim`, the numbers of its features, and its ids."""
    dims = features[:, DIM]
    for dim in sorted(set(dims.tolist())):
        matching = dims == dim
        chosen = ids if bool(matching.all()) else ids.take(matching[ids.feature].nonzero().squeeze(1))
        yield dim, matching.nonzero().squeeze(1), chosen


# --- reading memory ------------------------------------------------------------------------------------------------


class _Memory:
    """Raw memory of a CUDA device, for `torch.as_tensor`."""

    def __init__(self, address: int, elements: int, size: int) -> None:
        description = {"shape": (elements,), "typestr": f"<i{size}", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = description


def _span(base: Tensor, low: int, high: int) -> Tensor:
    """Elements `low .. high` counted from the first of `base`, flat; they may lie outside of it, in other tensors.

    Only those that belong to some tensor may be touched.
    """
    base, size = base.detach(), base.element_size()
    start = base.storage_offset() + low
    if start >= 0 and (start + high - low) * size <= base.untyped_storage().nbytes():
        return base.as_strided((high - low,), (1,), start)
    address, elements = base.data_ptr() + low * size, high - low
    if base.device.type == "cpu":
        memory = (ctypes.c_char * (elements * size)).from_address(address)
        return torch.frombuffer(memory, dtype=base.dtype)
    if base.device.type == "cuda":
        return torch.as_tensor(_Memory(address, elements, size), device=base.device).view(base.dtype)
    raise NotImplementedError(
        f"the eager backend reads tables beyond the tensor it was given on cpu and cuda only, not on {base.device}: "
        "lay them out in one tensor"
    )


def _windows(flat: Tensor, dim: int) -> Tensor:
    """`out[i] = flat[i : i + dim]` for every i, without a copy: rows of any table, wherever it starts."""
    return flat.as_strided((max(flat.numel() - dim + 1, 0), dim), (1, 1))


def _rows_of(base: Tensor, start: Tensor, dim: int) -> Callable[[slice], Tensor]:
    """A function that gathers the rows which start at those elements, `[n, dim]`, in the accumulation type."""
    dtype = accumulation_dtype(base.dtype)
    if start.shape[0] == 0:
        return lambda part: base.new_empty((0, dim), dtype=dtype)
    low = int(start.min())
    windows = _windows(_span(base, low, int(start.max()) + dim), dim)
    return lambda part: windows.index_select(0, start[part] - low).to(dtype)


def _grad_of(features: Tensor, ids: _Ids, grad: Tensor, dim: int, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    """A function that gathers each id's part of the upstream gradient, `[n, dim]`."""
    windows = _windows(grad.detach().contiguous().view(-1), dim)
    start = ids.row * grad.shape[1] + features[:, COLUMN][ids.feature]
    return lambda part: windows.index_select(0, start[part]).to(dtype)


def _start(features: Tensor, ids: _Ids) -> Tensor:
    """The element where each id's row starts."""
    return features[:, OFFSET][ids.feature] + ids.id * features[:, DIM][ids.feature]


def _blocks(count: int, dim: int) -> Iterator[slice]:
    step = max(BLOCK // dim, 1)
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


# --- adding up -----------------------------------------------------------------------------------------------------


def _add_rows(out: Tensor, index: Tensor, values: Tensor) -> None:
    """`out[index] += values`, in order where an index repeats."""
    if out.device.type == "cpu":
        out.index_add_(0, index, values)
    else:
        # sorts first; `index_add_` would add atomically, in any order
        out.index_put_((index,), values, accumulate=True)


def _sum_runs(values: Callable[[slice], Tensor], lengths: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The sum of each of the consecutive runs of rows of those lengths, `[runs, dim]`."""
    while True:
        pieces = ((lengths + PIECE - 1) // PIECE).clamp(min=1)
        run = torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)
        within = torch.arange(run.shape[0], device=run.device) - (lengths.cumsum(0) - lengths)[run]
        piece = (pieces.cumsum(0) - pieces)[run] + within // PIECE
        sums = torch.zeros((int(pieces.sum()), dim), dtype=dtype, device=lengths.device)
        for part in _blocks(run.shape[0], dim):
            _add_rows(sums, piece[part], values(part))
        if sums.shape[0] == lengths.shape[0]:
            return sums
        values, lengths = sums.__getitem__, pieces


def _runs(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Where each run of equal keys starts, and its length."""
    _, lengths = torch.unique_consecutive(keys, return_counts=True)
    return lengths.cumsum(0) - lengths, lengths


def _ids_of_bags(csr: Csr, ids: _Ids) -> Tensor:
    """How many ids of each bag count."""
    return torch.bincount(ids.bag, minlength=csr.offsets.shape[0] - 1)


def _place(out: Tensor, features: Tensor, numbers: Tensor, values: Tensor) -> None:
    """Writes `values` `[bags of all features, dim]` of the features of those numbers into their columns of `out`."""
    bags, dim = out.shape[0], values.shape[1]
    columns = features[numbers, COLUMN][:, None] + torch.arange(dim, device=out.device)
    chosen = values.view(features.shape[0], bags, dim)[numbers].transpose(0, 1).reshape(bags, columns.numel())
    out.index_copy_(1, columns.view(-1), chosen.to(out.dtype))


def _weighted(rows: Callable[[slice], Tensor], factor: Tensor | None) -> Callable[[slice], Tensor]:
    return rows if factor is None else lambda part: rows(part) * factor[part, None]


def _moments(features: Tensor, csr: Csr, ids: _Ids, dtype: torch.dtype) -> Tensor:
    """`Σ w**MOMENT` of each bag."""
    lengths = _ids_of_bags(csr, ids)
    if ids.weight is None:
        return lengths.to(dtype)
    powers = ids.weight.pow(features[:, MOMENT][ids.feature])
    return _sum_runs(lambda part: powers[part, None], lengths, 1, dtype).squeeze(1)


def _scales(features: Tensor, csr: Csr, ids: _Ids, dtype: torch.dtype) -> Tensor:
    total = _moments(features, csr, ids, dtype)
    power_of_bag = features[:, POWER].repeat_interleave(csr.bags)
    scale = torch.ones_like(total)
    for power in set(features[:, POWER].tolist()) - {0}:
        scale = torch.where(power_of_bag == power, scale_of(total, power, torch), scale)
    return scale


def _coefficients(ids: _Ids, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`w * scale` of each id; None if all are 1."""
    if scale.shape[0] == 0:
        return ids.weight
    factor = scale.to(dtype)[ids.bag]
    return factor if ids.weight is None else ids.weight * factor


def _summed(
    features: Tensor, csr: Csr, scale: Tensor, grad: Tensor, dtype: torch.dtype, wanted: set[int] | None = None
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """The summed gradients of the `wanted` tables, whose type is `dtype`.

    For each: its number, the rows in the batch `[U]`, the element where each starts `[U]`, their gradients `[U, dim]`.
    """
    ids, accumulation = _read(features, csr, dtype), accumulation_dtype(dtype)
    key, order = (features[:, ROW_BASE][ids.feature] + ids.id).sort(stable=True)
    ids = ids.take(order)
    factor, start = _coefficients(ids, scale, accumulation), _start(features, ids)
    table = features[:, TABLE][ids.feature]
    dims = dict(features[:, [TABLE, DIM]].tolist())
    for first, length in zip(*(numbers.tolist() for numbers in _runs(table)), strict=True):
        mine, number = slice(first, first + length), int(table[first])
        if wanted is not None and number not in wanted:
            continue
        leaders, repeats = _runs(key[mine])
        gather = _grad_of(features, ids.take(mine), grad, dims[number], accumulation)
        weighted = _weighted(gather, None if factor is None else factor[mine])
        sums = _sum_runs(weighted, repeats, dims[number], accumulation)
        yield number, ids.id[mine][leaders], start[mine][leaders], sums


# --- the ops -------------------------------------------------------------------------------------------------------


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
        ids = _read(features, csr, table.dtype, policy)
        scale = _scales(features, csr, ids, dtype) if normalised else table.new_empty(0, dtype=dtype)
        out = table.new_zeros((csr.bags, width))
        for dim, numbers, mine in _by_width(features, ids):
            rows = _weighted(_rows_of(table, _start(features, mine), dim), mine.weight)
            sums = _sum_runs(rows, _ids_of_bags(csr, mine), dim, dtype)
            _place(out, features, numbers, sums * scale[:, None] if normalised else sums)
        return out, scale

    @torch.no_grad()
    def row_update(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> None:
        if update.skip is not None and float(update.skip) != 0:
            return
        tables = update.tables.tolist()
        learning = {number for number, table in enumerate(tables) if table[T_RULE] != FROZEN}
        for number, rows, _, g in _summed(update.features, csr, scale, grad, update.table.dtype, learning):
            if update.grad_scale is not None:
                g = g * update.grad_scale
            table = tables[number]
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
    def row_grad(self, out: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor) -> None:
        for _, _, start, g in _summed(features, csr, scale, grad, out.dtype):
            out[start[:, None] + torch.arange(g.shape[1], device=g.device)] = g.to(out.dtype)

    @torch.no_grad()
    def row_square_sum(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        learning = {number for number, rule in enumerate(update.tables[:, T_RULE].tolist()) if rule != FROZEN}
        kind, dtype = update.table.dtype, accumulation_dtype(update.table.dtype)
        squares = [g.square().sum(1) for _, _, _, g in _summed(update.features, csr, scale, grad, kind, learning)]
        flat = torch.cat([*squares, torch.zeros(1, dtype=dtype, device=grad.device)])
        whole = torch.full((1,), flat.shape[0], device=grad.device)
        return _sum_runs(lambda part: flat[part, None], whole, 1, dtype).squeeze()

    @torch.no_grad()
    def coefficient_grad(self, table: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        dtype = accumulation_dtype(table.dtype)
        ids = _read(features, csr, table.dtype)
        dots = torch.zeros(csr.ids.shape[0], dtype=dtype, device=table.device)
        for dim, _, mine in _by_width(features, ids):
            rows = _rows_of(table, _start(features, mine), dim)
            upstream = _grad_of(features, mine, grad, dim, dtype)
            for part in _blocks(mine.id.shape[0], dim):
                dots[mine.position[part]] = (rows(part) * upstream(part)).sum(1)
        out = torch.zeros_like(dots)
        result = dots[ids.position]
        power, moment = features[:, POWER][ids.feature], features[:, MOMENT][ids.feature]
        if bool(((power != 0) & (moment != 0)).any()):
            weight = torch.ones_like(result) if ids.weight is None else ids.weight
            products = weight * result
            pooled = _sum_runs(lambda part: products[part, None], _ids_of_bags(csr, ids), 1, dtype).squeeze(1)
            total = _moments(features, csr, ids, dtype)
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
        ids = _read(features, csr, table.dtype, policy)
        out = table.new_zeros((csr.bags, width))
        winners = torch.full((csr.bags, width), -1, device=table.device)
        for dim, numbers, mine in _by_width(features, ids):
            shape = (csr.offsets.shape[0] - 1, dim)
            values = _weighted(_rows_of(table, _start(features, mine), dim), mine.weight)(slice(None))
            bag = mine.bag[:, None].expand_as(values)
            best = torch.full(shape, -torch.inf, dtype=dtype, device=table.device)
            best.scatter_reduce_(0, bag, values, "amax")
            wins = (values == best[mine.bag]) | values.isnan()
            last = csr.ids.shape[0]
            place = torch.where(wins, mine.position[:, None], last)
            first = torch.full(shape, last, device=table.device).scatter_reduce_(0, bag, place, "amin")
            empty = first == last
            _place(out, features, numbers, best.masked_fill(empty, 0))
            _place(winners, features, numbers, first.masked_fill(empty, -1))
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
        start = features[number[at], OFFSET] + csr.ids[position].long() * dims[number[at]] + lane[at]
        values = grad.detach()[bag, column[at]].to(dtype)
        if csr.weights is not None:
            values = values * csr.weights[position].to(dtype)
        start, order = start.sort(stable=True)
        values = values[order]
        leaders, lengths = _runs(start)
        out[start[leaders]] = _sum_runs(lambda part: values[part, None], lengths, 1, dtype).squeeze(1).to(out.dtype)


def view_of_table(base: Tensor, table: list[Any], column: int, kind: str) -> Tensor:
    """A table, or one of its slots, whose start is in `column` of its descriptors: `[rows, dim]` or `[rows, 1]`."""
    rows, dim = table[T_ROWS], table[T_DIM] if kind == "element" else 1
    return _span(base, table[column], table[column] + rows * dim).view(rows, dim)


BACKEND = EagerBackend()
