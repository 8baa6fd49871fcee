"""Tile sizes of the kernels, chosen from what the host knows: the widest row of the group and the mean length of a bag.

Sizes never depend on the exact number of ids or bags, so a changing batch compiles nothing new.
"""

from dataclasses import dataclass

SHORT_BAG = 4
"""Bags of at most this many ids on average are looked up many to a program."""


@dataclass(frozen=True)
class LookupConfig:
    """`lanes` bags (short) or rows of one bag (long) to a tile, `block_d` columns."""

    short: bool
    lanes: int
    block_d: int
    warps: int


@dataclass(frozen=True)
class UpdateConfig:
    """See `runs.py` and `row_update.py` for what the sizes mean."""

    chunk: int
    block: int
    parts: int
    segments: int
    warps: int
    join: int
    join_warps: int
    fold: int
    edges: int
    block_d: int


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less than `number`."""
    return 1 << max(number - 1, 0).bit_length()


def lookup_config(widest: int, mean_length: float) -> LookupConfig:
    """Tiles of `pooled_lookup.py`. More than one warp to a program is slower."""
    if mean_length <= SHORT_BAG:
        block_d = min(max(power_of_two(widest), 4), 64)
        return LookupConfig(True, 2048 // block_d, block_d, 1)
    block_d = min(max(power_of_two(widest), 4), 128)
    return LookupConfig(False, min(1024 // block_d, 32), block_d, 1)


def max_config(widest: int) -> LookupConfig:
    """Tiles of `max_lookup.py`."""
    block_d = min(max(power_of_two(widest), 4), 256)
    return LookupConfig(True, 8, block_d, max(1, block_d // 64))


def coefficient_config(widest: int, mean_length: float) -> LookupConfig:
    """Tiles of `coefficient_grad.py`, which takes the columns one block after the other."""
    block_d = min(max(power_of_two(widest), 4), 512)
    lanes = 4 if mean_length <= SHORT_BAG else 8
    return LookupConfig(False, lanes, block_d, max(1, block_d // 128))


def update_config(widest: int) -> UpdateConfig:
    """Tiles of `runs.py` and `row_update.py`; whole rows are in one program, since a rule may need its row's mean."""
    block_d = max(power_of_two(widest), 4)
    # what fits in few registers, so that many programs are under way
    segments = min(max(512 // block_d, 1), 32)
    warps = max(segments * block_d // 256, 1) if block_d <= 256 else min(block_d // 512, 32)
    # few programs join cut runs, and most runs are in few pieces
    narrow = block_d <= 64
    return UpdateConfig(
        chunk=32, block=1024, parts=32 if block_d <= 256 else 64, segments=segments, warps=warps,
        join=64 if narrow else max(2048 // block_d, 1), join_warps=2 if narrow else max(warps, 4), fold=64,
        edges=16 if narrow else 4, block_d=block_d,
    )  # fmt: skip
