"""Tile sizes of the kernels, chosen from what the host knows: the widest row of the group and the mean length of a bag.

Sizes never depend on the exact number of ids or bags, so a changing batch compiles nothing new.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

SHORT_BAG = 4
"""Bags of at most this many ids on average are looked up many to a program."""
GROUP = 4
"""Neighbours that `pooled_long_kernel` looks up together if they are short."""
NARROW, EVEN = 4, 64
"""Tables narrower than the widest one by NARROW have tiles of their own shape, if that one has EVEN columns or more, or
where they keep it from being read in long words."""
FEW_COLUMNS = 4
"""Of the narrowest tiles: sums of cut runs are read in words of four."""
NARROW_ROWS = 64
"""Most rows of such a tile in updates: what is known of each row takes registers, too."""
RADIX_DIGIT, RADIX_THREADS, RADIX_BLOCKS = 8, 256, 4
"""Of `cuda/radix_sort.cu`: the most bits it sorts by at once, threads of a block, blocks of a multiprocessor."""
RADIX_FEW, RADIX_SOME, RADIX_MANY = 4, 8, 16
"""Keys of its threads: at most one tile to a multiprocessor, at most RADIX_BESIDE, more."""
RADIX_BESIDE = 2
"""Blocks of a multiprocessor that may wait for each other: half of it is left for other streams' kernels."""


@dataclass(frozen=True)
class LookupConfig:
    """`lanes` bags (short) or rows of one bag (long) to a tile, `block_d` columns.

    `turns` bags to a program of long ones; if more than one, `group` bags that turn out short are looked up together.
    Where there are tables of at most a `narrow`th of the columns, theirs are tiles of fewer columns and more lanes.
    """

    short: bool
    lanes: int
    block_d: int
    warps: int
    registers: int | None = None
    turns: int = 1
    group: int = 1
    narrow: int = 1


@dataclass(frozen=True)
class UpdateConfig:
    """See `runs.py` and `row_update.py` for what the sizes mean."""

    keys: int
    some: int  # up to so many ids are sorted by the kernels of `few_keys.py`, where more are by `cuda/radix_sort.cu`
    few: int  # the same where more are by PyTorch
    whole: int  # up to so many without windows
    window: int
    chunk: int
    block: int
    parts: int
    segments: int
    warps: int
    long: int
    terms: int
    long_warps: int
    long_programs: int
    join: int
    join_warps: int
    joiners: int
    fold: int
    narrow: int
    block_d: int


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less than `number`."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(number: int, step: int) -> int:
    """`number / step`, rounded up."""
    return -(-number // step)


def narrow_of(config: LookupConfig | UpdateConfig, dims: Iterable[int], wanted: bool) -> int:
    """By how much narrower tables are that have tiles of their own shape; 1 if there are none, or none are wanted."""
    columns = [power_of_two(max(dim, FEW_COLUMNS)) for dim in dims]
    narrow = [number for number in columns if number * config.narrow <= config.block_d]
    return config.block_d // max(narrow) if wanted and narrow and config.narrow > 1 else 1


def narrow_lanes(config: LookupConfig, narrow: int) -> tuple[int, int]:
    """The `lanes` of a tile of wide tables, and of one of tables that are `narrow` times narrower.

    Bags side by side are more than rows of a bag; and where tiles of the narrow tables are of few columns, both kinds
    are of fewer elements: 8 to 12 % faster for 26 tables of 64 columns beside 26 of one (H200, 2026-11).
    """
    if not config.short:
        return config.lanes, config.lanes * min(narrow, NARROW)
    if narrow <= NARROW:
        return config.lanes, config.lanes * narrow
    lanes = max(config.lanes // 2, 1)
    return lanes, lanes * min(narrow, 2 * NARROW)


@cache
def lookup_config(widest: int, short: bool) -> LookupConfig:
    """Tiles of `pooled_lookup.py`, for bags that are `short` or not. More than one warp to a program is slower."""
    if short:
        block_d = min(max(power_of_two(widest), 4), 64)
        return LookupConfig(True, 2048 // block_d, block_d, 1, narrow=NARROW)
    block_d = min(max(power_of_two(widest), 4), 128)
    # as many rows as leave room for the 32 programs that a multiprocessor can hold; a few more would cost an eighth of
    # them. The less there is to a bag, the more of them a program has
    turns = 2 if block_d > 32 else 4
    return LookupConfig(False, min(1024 // block_d, 32), block_d, 1, 64, turns, GROUP, NARROW)


@cache
def whole_rows(config: LookupConfig, widest: int) -> LookupConfig:
    """The same tiles with whole rows in each, since the length of a row is wanted."""
    block_d = max(power_of_two(widest), 4)
    if block_d <= config.block_d:
        return config
    lanes = max(config.lanes * config.block_d // block_d, 1)
    warps = min(max(config.warps, lanes * block_d // 2048), 32)
    return LookupConfig(config.short, lanes, block_d, warps)


@cache
def max_config(widest: int) -> LookupConfig:
    """Tiles of `max_lookup.py`."""
    block_d = min(max(power_of_two(widest), 4), 256)
    return LookupConfig(True, 8, block_d, max(1, block_d // 64))


def coefficient_config(widest: int, short: bool, element_size: int) -> LookupConfig:
    """Tiles of `coefficient_grad.py`, for bags that are `short` or not; columns are taken one block after the other."""
    block_d = min(max(power_of_two(widest), 4), 512)
    # one warp to a bag is faster, by up to 40 % at 256 columns, but for wide rows of float32 (H200, 2026-11)
    if block_d <= 256 or element_size == 2:
        block_d = min(block_d, 128)
    lanes = 4 if short else 8 if block_d > 32 else 16
    return LookupConfig(False, lanes, block_d, max(1, block_d // 128))


@cache
def update_config(widest: int) -> UpdateConfig:
    """Tiles of `runs.py` and `row_update.py`; whole rows are in one program, since a rule may need its row's mean."""
    block_d = max(power_of_two(widest), 4)
    # 16 numbers of a row to a thread of one warp; with two warps, or half as many rows, up to 12 % slower on an H200
    segments = min(512 // block_d, 32) if block_d <= 128 else 1
    warps = min(max(block_d // 512, 1), 32)
    # long segments: a tile that few registers hold; so few programs that others run beside them, but of one warp twice
    # as many as of two: in a training step of WDL, which leaves nothing in the cache, 12 µs less (H200, 2026-12)
    tile = 512 if block_d <= 64 else 1024 if block_d < 512 else 2048 if block_d < 4096 else 16384
    terms = min(max(tile // block_d, 1), 32)
    return UpdateConfig(
        keys=512, some=1 << 14, few=1 << 15, whole=4096, window=512, chunk=_chunk(block_d, terms), block=512,
        parts=8 if block_d <= 64 else 16 if block_d <= 256 else 32, segments=segments,
        warps=warps, long=8, terms=terms,
        long_warps=max(min(block_d // (64 if block_d < 512 else 128), 16), 1),
        long_programs=2048 if block_d <= 64 else 1024,
        join=min(max(2048 // block_d, 1), 16), join_warps=4 if block_d < 512 else max(warps, 8), joiners=1024,
        fold=32, narrow=NARROW, block_d=block_d,
    )  # fmt: skip


def _chunk(block_d: int, terms: int) -> int:
    """Ids to a window. Two partial sums are kept for each, so wide rows have fewer; but none of more than 256 terms."""
    return 64 if block_d < 512 else 256 if block_d == 512 else min(128 * terms, 512)


@cache
def dots_config(config: UpdateConfig) -> UpdateConfig:
    """The same for sums with dots, which wait for the sum of each product: over fewer warps, with fewer rows aside.

    4 to 11 % less for forward and backward of memory layers of 288 to 4096 columns (H200, 2026-11). With more gradients
    of a long segment at once backward is 8 to 25 % faster where ids are skewed; of 512 columns no faster.
    """
    if config.block_d < 512:
        return config
    terms = {1024: 4, 2048: 8}.get(config.block_d, config.terms)
    return replace(
        config, warps=max(config.block_d // 1024, 1), long=16, terms=terms, chunk=_chunk(config.block_d, terms)
    )
