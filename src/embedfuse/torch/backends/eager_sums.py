"""What the ops of `eager.py` share: reading the ids that count, gathering rows, adding up in a fixed order."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...combiners import scale_of
from ...plan import (
    COLUMN,
    DIM,
    DROP_NEGATIVE_IDS,
    DROP_NONPOSITIVE_WEIGHTS,
    FLAGS,
    MAX_NORM,
    MOMENT,
    NO_MAX_NORM,
    OFFSET,
    POWER,
    ROW_BASE,
    ROWS,
    STRIDE,
    T_DIM,
    T_MAX_NORM,
    T_OFFSET,
    T_ROW_BASE,
    T_ROWS,
    T_SOURCE,
    TABLE,
    TABLE_WIDTH,
    number_of,
)
from . import BadId, Csr, Policy, accumulation_dtype

PIECE = 64
"""Terms that are added one after the other."""
BLOCK = 1 << 22
"""Elements that are gathered at a time, which bounds the memory in use."""


class Ids(NamedTuple):
    """The ids that count, in the order of the batch. All `[M]`, int64."""

    position: Tensor  # in `csr.ids`
    id: Tensor
    feature: Tensor
    bag: Tensor  # in `csr.offsets`
    row: Tensor  # of `out` and `grad`
    weight: Tensor | None  # of the accumulation type

    def take(self, index: Tensor | slice) -> "Ids":
        weight = None if self.weight is None else self.weight[index]
        return Ids(self.position[index], self.id[index], self.feature[index], self.bag[index], self.row[index], weight)


# --- reading the batch ---------------------------------------------------------------------------------------------


def read(features: Tensor, csr: Csr, dtype: torch.dtype, policy: Policy = "drop") -> Ids:
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
        inside &= (flags & DROP_NONPOSITIVE_WEIGHTS == 0) | (weight > 0)
    position = inside.nonzero().squeeze(1)
    return Ids(torch.arange(ids.shape[0], device=ids.device), ids, feature, bag, row, weight).take(position)


def join_offsets(offsets: Tensor) -> Tensor:
    """The offsets of each feature `[F, B + 1]`, all from 0, as those of all ids, `[F * B + 1]`."""
    last = offsets[:, -1]
    end = torch.cumsum(last, 0)
    return torch.cat([(offsets[:, :-1] + (end - last)[:, None]).reshape(-1), end[-1:]])


def by_width(features: Tensor, ids: Ids) -> Iterator[tuple[int, Tensor, Ids]]:
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


def rows_of(base: Tensor, features: Tensor, ids: Ids, dim: int) -> Callable[[slice], Tensor]:
    """A function that gathers the rows of ids, `[n, dim]`, cut to their length, in the accumulation type."""
    dtype, start = accumulation_dtype(base.dtype), row_starts(features, ids)
    if start.shape[0] == 0:
        return lambda part: base.new_empty((0, dim), dtype=dtype)
    low = int(start.min())
    windows = _windows(_span(base, low, int(start.max()) + dim), dim)
    if bool((features[:, MAX_NORM] == NO_MAX_NORM).all()):
        return lambda part: windows.index_select(0, start[part] - low).to(dtype)
    most = features[:, MAX_NORM].view(torch.float64).to(dtype)[ids.feature]
    return lambda part: cut(windows.index_select(0, start[part] - low).to(dtype), most[part, None])


def cut(rows: Tensor, max_norm: Tensor | float) -> Tensor:
    """Rows `[n, dim]`, those that are longer than `max_norm` shortened to it."""
    length = rows.square().sum(1, keepdim=True).sqrt()
    return rows * torch.where(length > max_norm, max_norm / length, 1)


def cut_gradient(g: Tensor, rows: Tensor, max_norm: float) -> Tensor:
    """The gradient of `rows`, where `g` is that of `cut(rows)`."""
    square = rows.square().sum(1, keepdim=True)
    longer = square.sqrt() > max_norm
    radial = rows * ((rows * g).sum(1, keepdim=True) / torch.where(longer, square, 1))
    return torch.where(longer, (g - radial) * (max_norm / torch.where(longer, square, 1).sqrt()), g)


def grad_of(features: Tensor, ids: Ids, grad: Tensor, dim: int, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    """A function that gathers each id's part of the upstream gradient, `[n, dim]`."""
    windows = _windows(grad.detach().contiguous().view(-1), dim)
    start = ids.row * grad.shape[1] + features[:, COLUMN][ids.feature]
    return lambda part: windows.index_select(0, start[part]).to(dtype)


def row_starts(features: Tensor, ids: Ids) -> Tensor:
    """The element where each id's row starts."""
    return features[:, OFFSET][ids.feature] + ids.id * features[:, STRIDE][ids.feature]


def blocks(count: int, dim: int) -> Iterator[slice]:
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


def sum_runs(values: Callable[[slice], Tensor], lengths: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The sum of each of the consecutive runs of rows of those lengths, `[runs, dim]`."""
    while True:
        pieces = ((lengths + PIECE - 1) // PIECE).clamp(min=1)
        run = torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)
        within = torch.arange(run.shape[0], device=run.device) - (lengths.cumsum(0) - lengths)[run]
        piece = (pieces.cumsum(0) - pieces)[run] + within // PIECE
        sums = torch.zeros((int(pieces.sum()), dim), dtype=dtype, device=lengths.device)
        for part in blocks(run.shape[0], dim):
            _add_rows(sums, piece[part], values(part))
        if sums.shape[0] == lengths.shape[0]:
            return sums
        values, lengths = sums.__getitem__, pieces


def runs(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Where each run of equal keys starts, and its length."""
    _, lengths = torch.unique_consecutive(keys, return_counts=True)
    return lengths.cumsum(0) - lengths, lengths


def ids_of_bags(csr: Csr, ids: Ids) -> Tensor:
    """How many ids of each bag count."""
    return torch.bincount(ids.bag, minlength=csr.offsets.shape[0] - 1)


def write_columns(out: Tensor, features: Tensor, numbers: Tensor, values: Tensor) -> None:
    """Writes `values` `[bags of all features, dim]` of the features of those numbers into their columns of `out`."""
    bags, dim = out.shape[0], values.shape[1]
    columns = features[numbers, COLUMN][:, None] + torch.arange(dim, device=out.device)
    chosen = values.view(features.shape[0], bags, dim)[numbers].transpose(0, 1).reshape(bags, columns.numel())
    out.index_copy_(1, columns.view(-1), chosen.to(out.dtype))


def weighted(rows: Callable[[slice], Tensor], factor: Tensor | None) -> Callable[[slice], Tensor]:
    return rows if factor is None else lambda part: rows(part) * factor[part, None]


def moments(features: Tensor, csr: Csr, ids: Ids, dtype: torch.dtype) -> Tensor:
    """`Σ w**MOMENT` of each bag."""
    lengths = ids_of_bags(csr, ids)
    if ids.weight is None:
        return lengths.to(dtype)
    powers = ids.weight.pow(features[:, MOMENT][ids.feature])
    return sum_runs(lambda part: powers[part, None], lengths, 1, dtype).squeeze(1)


def scales(features: Tensor, csr: Csr, ids: Ids, dtype: torch.dtype) -> Tensor:
    total = moments(features, csr, ids, dtype)
    power_of_bag = features[:, POWER].repeat_interleave(csr.bags)
    scale = torch.ones_like(total)
    for power in set(features[:, POWER].tolist()) - {0}:
        scale = torch.where(power_of_bag == power, scale_of(total, power, torch), scale)
    return scale


def _coefficients(ids: Ids, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`w * scale` of each id; None if all are 1."""
    if scale.shape[0] == 0:
        return ids.weight
    factor = scale.to(dtype)[ids.bag]
    return factor if ids.weight is None else ids.weight * factor


def tables_of(features: Tensor) -> Tensor:
    """Descriptors of the tables that features read, int64 `[T, TABLE_WIDTH]`."""
    count = int(features[:, TABLE].max()) + 1 if features.shape[0] else 0
    tables = torch.zeros((count, TABLE_WIDTH), dtype=torch.int64, device=features.device)
    for target, source in (
        (T_OFFSET, OFFSET), (T_ROWS, ROWS), (T_DIM, DIM), (T_ROW_BASE, ROW_BASE), (T_SOURCE, OFFSET),
        (T_MAX_NORM, MAX_NORM),
    ):  # fmt: skip
        tables[features[:, TABLE], target] = features[:, source]
    return tables


def row_sums(
    features: Tensor, tables: Tensor, source: Tensor | None, csr: Csr, scale: Tensor, grad: Tensor, dtype: torch.dtype,
    wanted: Callable[[list[Any]], bool] = lambda table: True, dots: Tensor | None = None,
) -> Iterator[tuple[int, list[Any], Tensor, Tensor]]:  # fmt: skip
    """The summed gradients of the `wanted` tables, whose type is `dtype`.

    For each: its number, its descriptors, the rows in the batch `[U]`, their gradients `[U, dim]`. `source` is read
    where rows are cut, and for `dots`, see `Backend.row_grad`.
    """
    ids, accumulation = read(features, csr, dtype), accumulation_dtype(dtype)
    key, order = (features[:, ROW_BASE][ids.feature] + ids.id).sort(stable=True)
    ids = ids.take(order)
    factor = _coefficients(ids, scale, accumulation)
    owners = sorted((table[T_ROW_BASE], number, table) for number, table in enumerate(tables.tolist()) if table[T_ROWS])
    bases = torch.tensor([base for base, _, _ in owners], dtype=torch.int64, device=key.device)
    owner = torch.searchsorted(bases, key, right=True) - 1
    for first, length in zip(*(numbers.tolist() for numbers in runs(owner)), strict=True):
        mine = slice(first, first + length)
        base, number, table = owners[int(owner[first])]
        if not wanted(table):
            continue
        leaders, repeats = runs(key[mine])
        gather = grad_of(features, ids.take(mine), grad, table[T_DIM], accumulation)
        sums = sum_runs(weighted(gather, None if factor is None else factor[mine]), repeats, table[T_DIM], accumulation)
        rows = key[mine][leaders] - base
        if dots is not None and source is not None:
            each = _rows_at_source(source, table, key[mine] - base, accumulation)
            for part in blocks(length, table[T_DIM]):
                dots[ids.position[mine][part]] = (each(part) * gather(part)).sum(1)
        if table[T_MAX_NORM] != NO_MAX_NORM and source is not None:
            looked_up = view_of_table(source, table, T_SOURCE, "element").index_select(0, rows).to(accumulation)
            sums = cut_gradient(sums, looked_up, number_of(table[T_MAX_NORM]))
        yield number, table, rows, sums


def _rows_at_source(source: Tensor, table: list[Any], rows: Tensor, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    """A function that gathers rows of a table from T_SOURCE on, cut to their length."""
    all_rows, longest = view_of_table(source, table, T_SOURCE, "element"), number_of(table[T_MAX_NORM])
    if table[T_MAX_NORM] == NO_MAX_NORM:
        return lambda part: all_rows.index_select(0, rows[part]).to(dtype)
    return lambda part: cut(all_rows.index_select(0, rows[part]).to(dtype), longest)


def view_of_table(base: Tensor, table: list[Any], column: int, kind: str) -> Tensor:
    """A table, or one of its slots, whose start is in `column` of its descriptors: `[rows, dim]` or `[rows, 1]`."""
    rows, dim = table[T_ROWS], table[T_DIM] if kind == "element" else 1
    return _span(base, table[column], table[column] + rows * dim).view(rows, dim)
