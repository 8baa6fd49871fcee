"""Launches of compiled CUDA kernels, in C++: see `launch.cpp`."""

from collections.abc import Sequence
from typing import Any

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

class Beside:
    """A second stream, and events by which the streams wait for each other."""

    def __init__(self, stream: int, ready: int, done: int, record: int, hold: int) -> None: ...

class Program:
    """Launches that were written down, for other batches; see `program.h`."""

    def __init__(
        self, given: int, values: list[tuple[int, int, int]], guards: list[tuple[int, int, int, bool]], size: int,
        steps: list[tuple[object, ...] | bool],
    ) -> None: ...  # fmt: skip
    def bytes(self, given: tuple[Any, ...]) -> int: ...
    def run(self, given: tuple[Any, ...], memory: int, device: int, stream: int, beside: Beside, start: int) -> int: ...
    def run_alone(self, given: tuple[Any, ...], device: int, stream: int, beside: Beside) -> int: ...
    def arguments(
        self, given: tuple[Any, ...], memory: int, which: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]: ...
    def __len__(self) -> int: ...

class Places:
    """Where matrices are to lie that share one memory: so many bytes after its first, of so many columns."""

    def __init__(self, starts: Sequence[int], widths: Sequence[int]) -> None: ...
    def hold(self, matrices: list[Any], origin: object) -> bool: ...
    def hold_own(self, held: dict[str, Any], own: dict[str, Any], origin: object) -> int: ...

MOST_JOINED: int

def join_bags(
    driver: int, function: int, ids: list[Any], offsets: list[Any], all_ids: object, all_offsets: object, bags: int,
    places: int, threads: int, stream: int,
) -> int: ...  # fmt: skip
def same(left: dict[Any, Any], right: dict[Any, Any]) -> bool: ...
def learn_tensors(exchange: object, type: type, slowly: object) -> None: ...
def fields(thing: object) -> tuple[int, int, int, int, int, int]: ...
def launch(
    driver: int, function: int, blocks: int, threads: int, stream: int, arguments: tuple[int, ...], together: bool
) -> int: ...
