"""Launches of Triton kernels in a few microseconds of the host's time.

Triton's own call, `kernel[grid](…)`, binds arguments, writes the key of its cache as a string and asks the driver about
each pointer: more than twice the time of a direct launch, for kernels of many arguments. Here a `Launcher` holds all
that stays the same from call to call; its first call of a kind goes Triton's way and returns the compiled kernel, and
calls of the same kind then go to its launcher directly, with addresses in place of tensors.

Calls are of one kind if Triton would give them one compiled kernel. All that it may look at is the launcher's (kernel,
constants, types) or in the key of its calls: the device, the class of each number, addresses that are no multiples of
16. Where this file is too careful, a kind more goes through Triton's call and meets the same compiled kernel.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}
"""Of every launch; Triton 3.9 warns where this is not said."""
HOST = -1
"""The device of tensors that the interpreter works on."""


class _Compiled(NamedTuple):
    """What a launch needs of a compiled kernel."""

    run: Callable[..., None]
    function: Any
    metadata: Any


class _Address:
    """An address as Triton's own call takes it; no tuple, which it would take apart."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


_NOTHING = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


# another Triton may keep these elsewhere; then every call is Triton's own
_runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _idle(hook: Any) -> bool:
    """Whether nothing hangs on a hook, which is None or a chain of calls."""
    return hook is None or getattr(hook, "calls", True) == []


def _unwatched() -> bool:
    """Whether nobody watches launches."""
    return _runtime is not None and _idle(_runtime.launch_enter_hook) and _idle(_runtime.launch_exit_hook)


class Launcher:
    """`kernel[grid](*pointers, *numbers, **constants, num_warps=warps, maxnreg=registers)` on the current device.

    Args:
        kernel: a `triton.jit` function of pointers, then numbers, then constexpr parameters.
        warps: warps of a program.
        constants: the constexpr parameters.
        dtypes: of what each pointer points to; None for those that are None.
        registers: the most that a thread may have.
    """

    functions: ClassVar[set[Any]] = set()
    """Handles of all compiled kernels that were launched."""

    def __init__(
        self, kernel: Any, warps: int, constants: dict[str, Any], dtypes: Sequence[torch.dtype | None],
        registers: int | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.constants, self.dtypes = kernel, dict(constants), tuple(dtypes)
        self.options = {"num_warps": warps} | ({} if registers is None else {"maxnreg": registers})
        self._ordered = [constants[name] for name in kernel.arg_names if name in constants]
        numbers = kernel.arg_names[len(self.dtypes) : -len(constants) or None]
        blind = {parameter.name for parameter in getattr(kernel, "params", ()) if parameter.do_not_specialize}
        self._sighted = [place for place, name in enumerate(numbers) if name not in blind]
        self._known: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(
        self, grid: tuple[int, ...], pointers: Sequence[Any], numbers: Sequence[int], device: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        """Launches.

        Args:
            grid: one to three numbers of programs, none of them 0.
            pointers: addresses, or tensors if `device` is HOST; None where there is none.
            numbers: integers of at least 0.
            device: index of the current device, where all pointers point to.
            stream: another than the current one.
        """
        if device == HOST:
            self._by_triton(grid, pointers, numbers, None)
            return
        together = 0
        for pointer in pointers:
            if pointer is not None:
                together |= pointer
        key: tuple[Any, ...] = (device, *[class_of(numbers[place]) for place in self._sighted])
        if max(numbers) >= 2**31:
            key += tuple(map(class_of, numbers))
        if together & 15:
            # Triton has a kernel of its own for each set of addresses that are no multiples of 16
            key += tuple([place for place, pointer in enumerate(pointers) if pointer is not None and pointer & 15])
        found = self._known.get(key)
        if found is None or not _unwatched():
            addresses = [
                None if dtype is None else _Address(pointer, dtype)
                for pointer, dtype in zip(pointers, self.dtypes, strict=True)
            ]
            self._note(key, self._by_triton(grid, addresses, numbers, stream))
            return
        width, height, depth = (*grid, 1, 1)[:3]
        raw = raw_stream(device) if stream is None else stream.cuda_stream
        found.run(
            width, height, depth, raw, found.function, found.metadata, None, None, None,
            *pointers, *numbers, *self._ordered,
        )  # fmt: skip

    def _by_triton(self, grid: Any, pointers: Any, numbers: Any, stream: torch.cuda.Stream | None) -> Any:
        with torch.cuda.stream(stream):
            return self.kernel[grid](*pointers, *numbers, **self.constants, **self.options, **OPTIONS)

    def _note(self, key: tuple[Any, ...], compiled: Any) -> None:
        if raw_stream is None or _runtime is None or _runtime.debug or not _unwatched():
            return
        if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
            self._known[key] = _Compiled(compiled.run, compiled.function, compiled.packed_metadata)
            Launcher.functions.add(compiled.function)


_launchers: dict[tuple[Any, ...], Launcher] = {}


def launcher(
    kernel: Any, warps: int, constants: dict[str, Any], dtypes: Sequence[torch.dtype | None],
    registers: int | None = None,
) -> Launcher:  # fmt: skip
    """The `Launcher` of these arguments, one for all that ask; constants in an order that is always the same."""
    key = (id(kernel), warps, registers, *dtypes, *constants.values())
    found = _launchers.get(key)
    if found is None:
        found = _launchers[key] = Launcher(kernel, warps, constants, dtypes, registers)
    return found


def device_of(tensor: Tensor) -> tuple[int, Callable[[Tensor], Any]]:
    """The device of a tensor as launchers take it, and what makes a pointer of a tensor there."""
    return (tensor.get_device(), Tensor.data_ptr) if tensor.is_cuda else (HOST, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...], numbers: tuple[int, ...], warps: int,
    constants: dict[str, Any], registers: int | None = None,
) -> None:  # fmt: skip
    """One launch, with tensors; the first of them is of the current device."""
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    device, pointer = device_of(tensors[0])  # type: ignore[arg-type]
    pointers = [None if tensor is None else pointer(tensor) for tensor in tensors]
    launcher(kernel, warps, constants, dtypes, registers)(grid, pointers, numbers, device)


def class_of(number: int) -> str:
    """Triton has kernels of their own for 1, for multiples of 16, and for numbers of 64 bits."""
    if not -(2**31) <= number < 2**31:
        return "wide multiple" if number & 15 == 0 else "wide"
    return "one" if number == 1 else "any" if number & 15 else "multiple"
