"""Tile sizes of the kernels, chosen from what the host knows: the widest row of the group and the mean length of a bag.

Sizes never depend on the exact number of ids or bags, so a changing batch compiles nothing new.
"""

from dataclasses import dataclass

SHORT_BAG = 4
"""Bags of at most this many ids on average are looked up many to a program."""


@dataclass(frozen=True)
class LookupConfig:
    """`lanes` bags (short) or rows of one bag (long) to a tile; `sums` running sums (long); columns in blocks."""

    short: bool
    lanes: int
    sums: int
    block_d: int
    warps: int


@dataclass(frozen=True)
class UpdateConfig:
    """See `runs.py` and `row_update.py` for what the sizes mean."""

    chunk: int
    block: int
    parts: int
    segments: int
    unroll: int
    join: int
    fold: int
    edges: int
    block_d: int
    warps: int


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less than `number`."""
    return 1 << max(number - 1, 0).bit_length()


def lookup_config(widest: int, mean_length: float) -> LookupConfig:
    """Tiles of `pooled_lookup.py`."""
    block_d = min(max(power_of_two(widest), 4), 256)
    if mean_length <= SHORT_BAG:
        lanes = 32 if block_d <= 128 else 16
        return LookupConfig(True, lanes, lanes, block_d, max(1, lanes * block_d // 1024))
    return LookupConfig(False, 16, 16, block_d, max(1, block_d // 128))


def max_config(widest: int) -> LookupConfig:
    """Tiles of `max_lookup.py`."""
    block_d = min(max(power_of_two(widest), 4), 256)
    return LookupConfig(True, 8, 8, block_d, max(1, block_d // 64))


def coefficient_config(widest: int, mean_length: float) -> LookupConfig:
    """Tiles of `coefficient_grad.py`, which takes the columns one block after the other."""
    block_d = min(max(power_of_two(widest), 4), 512)
    lanes = 4 if mean_length <= SHORT_BAG else 8
    return LookupConfig(False, lanes, lanes, block_d, max(1, block_d // 128))


def update_config(widest: int) -> UpdateConfig:
    """Tiles of `runs.py` and `row_update.py`; whole rows are in one program, since a rule may need its row's mean."""
    block_d = max(power_of_two(widest), 4)
    chunk = 32 if block_d <= 256 else 64 if block_d <= 1024 else 128
    # 512 elements a warp leave registers for the row, its slots and the gradient
    segments = min(max(512 // block_d, 4 if block_d == 256 else 2 if block_d == 512 else 1), 32)
    warps = min(max(segments * block_d // 512, 1), 32)
    join = min(max(1024 // block_d, 1), 16)
    return UpdateConfig(
        chunk=chunk, block=1024, parts=32, segments=segments, unroll=2, join=join, fold=64, edges=4,
        block_d=block_d, warps=warps,
    )  # fmt: skip
