"""Indices made into rows of a table before the lookup: by remainder, shift or hash, and UltraMem's virtual blocks."""

from typing import Literal

from torch import Tensor

from .arguments import ids_of

REMAPS = ("mod", "shift", "hash")


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
    ids = ids_of("indices", indices[None])[0].long()
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
