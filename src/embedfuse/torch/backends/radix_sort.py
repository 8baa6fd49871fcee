"""Sorts many row numbers of a GPU by the bits that they have, where `torch.sort` looks at all 32."""

import ctypes
import struct
import threading
import warnings
from functools import cache

from ...kernels.configs import (
    RADIX_BESIDE,
    RADIX_BLOCKS,
    RADIX_DIGIT,
    RADIX_FEW,
    RADIX_MANY,
    RADIX_SOME,
    RADIX_THREADS,
)
from .cuda_source import NoCompiler, blocks_at_once, driver, functions_of, multiprocessors
from .launching import HOST, raw_stream

ARGUMENTS = 10
"""The most that a kernel has."""
COOPERATIVE = 2
"""The attribute of a launch whose blocks wait for each other."""
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
        self.passes = max(-(-bits // RADIX_DIGIT), 1)
        self.digit = max(-(-bits // self.passes), 4)
        few, some = f"radix_sort_{RADIX_FEW}", f"radix_sort_{RADIX_SOME}"
        names = (few, some, "count_digits", "sum_digits", "sort_by_digit")
        constants = {"BITS": self.digit, "THREADS": RADIX_THREADS, "BLOCKS": RADIX_BLOCKS}
        handles = functions_of("radix_sort.cu", names, constants, device)
        self._few, self._some, self._count, self._sum, self._sort = handles
        # tiles that may wait for each other
        self._few_tiles = multiprocessors(device)
        self._some_tiles = self._few_tiles * min(blocks_at_once(self._some, RADIX_THREADS, device), RADIX_BESIDE)
        self._device, self._local = device, threading.local()

    def words(self, number: int) -> int:
        """Words of 32 bits of scratch memory that sorting at most so many keys takes."""
        tiles = max(
            min(_tiles(number, RADIX_FEW), self._few_tiles), min(_tiles(number, RADIX_SOME), self._some_tiles),
            _tiles(number, RADIX_MANY),
        )  # fmt: skip
        return (tiles + 1) << self.digit

    def __call__(
        self, number: int, keys: tuple[int, int], beside: tuple[int, int], scratch: int, zero: int, first: int = 0
    ) -> tuple[int, int]:
        """Sorts.

        Args:
            number: of keys, at least 1.
            keys: addresses of the keys, which are lost, and of memory for as many.
            beside: addresses of memory for as many int32, twice.
            scratch: address of `words(number)` words.
            zero: address of a word that is 0, and may not be afterwards.
            first: address of what lies beside the keys; if 0, their positions.

        Returns:
            Which of `keys` and which of `beside` hold what is sorted.
        """
        launch: _Launch | None = getattr(self._local, "launch", None)
        if launch is None:
            launch = self._local.launch = _Launch(RADIX_THREADS)
        stream = raw_stream(self._device)
        tiles, kernel, most = _tiles(number, RADIX_FEW), self._few, self._few_tiles
        if tiles > most:
            tiles, kernel, most = _tiles(number, RADIX_SOME), self._some, self._some_tiles
        if tiles <= most:
            totals = scratch + (4 * tiles << self.digit)
            arguments: tuple[int, ...] = (*keys, first, *beside, scratch, totals, zero, number, self.passes)
            failed = launch(kernel, tiles, stream, arguments, True)
            if failed not in TOO_LARGE:
                _checked(failed)
                return keys[self.passes % 2], beside[1 - self.passes % 2]
            # a process may have a part of the device only, where fewer run at once
            self._few_tiles = self._some_tiles = 0
        tiles = _tiles(number, RADIX_MANY)
        totals = scratch + (4 * tiles << self.digit)
        values = first
        for shift in range(0, self.passes * self.digit, self.digit):
            for kernel, blocks, arguments in (
                (self._count, tiles, (keys[0], scratch, number, shift)),
                (self._sum, 1 << self.digit, (scratch, totals, tiles)),
                (self._sort, tiles, (keys[0], values, keys[1], beside[0], scratch, totals, number, shift)),
            ):
                _checked(launch(kernel, blocks, stream, arguments))
            values, keys, beside = beside[0], (keys[1], keys[0]), (beside[1], beside[0])
        return keys[0], values


def _checked(failed: int) -> None:
    if failed:
        raise RuntimeError(f"a kernel of radix_sort.cu was not launched: error {failed} of CUDA's driver")


def _tiles(number: int, items: int) -> int:
    """Tiles of so many keys if threads have `items` each."""
    return -(-number // (RADIX_THREADS * items))


class _Launch:
    """One thread's memory for what the driver reads at a launch.

    Args:
        threads: of a block.
    """

    def __init__(self, threads: int) -> None:
        # a CUlaunchAttribute: which, and its value
        self._attribute = (ctypes.c_uint32 * 18)(COOPERATIVE, 0, 1)
        # a CUlaunchConfig: blocks, threads, no shared memory, the stream, attributes and their number
        self._packs = [struct.Struct(f"{7 + arguments}Q").pack_into for arguments in range(ARGUMENTS + 1)]
        self._words = ctypes.create_string_buffer(8 * (7 + ARGUMENTS))
        config = ctypes.addressof(self._words)
        self._places = (ctypes.c_void_p * ARGUMENTS)(*range(config + 7 * 8, config + (7 + ARGUMENTS) * 8, 8))
        one = 1 << 32
        self._shape = one, 1 | threads << 32, one | 1, 0
        self._addresses = config, ctypes.addressof(self._places), ctypes.addressof(self._attribute)

    def __call__(self, kernel: int, blocks: int, stream: int, arguments: tuple[int, ...], wait: bool = False) -> int:
        """Launches. What the driver says, 0 if all is well.

        Args:
            kernel: its handle.
            blocks: how many.
            stream: its handle.
            arguments: of 64 bits, of which kernels that take 32 read the first half.
            wait: whether blocks wait for each other, so that all must run at once.
        """
        one, threads, depth, shared = self._shape
        config, places, attribute = self._addresses
        self._packs[len(arguments)](
            self._words, 0, blocks | one, threads, depth, shared, stream, attribute, int(wait), *arguments
        )
        failed: int = driver().cuLaunchKernelEx(config, kernel, places, None)
        return failed


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
