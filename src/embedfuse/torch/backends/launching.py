"""Launches of Triton kernels in a few microseconds of the host's time.

Triton's own call, `kernel[grid](…)`, binds arguments, writes the key of its cache as a string and asks the driver about
each pointer: more than twice the time of a direct launch, for kernels of many arguments. Here the first call of a kind
goes that way and returns the compiled kernel; calls of the same kind then go to its launcher directly, with addresses
in place of tensors.

Calls are of one kind if Triton would give them one compiled kernel; all that it may look at is in the key: the kernel,
the device, the constants, and of each argument its type and class. Where this file is too careful, a kind more goes
through Triton's call and meets the same compiled kernel.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}
"""Of every launch; Triton 3.9 warns where this is not said."""


class _Compiled(NamedTuple):
    """What a launch needs of a compiled kernel."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]  # in the order of the kernel's parameters


_known: dict[tuple[Any, ...], _Compiled] = {}


_NOTHING = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


# another Triton may keep these elsewhere; then every call is Triton's own
_runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _idle(hook: Any) -> bool:
    """Whether nothing hangs on a hook, which is None or a chain of calls."""
    return hook is None or getattr(hook, "calls", True) == []


def _direct() -> bool:
    """Whether nobody watches or changes launches."""
    return (
        _raw_stream is not None
        and _runtime is not None
        and _idle(_runtime.launch_enter_hook)
        and _idle(_runtime.launch_exit_hook)
        and not _runtime.debug
    )


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...], numbers: tuple[int, ...], warps: int,
    constants: dict[str, Any], stream: torch.cuda.Stream | None = None, registers: int | None = None,
) -> None:  # fmt: skip
    """`kernel[grid](*tensors, *numbers, **constants, num_warps=warps, maxnreg=registers)` on the current device.

    Args:
        kernel: a `triton.jit` function of pointers, then numbers, then constexpr parameters.
        grid: one to three numbers of programs, none of them 0.
        tensors: the first of them is of the current device.
        numbers: integers.
        warps: warps of a program.
        constants: the constexpr parameters, in any order that is the same from call to call.
        stream: another than the current one.
        registers: the most that a thread may have; always the same for a kernel with these warps and constants.
    """
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    key = (
        kernel, warps, *constants.values(), *[None if tensor is None else tensor.dtype for tensor in tensors],
        # Triton has a kernel of its own for addresses that are no multiples of 16
        *[place for place, address in enumerate(addresses) if address is not None and address & 15],
        *[_class_of(number) for number in numbers], tensors[0].get_device(),  # type: ignore[union-attr]
    )  # fmt: skip
    found = _known.get(key)
    if found is not None and _direct():
        width, height, depth = (*grid, 1, 1)[:3]
        raw = _raw_stream(key[-1]) if stream is None else stream.cuda_stream
        found.run(
            width, height, depth, raw, found.function, found.metadata, None, None, None,
            *addresses, *numbers, *found.constants,
        )  # fmt: skip
        return
    with torch.cuda.stream(stream):
        options = OPTIONS if registers is None else {**OPTIONS, "maxnreg": registers}
        compiled = kernel[grid](*tensors, *numbers, **constants, num_warps=warps, **options)
    if key[-1] >= 0 and _direct() and all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        ordered = tuple(constants[name] for name in kernel.arg_names[len(tensors) + len(numbers) :])
        _known[key] = _Compiled(compiled.run, compiled.function, compiled.packed_metadata, ordered)


class Side:
    """A stream beside the current one, of this thread, for work that need not wait for its neighbours."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # its few programs are to be under way before the many of the other stream
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._ready, self._done = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> torch.cuda.Stream:
        """What is issued to the stream from now on waits for all that was issued to the current one so far."""
        self._ready.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self._ready)
        return self.stream

    def join(self) -> None:
        """The current stream waits for all that was issued to this one, so that tensors of both may be freed."""
        self._done.record(self.stream)
        torch.cuda.current_stream(self.device).wait_event(self._done)


_sides = threading.local()


def side_of(device: torch.device) -> Side:
    """The side stream of a device, one for each thread, whose events no other thread records."""
    if not hasattr(_sides, "known"):
        _sides.known = {}
    sides: dict[torch.device, Side] = _sides.known
    if device not in sides:
        sides[device] = Side(device)
    return sides[device]


def _class_of(number: int) -> str:
    """Triton has kernels of their own for 1, for multiples of 16, and for numbers of 64 bits."""
    if not -(2**31) <= number < 2**31:
        return "wide multiple" if number & 15 == 0 else "wide"
    return "one" if number == 1 else "any" if number & 15 else "multiple"
