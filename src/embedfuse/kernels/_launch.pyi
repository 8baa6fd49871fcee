"""Launches of compiled CUDA kernels, in C++: see `launch.cpp`."""

from collections.abc import Sequence

class Kernels:
    """The compiled forms of one kernel, by the kind of its calls."""

    def __init__(self, driver: int, pointers: int, seen: Sequence[bool]) -> None: ...
    def add(
        self, device: int, pointers: tuple[int | None, ...], numbers: tuple[int, ...], function: int, threads: int,
        shared: int, taken: Sequence[int],
    ) -> None: ...  # fmt: skip
    def __call__(
        self, device: int, stream: int, grid: tuple[int, ...], pointers: tuple[int | None, ...],
        numbers: tuple[int, ...],
    ) -> bool: ...  # fmt: skip

def launch(
    driver: int, function: int, blocks: int, threads: int, stream: int, arguments: tuple[int, ...], together: bool
) -> int: ...
