"""CUDA's driver as `kernels/launch.cpp` calls it, for tests on machines that have none."""

import ctypes
import traceback
from collections.abc import Callable
from typing import NamedTuple


class Asked(NamedTuple):
    """What a launch asks for."""

    words: list[int]  # the grid, the block, bytes of shared memory
    stream: int
    function: int
    places: int  # address of the addresses of the arguments
    marks: list[int] | None  # of the attribute that comes with it: which, and its value


class LaunchDriver:
    """`address` is that of its launch, which says what `answer` does; -1 if that raises.

    Args:
        answer: what to say of a launch, 0 if all is well.
    """

    def __init__(self, answer: Callable[[Asked], int]) -> None:
        self._answer = answer
        # as long as the driver lives
        self._called = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._launch)
        self.address = ctypes.cast(self._called, ctypes.c_void_p).value

    def _launch(self, config: int, function: int | None, places: int, extra: None) -> int:
        words = (ctypes.c_uint32 * 7).from_address(config)
        stream, attribute = (ctypes.c_uint64 * 2).from_address(config + 32)
        attributes = ctypes.c_uint32.from_address(config + 48).value
        marks = list((ctypes.c_uint32 * 3).from_address(attribute)) if attributes else None
        try:
            assert attributes <= 1
            return self._answer(Asked(list(words), stream, function or 0, places, marks))
        except Exception:
            # Python can raise nothing through C++
            traceback.print_exc()
            return -1
