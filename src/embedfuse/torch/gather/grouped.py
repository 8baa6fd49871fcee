"""Sums of rows by group, scores for slices of rows, and ids remapped before the lookup: what UltraMem is made of.

Nothing new is computed here. References are put in the order of their groups, so that each group of a bag is a bag of
its own; a table of rows of H slices is also a table of H times as many rows. Both are then ordinary gather-sums.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from ..backends import Policy
from ..functions import is_transformed, is_watched
from . import functions as gather_functions
from .arguments import check_table, checked, read_indices, read_weights

REMAPS = ("mod", "shift", "hash")


def grouped_gather_sum(
    params: Tensor,
    indices: Tensor,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    num_groups: int = 1,
    *,
    out_of_range: Policy = "raise",
) -> Tensor:
    """Weighted sums of rows of a table, one for each group of references; and scores of their own for slices of rows.

    Equivalent, for weights `[..., K]`, to

        chosen = torch.nn.functional.one_hot(groups, num_groups)
        torch.einsum("...k,...ke,...kd->...ed", weights, chosen, params[indices])

    Each row is read once, whatever the number of groups. Weights `[H, ..., K]` are scores of H slices: columns
    `h * D / H .. (h + 1) * D / H` of the rows are weighted with `weights[h]`.

    Args:
        params: `[V, D]` of any float dtype.
        indices: integers `[..., K]`.
        weights: `[..., K]` or `[H, ..., K]` of any float dtype; None for ones.
        groups: integers `[..., K]` in `[0, num_groups)`; None if there is one group.
        num_groups: E.
        out_of_range: as in `gather_reduce_sum`.

    Returns:
        `[..., E, D]` of the dtype of `params`; `[..., D]` without `groups`.

    Raises:
        IndexError, ValueError, TypeError: as `gather_reduce_sum`; on the CPU also a group out of range.
    """
    _, _, shape = read_indices("indices", indices)
    check_table("params", params, indices.device)
    if num_groups < 1:
        raise ValueError(f"`num_groups` must be at least 1, got {num_groups}")
    if weights is not None and weights.dim() == indices.dim() + 1:
        return _sliced(params, indices, weights, groups, num_groups, out_of_range)
    if groups is None:
        if num_groups != 1:
            raise ValueError(f"`groups` must be given for `num_groups={num_groups}`: the group of each reference")
        groups = torch.zeros_like(indices)
        return grouped_gather_sum(params, indices, weights, groups, 1, out_of_range=out_of_range).squeeze(-2)
    _check_groups(groups, indices, num_groups)
    bags, places = math.prod(shape[:-1]), shape[-1]
    flat = read_weights("weights", weights, indices, params)
    order, offsets = _by_group(groups.reshape(bags, places), num_groups)
    ids = indices.reshape(-1)[order]
    flat = None if flat is None else flat[order]
    out = checked(lambda: gather_functions.gather_sum(params, flat, ids, offsets, out_of_range), ids, params.shape[0])
    return out.view(*shape[:-1], num_groups, params.shape[1])


def _check_groups(groups: Tensor, indices: Tensor, num_groups: int) -> None:
    if groups.shape != indices.shape:
        raise ValueError(
            f"`groups` must have the shape of `indices`, {tuple(indices.shape)}, got {tuple(groups.shape)}"
        )
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


def _sliced(
    params: Tensor, indices: Tensor, weights: Tensor, groups: Tensor | None, num_groups: int, policy: Policy
) -> Tensor:
    slices, (rows, dim) = weights.shape[0], params.shape
    if weights.shape[1:] != indices.shape:
        raise ValueError(
            f"`weights` must have the shape of `indices`, {tuple(indices.shape)}, after the slices, got "
            f"{tuple(weights.shape)}"
        )
    if not slices or dim % slices:
        raise ValueError(f"`weights` must be of slices that divide the width of the table, {dim}, got {slices}")
    # [rows * slices, dim / slices]: row `i` of slice `h` is row `i * slices + h`
    table = params.contiguous().view(rows * slices, dim // slices)
    number = torch.arange(slices, device=indices.device)
    ids = indices.long()[..., None, :]
    # those outside of the table stay outside
    ids = torch.where((ids >= 0) & (ids < rows), ids * slices + number[:, None], -1)
    by_slice = weights.movedim(0, -2)
    if groups is None:
        out = grouped_gather_sum(table, ids, by_slice, out_of_range=policy)
    else:
        _check_groups(groups, indices, num_groups)
        each = groups[..., None, :].expand(ids.shape)
        # [..., H, E, D / H]
        out = grouped_gather_sum(table, ids, by_slice, each, num_groups, out_of_range=policy).transpose(-3, -2)
    return out.flatten(-2)


def remap_indices(
    indices: Tensor, num_rows: int, method: Literal["mod", "shift", "hash"] = "mod", *, shift: int = 0, seed: int = 0
) -> Tensor:
    """Maps any integers to rows of a table.

    Equivalent to `indices % num_rows` for "mod", `(indices + shift) % num_rows` for "shift"; "hash" mixes all bits of
    an index with `seed` first (as splitmix64 does), so that different seeds share rows among different indices.

    Args:
        indices: integers of any shape.
        num_rows: V.
        method: "mod", "shift" or "hash".
        shift: added for "shift", of either sign.
        seed: of the "hash".

    Returns:
        int64 in `[0, num_rows)`, of the shape of `indices`.
    """
    if method not in REMAPS:
        raise ValueError(f"`method` must be one of {', '.join(REMAPS)}, got {method!r}")
    if num_rows < 1:
        raise ValueError(f"`num_rows` must be at least 1, got {num_rows}")
    read_indices("indices", indices[None])
    ids = indices.long()
    if method == "shift":
        # both parts below num_rows, so that the sum does not overflow
        ids = ids % num_rows + shift % num_rows
    elif method == "hash":
        ids = _mixed(ids, seed)
    return ids % num_rows


def _mixed(ids: Tensor, seed: int) -> Tensor:
    """The finishing steps of splitmix64; int64 products wrap around as unsigned ones do."""
    ids = ids + _signed((seed + 1) * 0x9E3779B97F4A7C15)
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # the mask makes an arithmetic shift a logical one
        ids = (ids ^ ((ids >> bits) & ((1 << (64 - bits)) - 1))) * _signed(factor)
    return ids ^ ((ids >> 31) & ((1 << 33) - 1))


def _signed(number: int) -> int:
    """The int64 of the same last 64 bits."""
    number %= 1 << 64
    return number - (1 << 64) if number >= 1 << 63 else number


def virtual_rows(indices: Tensor, rows_per_group: int, num_rows: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """UltraMem's virtual blocks: which group a virtual row belongs to, and which physical row stands for it.

    Equivalent to `(indices // rows_per_group, (indices % rows_per_group + shift) % num_rows)`: `groups` and `indices`
    of `grouped_gather_sum`.
    """
    if rows_per_group < 1:
        raise ValueError(f"`rows_per_group` must be at least 1, got {rows_per_group}")
    ids = indices.long()
    return ids // rows_per_group, remap_indices(ids % rows_per_group, num_rows, "shift", shift=shift)
