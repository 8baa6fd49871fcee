"""Sums of rows by group, and scores for slices of rows: what UltraMem reads its values by.

Nothing new is computed here. References are put in the order of their groups, so that each group of a bag is a bag of
its own; a table of rows of H slices is also a table of H times as many rows. Both are then ordinary gather-sums.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..backends import Policy
from ..collection import EmbeddingCollection
from ..functions import is_transformed, is_watched
from . import functions as gather_functions
from .arguments import check_choices, check_each, checked, ids_of, read_weights
from .functions import Sink
from .tables import goes_through_collection, open_for, table_and_sink, through_collection


def grouped_gather_sum(
    params: Tensor | EmbeddingCollection,
    indices: Tensor,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    num_groups: int = 1,
    *,
    row_mask: Tensor | None = None,
    out_of_range: Policy = "raise",
) -> Tensor:
    """Weighted sums of rows of a table, one for each group of references; and scores of their own for slices of rows.

    Equivalent, for weights `[..., K]`, to

        chosen = torch.nn.functional.one_hot(groups, num_groups)
        torch.einsum("...k,...ke,...kd->...ed", weights, chosen, params[indices])

    Each row is read once, whatever the number of groups. Weights `[H, ..., K]` are scores of H slices: columns
    `h * D / H .. (h + 1) * D / H` of the rows are weighted with `weights[h]`.

    Args:
        params: `[V, D]` of any float dtype, or a collection; see `gather_reduce_sum`. A row of a collection whose
            optimizer steps it is read once for each of its slices.
        indices: integers `[..., K]`.
        weights: `[..., K]` or `[H, ..., K]` of any float dtype; None for ones.
        groups: integers `[..., K]` in `[0, num_groups)`; None if there is one group.
        num_groups: E.
        row_mask: as in `gather_reduce_sum`.
        out_of_range: as in `gather_reduce_sum`.

    Returns:
        `[..., E, D]` of the dtype of `params`; `[..., D]` without `groups`.

    Raises:
        IndexError, ValueError, TypeError: as `gather_reduce_sum`; on the CPU also a group out of range.
    """
    ids = ids_of("indices", indices)
    check_choices("dense", out_of_range)
    if num_groups < 1:
        raise ValueError(f"`num_groups` must be at least 1, got {num_groups}")
    if groups is not None:
        _check_groups(groups, indices, num_groups)
    elif num_groups != 1:
        raise ValueError(f"`groups` must be given for `num_groups={num_groups}`: the group of each reference")
    if isinstance(params, EmbeddingCollection) and goes_through_collection(params, ids, row_mask):
        table: _Reader = _Collection(params, out_of_range)
        sink = None
    else:
        whole, sink = table_and_sink("params", params, indices, row_mask=row_mask)
        table = _Table(whole, sink, out_of_range, indices)
    each = torch.zeros_like(ids) if groups is None else groups
    if isinstance(weights, Tensor) and weights.dim() == ids.dim() + 1:
        slices = _check_slices(weights, ids, table.dim)
        sliced = _sliced if table.is_dense else _sliced_after
        out = sliced(table, slices, ids, weights.movedim(0, -2), each, num_groups)
    else:
        if weights is not None:
            check_each("weights", weights, ids)
        out = _grouped(table, ids, weights, each, num_groups)
    open_for(sink)
    return out.squeeze(-2) if groups is None else out


class _Reader(Protocol):
    """Where rows are read."""

    dim: int
    is_dense: bool  # whether their gradient is an ordinary tensor, which may be of any view of the table

    def sums(self, ids: Tensor, weights: Tensor | None, offsets: Tensor, place_of: Callable[[int], int]) -> Tensor:
        """Weighted sums of rows, `[bags, D]`; weights as they were given, but in the order of the ids.

        `place_of` a position is that of its id among the indices that were given.
        """
        ...


class _Table:
    """A table, and the sink of its gradient."""

    def __init__(
        self, table: Tensor, sink: Sink | None, policy: Policy, indices: Tensor, rows: int | None = None
    ) -> None:  # fmt: skip
        self.table, self.policy, self.indices, self._sink = table, policy, indices, sink
        self.dim, self.is_dense = table.shape[1], sink is None
        self._rows = table.shape[0] if rows is None else rows  # that `indices` may name

    def sums(self, ids: Tensor, weights: Tensor | None, offsets: Tensor, place_of: Callable[[int], int]) -> Tensor:
        flat = read_weights("weights", weights, ids, self.table)
        return checked(
            lambda: gather_functions.gather_sum(self.table, flat, ids, offsets, self.policy, self._sink),
            self.indices, self._rows, place_of,
        )  # fmt: skip


class _Collection:
    """The one table of a collection, read by a lookup that graphs can hold."""

    is_dense = False

    def __init__(self, collection: EmbeddingCollection, policy: Policy) -> None:
        self._collection, self._policy = collection, policy
        (self.dim,) = (config.dim for config in collection.table_configs.values())

    def sums(self, ids: Tensor, weights: Tensor | None, offsets: Tensor, place_of: Callable[[int], int]) -> Tensor:
        return through_collection(self._collection, "params", ids, offsets, weights, self._policy)


def _grouped(
    table: _Reader, indices: Tensor, weights: Tensor | None, groups: Tensor, num_groups: int, slices: int = 1
) -> Tensor:  # fmt: skip
    """`[..., E, D]`; `indices` are those given, or `[..., H, K]` with each of them once for each of the slices."""
    *leading, count = indices.shape
    order, offsets = _by_group(groups.reshape(math.prod(leading), count), num_groups)
    flat = None if weights is None else weights.reshape(-1)[order]

    def place_of(position: int) -> int:
        # of [..., H, K] in [..., K]
        bag, place = divmod(int(order[position]), count)
        return bag // slices * count + place

    return table.sums(indices.reshape(-1)[order], flat, offsets, place_of).view(*leading, num_groups, table.dim)


def _check_groups(groups: Tensor, indices: Tensor, num_groups: int) -> None:
    check_each("groups", groups, indices)
    if groups.dtype.is_floating_point or groups.dtype.is_complex or groups.dtype == torch.bool:
        raise TypeError(f"`groups` must hold integers, got {groups.dtype}: convert with `.long()`")
    # a GPU would have to be waited for, and what is traced holds no numbers
    readable = groups.device.type == "cpu" and not is_watched(groups) and not is_transformed()
    if readable and groups.numel() and not (0 <= int(groups.min()) and int(groups.max()) < num_groups):
        raise ValueError(
            f"`groups` must lie in [0, {num_groups}), got {int(groups.min())} to {int(groups.max())}: use more groups"
        )


def _by_group(groups: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The order of all references by bag and group, and where each group of each bag starts and the last one ends."""
    bags, places = groups.shape
    # those out of range, which only a GPU lets through, must not count in other bags
    groups = groups.long().clamp(0, num_groups - 1)
    order = groups.argsort(dim=1, stable=True)
    lengths = torch.zeros((bags, num_groups), dtype=torch.int64, device=groups.device)
    lengths = lengths.scatter_add(1, groups, torch.ones_like(groups))
    order = order + torch.arange(bags, device=groups.device)[:, None] * places
    ends = lengths.flatten().cumsum(0)
    return order.flatten(), torch.cat([ends.new_zeros(1), ends])


def _check_slices(weights: Tensor, indices: Tensor, dim: int) -> int:
    """How many slices there are scores of."""
    slices = weights.shape[0]
    if weights.shape[1:] != indices.shape:
        raise ValueError(
            f"`weights` must have the shape of `indices`, {tuple(indices.shape)}, after the slices, got "
            f"{tuple(weights.shape)}"
        )
    if not slices or dim % slices:
        raise ValueError(f"`weights` must be of slices that divide the width of the table, {dim}, got {slices}")
    return slices


def _sliced(
    rows: _Reader, slices: int, indices: Tensor, weights: Tensor, groups: Tensor, num_groups: int
) -> Tensor:  # fmt: skip
    """Sums with weights `[..., H, K]`, each for its slice of the rows."""
    assert isinstance(rows, _Table)
    count, dim = rows.table.shape
    # [rows * slices, dim / slices]: row `i` of slice `h` is row `i * slices + h`
    parts = rows.table.contiguous().view(count * slices, dim // slices)
    table = _Table(parts, None, rows.policy, rows.indices, count)
    number = torch.arange(slices, device=indices.device)
    ids = indices.long()[..., None, :]
    # those outside of the table stay outside
    ids = torch.where((ids >= 0) & (ids < count), ids * slices + number[:, None], -1)
    # [..., H, E, D / H]
    out = _grouped(table, ids, weights, groups[..., None, :].expand(ids.shape), num_groups, slices)
    return out.transpose(-3, -2).flatten(-2)


def _sliced_after(
    rows: _Reader, slices: int, indices: Tensor, weights: Tensor, groups: Tensor, num_groups: int
) -> Tensor:  # fmt: skip
    """The same, of whole rows summed for each slice, as optimizers know whole rows only."""
    shape = weights.shape
    ids, groups = (each[..., None, :].expand(shape) for each in (indices, groups))
    out = _grouped(rows, ids, weights, groups, num_groups, slices)
    # [..., H, E, H, D / H], of which each slice takes its own
    parts: Tensor = out.unflatten(-1, (slices, -1)).diagonal(dim1=-4, dim2=-2)
    return parts.transpose(-2, -1).flatten(-2)
