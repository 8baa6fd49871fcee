"""Sorts many row numbers of a GPU by the bits that they have, where `torch.sort` looks at all 32."""

import warnings
from functools import cache
from typing import Any

from ...kernels.configs import (
    RADIX_BESIDE,
    RADIX_BLOCKS,
    RADIX_DIGIT,
    RADIX_FEW,
    RADIX_MANY,
    RADIX_SOME,
    RADIX_THREADS,
    ceil_div,
)
from .cuda_source import NoCompiler, blocks_at_once, check_launch, driver_address, functions_of, multiprocessors
from .issuing import Issuer, launch
from .launching import HOST, raw_stream

SOURCE = "radix_sort.cu"
ARGUMENTS = 10
"""Of a kernel that sorts by all digits."""
TOO_LARGE = (720, 801)
"""What the driver says of such a launch: of too many blocks, or not supported."""


class RadixSort:
    """A stable sort of int32 keys of at most `bits` bits, and of int32 beside them.

    One launch, or three for each of `passes` digits where the keys are many; on the current device and stream.

    Args:
        bits: of the largest key, which is not negative.
        device: index.

    Raises:
        NoCompiler: if its kernels cannot be made there.
    """

    def __init__(self, bits: int, device: int) -> None:
        if launch is None:
            raise NoCompiler("the C++ part of embedfuse was not compiled")
        self.passes = max(ceil_div(bits, RADIX_DIGIT), 1)
        self.digit = max(ceil_div(bits, self.passes), 4)
        few, some = f"radix_sort_{RADIX_FEW}", f"radix_sort_{RADIX_SOME}"
        names = (few, some, "count_digits", "sum_digits", "sort_by_digit")
        constants = {"BITS": self.digit, "THREADS": RADIX_THREADS, "BLOCKS": RADIX_BLOCKS}
        handles = functions_of(SOURCE, names, constants, device)
        self._few, self._some, self._count, self._sum, self._sort = handles
        # tiles that may wait for each other
        self._few_tiles = multiprocessors(device)
        self._some_tiles = self._few_tiles * min(blocks_at_once(self._some, RADIX_THREADS, device), RADIX_BESIDE)
        # a process may have a part of the device only, where fewer run at once; without digits nothing is sorted
        if self._refused(self._few, self._few_tiles, device) or self._refused(self._some, self._some_tiles, device):
            self._few_tiles = self._some_tiles = 0

    def _refused(self, kernel: int, tiles: int, device: int) -> bool:
        nothing = (0,) * ARGUMENTS
        return launch(driver_address(), kernel, tiles, RADIX_THREADS, raw_stream(device), nothing, True) in TOO_LARGE

    def words(self, number: Any) -> Any:
        """Words of 32 bits of scratch memory that sorting at most so many keys takes."""
        tiles = max(
            min(_tiles(number, RADIX_FEW), self._few_tiles), min(_tiles(number, RADIX_SOME), self._some_tiles),
            _tiles(number, RADIX_MANY),
        )  # fmt: skip
        return (tiles + 1) << self.digit

    def __call__(
        self, number: Any, keys: tuple[Any, Any], beside: tuple[Any, Any], scratch: Any, zero: Any, first: Any,
        to: Issuer,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Sorts.

        Args:
            number: of keys, at least 1.
            keys: addresses of the keys, which are lost, and of memory for as many.
            beside: addresses of memory for as many int32, twice.
            scratch: address of `words(number)` words.
            zero: address of a word that is 0, and may not be afterwards.
            first: address of what lies beside the keys; if 0, their positions.
            to: who issues the launches.

        Returns:
            Which of `keys` and which of `beside` hold what is sorted.
        """
        tiles, kernel, most = _tiles(number, RADIX_FEW), self._few, self._few_tiles
        if tiles > most:
            tiles, kernel, most = _tiles(number, RADIX_SOME), self._some, self._some_tiles
        if tiles <= most:
            totals = scratch + (4 * tiles << self.digit)
            arguments: tuple[Any, ...] = (*keys, first, *beside, scratch, totals, zero, number, self.passes)
            check_launch(SOURCE, to.own(kernel, tiles, RADIX_THREADS, arguments, together=True))
            return keys[self.passes % 2], beside[1 - self.passes % 2]
        tiles = _tiles(number, RADIX_MANY)
        totals = scratch + (4 * tiles << self.digit)
        values = first
        for shift in range(0, self.passes * self.digit, self.digit):
            for kernel, blocks, arguments in (
                (self._count, tiles, (keys[0], scratch, number, shift)),
                (self._sum, 1 << self.digit, (scratch, totals, tiles)),
                (self._sort, tiles, (keys[0], values, keys[1], beside[0], scratch, totals, number, shift)),
            ):
                check_launch(SOURCE, to.own(kernel, blocks, RADIX_THREADS, arguments))
            values, keys, beside = beside[0], (keys[1], keys[0]), (beside[1], beside[0])
        return keys[0], values


def _tiles(number: Any, items: int) -> Any:
    """Tiles of so many keys if threads have `items` each."""
    return ceil_div(number, RADIX_THREADS * items)


def why_not(device: int) -> str | None:
    """None if a device's row numbers are sorted here, else why they are sorted by PyTorch."""
    try:
        RadixSort(RADIX_DIGIT, device)
    except NoCompiler as error:
        return str(error)
    return None


@cache
def radix_sort(bits: int, device: int) -> RadixSort | None:
    """The `RadixSort` of these arguments, or None, with a warning on a GPU, if there can be none."""
    if device == HOST:
        return None
    try:
        return RadixSort(bits, device)
    except NoCompiler as error:
        warnings.warn(f"row numbers are sorted by torch.sort, which is slower: {error}", RuntimeWarning, stacklevel=2)
        return None
