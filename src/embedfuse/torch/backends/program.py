"""Launches written down once, and issued for other batches by one call from C++.

What sorts and sums a batch (`sorted_runs.py`, `summed_runs.py`) computes grids and addresses from the number of ids and
the like, in Python, which takes the host longer than the driver takes. `Trace` has it done once with `Traced` numbers,
which note what is made of them and what is asked of them. `kernels/program.h` makes and asks the same of the numbers of
a later batch: if the answers are the same, so are the launches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..native import ADDRESS, FIELDS, NATIVE, SIZES, STEPS, TYPE
from .cuda_source import driver_address
from .launching import Launcher, current_device, raw_stream
from .side_stream import side_of

_NONE: Any = None if NATIVE is None else NATIVE.Beside(0, 0, 0, 0, 0)

# PyTorch's allocator itself: to make a tensor takes the host twice as long
allocate: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
release: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)

GIVEN, CONSTANT, SUM, PRODUCT, QUOTIENT = range(5)
LESS, EQUAL = range(2)


class NotTraced(Exception):
    """Something that only Python can do."""


class Traced:
    """A number that notes what is made of it, and what is asked of it. It can be in no set, and count no loop."""

    __slots__ = ("place", "trace", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: "Trace", place: int, value: int) -> None:
        self.trace, self.place, self.value = trace, place, value

    def __add__(self, other: Any) -> "Traced":
        return self.trace.made(SUM, self, other)

    def __mul__(self, other: Any) -> "Traced":
        return self.trace.made(PRODUCT, self, other)

    def __floordiv__(self, other: Any) -> "Traced":
        return self.trace.made(QUOTIENT, self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Traced":
        return self * -1

    def __lshift__(self, bits: int) -> "Traced":
        return self * (1 << bits)

    def __lt__(self, other: Any) -> bool:
        return self.trace.asked(LESS, self, other)

    def __gt__(self, other: Any) -> bool:
        return self.trace.asked(LESS, other, self)

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __eq__(self, other: object) -> bool:
        return self.trace.asked(EQUAL, self, other)

    def __bool__(self) -> bool:
        return self != 0


class TracedTensor:
    """The same of a tensor's address and of its first two sizes and strides."""

    def __init__(self, fields: Sequence[Traced], dimensions: int) -> None:
        self.address, self.type = fields[ADDRESS], fields[TYPE]
        self.shape = fields[SIZES : SIZES + dimensions]
        self._steps = fields[STEPS : STEPS + dimensions]

    def stride(self) -> Sequence[Traced]:
        """As a tensor's."""
        return self._steps


class Trace:
    """An `Issuer` that launches nothing.

    Args:
        given: tensors and numbers of the batch at hand; None where no batch has one.
        index: number of their device.
    """

    has_streams = True

    def __init__(self, given: Sequence[Any], index: int) -> None:
        self.device = index
        self._values: list[tuple[int, int, int]] = []
        self._constants: dict[int, Traced] = {}
        self._guards: list[tuple[int, int, int, bool]] = []
        self._steps: list[tuple[Any, ...] | bool] = []
        self._launchers: dict[int, Launcher] = {}  # by the numbers of their steps
        self._kept: list[Tensor] = []
        self._count = len(given)
        self.given = [self._thing(number, thing) for number, thing in enumerate(given)]
        self._size: Traced = self._constant(0)
        self._has_memory = False

    def _thing(self, number: int, thing: Any) -> Any:
        found = NATIVE.fields(thing)
        fields = [self._noted(GIVEN, FIELDS * number + place, 0, value) for place, value in enumerate(found)]
        if isinstance(thing, Tensor):
            # each batch has one of this type, on this device, of as many dimensions
            self.asked(EQUAL, fields[TYPE], found[TYPE])
            return TracedTensor(fields, min(thing.dim(), 2))
        self.asked(EQUAL, fields[TYPE], 0)
        return None if thing is None else fields[ADDRESS]

    def _noted(self, made: int, left: int, right: int, value: int) -> Traced:
        self._values.append((made, left, right))
        return Traced(self, len(self._values) - 1, value)

    def _constant(self, value: Any) -> Traced:
        if isinstance(value, Traced):
            return value
        value = 0 if value is None else int(value)
        if value not in self._constants:
            self._constants[value] = self._noted(CONSTANT, value, 0, value)
        return self._constants[value]

    def made(self, how: int, left: Any, right: Any) -> Traced:
        """A number that is made of two."""
        left, right = self._constant(left), self._constant(right)
        value = {SUM: int.__add__, PRODUCT: int.__mul__, QUOTIENT: int.__floordiv__}[how](left.value, right.value)
        return self._noted(how, left.place, right.place, value)

    def asked(self, what: int, left: Any, right: Any) -> bool:
        """Answers, and notes the answer."""
        left, right = self._constant(left), self._constant(right)
        answer: bool = left.value < right.value if what == LESS else left.value == right.value
        self._guards.append((what, left.place, right.place, answer))
        return answer

    # --- as an `Issuer` --------------------------------------------------------------------------------------------

    def __call__(
        self, launcher: Launcher, grid: tuple[Any, ...], pointers: tuple[Any, ...], numbers: tuple[Any, ...],
        aside: bool = False,
    ) -> None:  # fmt: skip
        """See `Issuer`."""
        # not there before its first call, or if only Triton can launch it
        if launcher.known is None:
            raise NotTraced
        self._launchers[len(self._steps)] = launcher
        self._steps.append((launcher.known, self._places(*grid), self._places(*pointers, *numbers), aside))

    def own(self, function: int, blocks: Any, threads: int, arguments: tuple[Any, ...], together: bool = False) -> int:
        """See `Issuer`."""
        places = self._places(*arguments)
        self._steps.append((function, self._places(blocks), places, driver_address(), threads, together))
        return 0

    def _places(self, *values: Any) -> tuple[int, ...]:
        return tuple(self._constant(value).place for value in values)

    def pointer(self, thing: Any) -> Any:
        """See `Issuer`."""
        return None if thing is None else thing.address

    def constant(self, tensor: Tensor) -> Any:
        """See `Issuer`."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def memory(self, size: Any, starts: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Any]:
        """See `Issuer`."""
        self._size, self._has_memory = self._constant(size), True
        # what follows from it is never asked for
        base = self._noted(GIVEN, FIELDS * self._count, 0, 0)
        return [base + start for start in starts]

    def tensor(self, number: Any, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """See `Issuer`; PyTorch's ops cannot be written down."""
        raise NotTraced

    def kept(self, tensor: Tensor) -> Any:
        """See `Issuer`."""
        raise NotTraced

    def fork(self) -> None:
        """See `Issuer`."""
        self._steps.append(True)

    def join(self) -> None:
        """See `Issuer`."""
        self._steps.append(False)

    def program(self, whole: bool = True) -> "Program":
        """What was written down; if not `whole`, only which batches it is of."""
        steps = self._steps if whole else []
        native = NATIVE.Program(self._count, self._values, self._guards, self._size.place, steps)
        return Program(native, steps, self._launchers, self.device, self._kept, self._has_memory)


class Program:
    """What `Trace` wrote down."""

    def __init__(
        self, native: Any, steps: list[Any], launchers: dict[int, Launcher], index: int, kept: list[Tensor],
        has_memory: bool,
    ) -> None:  # fmt: skip
        self._native, self._length, self._launchers = native, len(native), launchers
        self._index, self._kept, self._has_memory = index, kept, has_memory
        self._forks = True in steps
        self._aside = {number for number in launchers if steps and steps[number][-1]}

    def __call__(self, given: tuple[Any, ...]) -> bool | None:
        """Launches; False, and nothing else, if the batch needs other launches; None if only Python can issue them.

        Args:
            given: tensors and numbers, as `write_down` was given.
        """
        native, index = self._native, self._index
        if current_device() != index:
            return False
        if self._length == 0:
            return False if native.bytes(given) < 0 else None
        side = side_of(index) if self._forks else None
        beside = _NONE if side is None else side.beside
        stream = raw_stream(index)
        if not self._has_memory:
            done = native.run_alone(given, index, stream, beside)
            if 0 <= done < self._length:
                self._finish(done, given, 0, stream, side)
            return bool(done >= 0)
        size = native.bytes(given)
        if size < 0:
            return False
        address = allocate(size, stream)
        try:
            done = native.run(given, address, index, stream, beside, 0)
            if done < self._length:
                self._finish(done, given, address, stream, side)
        finally:
            release(address)
        return True

    def _finish(self, done: int, given: tuple[Any, ...], address: int, stream: int, side: Any) -> None:
        """Issues launches from number `done` on, which was not compiled for such a call yet."""
        native, index = self._native, self._index
        while done < self._length:
            own = side.stream if side is not None and done in self._aside else None
            grid, pointers, numbers = native.arguments(given, address, done)
            self._launchers[done](grid, pointers, numbers, index, own)
            beside = _NONE if side is None else side.beside
            done = native.run(given, address, index, stream, beside, done + 1)


def write_down(given: Any, index: int, issue: Any, ask: Any = None) -> Program | None:
    """What `issue(given, to)` launches on a device, `given` being a named tuple; None if there can be no programs.

    Args:
        given: tensors and numbers of the batch at hand.
        index: number of the device.
        issue: issues the launches.
        ask: asks of `given` whatever else decides about them, beside its tensors' types and dimensions.
    """
    if NATIVE is None or allocate is None:
        return None
    trace = Trace(given, index)
    traced = type(given)(*trace.given)
    if ask is not None:
        ask(traced)
    try:
        issue(traced, trace)
    except NotTraced:
        return trace.program(whole=False)
    return trace.program()
