"""Launches of Triton kernels in a few microseconds of the host's time.

Triton's own call, `kernel[grid](…)`, binds arguments, writes the key of its cache as a string and asks the driver about
each pointer: several times the time that the driver takes. Here a `Launcher` holds all that stays the same from call to
call; its first call of a kind goes Triton's way and returns the compiled kernel, and calls of the same kind then go to
the driver by `kernels/launch.cpp`, with addresses in place of tensors.

Calls are of one kind if Triton would give them one compiled kernel. All that it may look at is the launcher's (kernel,
constants, types) or in the kind of its calls: the device, the class of each number, addresses that are no multiples of
16. Where this file is too careful, a kind more goes through Triton's call and meets the same compiled kernel. Where
anything is not as expected (no CUDA, a kernel that takes other arguments, somebody who watches launches), all calls
are Triton's own.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from ..native import NATIVE
from .cuda_source import NoCompiler, driver_address, parameter_sizes

Kernels: Any = getattr(NATIVE, "Kernels", None)
OPTIONS = {"enable_fp_fusion": True}
"""Of every launch; Triton 3.9 warns where this is not said."""
HOST = -1
"""The device of tensors that the interpreter works on."""
WARP = 32
"""Threads of a warp of CUDA."""
SIZES = {"*": 8, "i64": 8, "i32": 4}
"""Bytes of arguments, by what Triton calls their types."""


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


# another Triton may keep these elsewhere
_runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def unwatched() -> bool:
    """Whether nobody watches launches: hooks are None, or chains of no calls."""
    if _runtime is None:
        return False
    before, after = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return (before is None or getattr(before, "calls", True) == []) and (
        after is None or getattr(after, "calls", True) == []
    )


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
        self._given = kernel.arg_names[: len(kernel.arg_names) - len(constants)]
        numbers = self._given[len(self.dtypes) :]
        blind = {parameter.name for parameter in getattr(kernel, "params", ()) if parameter.do_not_specialize}
        self._seen = [name not in blind for name in numbers]
        # the forms that C++ can launch; made when first needed, since there may be no driver
        self.known: Any = None
        # by their ids compiled kernels, which Triton unloads if nobody has them, and what they take
        self._looked_at: dict[int, tuple[Any, list[int] | None]] = {}

    def __call__(
        self, grid: tuple[int, ...], pointers: tuple[Any, ...], numbers: tuple[int, ...], device: int,
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
        if self.known is not None and unwatched():
            raw = raw_stream(device) if stream is None else stream.cuda_stream
            if self.known(device, raw, grid, pointers, numbers):
                return
        addresses = [
            None if dtype is None else _Address(pointer, dtype)
            for pointer, dtype in zip(pointers, self.dtypes, strict=True)
        ]
        compiled = self._by_triton(grid, addresses, numbers, stream)
        if hasattr(compiled, "function"):
            Launcher.functions.add(compiled.function)
            self._note(compiled, device, pointers, numbers)

    def _by_triton(self, grid: Any, pointers: Any, numbers: Any, stream: torch.cuda.Stream | None) -> Any:
        with torch.cuda.stream(stream):
            return self.kernel[grid](*pointers, *numbers, **self.constants, **self.options, **OPTIONS)

    def _note(self, compiled: Any, device: int, pointers: tuple[Any, ...], numbers: tuple[int, ...]) -> None:
        """Keeps a compiled kernel for calls like this one, if it is as expected."""
        if Kernels is None or raw_stream is None or _runtime is None or _runtime.debug or not unwatched():
            return
        if id(compiled) not in self._looked_at:
            self._looked_at[id(compiled)] = compiled, _taken(compiled, self._given)
        taken = self._looked_at[id(compiled)][1]
        if taken is None:
            return
        if self.known is None:
            self.known = Kernels(driver_address(), len(self.dtypes), self._seen)
        metadata = compiled.metadata
        self.known.add(
            device, pointers, numbers, compiled.function, WARP * metadata.num_warps, metadata.shared, taken
        )  # fmt: skip


USUAL = {
    "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
    "profile_scratch_size": 0,
}  # fmt: skip
"""What Triton's metadata say of kernels that need a plain launch."""


def _taken(compiled: Any, given: Sequence[str]) -> list[int] | None:
    """The places of the arguments that a compiled kernel takes, or None unless it takes those and nothing else."""
    if any(getattr(compiled.metadata, name, usual) != usual for name, usual in USUAL.items()):
        return None
    signature = getattr(getattr(compiled, "src", None), "signature", {})
    taken, sizes = [], []
    for place, name in enumerate(given):
        kind = signature.get(name, "")
        # those whose value is compiled in, as of a pointer that is None
        if kind != "constexpr":
            size = SIZES.get("*" if kind.startswith("*") else kind)
            if size is None:
                return None
            taken.append(place)
            sizes.append(size)
    try:
        # two addresses of scratch memory come last
        return taken if parameter_sizes(compiled.function) == [*sizes, 8, 8] else None
    except NoCompiler:
        return None


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
    pointers = tuple([None if tensor is None else pointer(tensor) for tensor in tensors])
    launcher(kernel, warps, constants, dtypes, registers)(grid, pointers, numbers, device)
