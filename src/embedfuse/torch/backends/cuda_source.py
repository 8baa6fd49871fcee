"""CUDA sources of `kernels/cuda/` → functions of the driver, by the compiler in the CUDA libraries that PyTorch brings.

For what Triton cannot say, such as votes of a warp. What is compiled stays in Triton's cache on disk. And what else is
asked of CUDA's driver.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from triton.runtime.cache import get_cache_manager

CAPTURING = range(900, 910)
"""Errors of CUDA's driver that have to do with the capture of graphs."""


class NoCompiler(Exception):
    """CUDA sources cannot be compiled or loaded here; the message says why."""


loaded: set[int] = set()
"""Handles of all kernels that this process has."""


def functions_of(name: str, functions: Sequence[str], defines: dict[str, int], device: int) -> list[int]:
    """Handles of the kernels of one source, loaded on one device.

    Args:
        name: of the file in `kernels/cuda/`.
        functions: names of its kernels.
        defines: its constants.
        device: index.

    Raises:
        NoCompiler: if it does not compile, or there is nothing to compile it with.
        RuntimeError: while a CUDA graph is captured, when the driver loads nothing.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} cannot be loaded while a CUDA graph is captured: run one batch of that size before, or call "
            "`embedfuse.torch.warmup`"
        )
    source = (resources.files("embedfuse.kernels") / "cuda" / name).read_bytes()
    major, minor = torch.cuda.get_device_capability(device)
    options = [
        f"--gpu-architecture=sm_{major}{minor}", "--std=c++17",
        *(f"-D{constant}={number}" for constant, number in defines.items()),
    ]  # fmt: skip
    key = hashlib.sha256(repr((source, options, _version())).encode()).hexdigest()
    with torch.cuda.device(device):
        # a launch makes the device's context, and makes it the current one of this thread
        torch.zeros(1, device=f"cuda:{device}")
        kept, module = _kept(key), ctypes.c_void_p()
        # what lies on disk may be torn
        if kept is None or driver().cuModuleLoadData(ctypes.byref(module), kept) != 0:
            binary = compiled(name, source, options)
            _keep(key, binary)
            _checked(driver().cuModuleLoadData(ctypes.byref(module), binary), "cuModuleLoadData")
        handles = []
        for function in functions:
            handle = ctypes.c_void_p()
            found = driver().cuModuleGetFunction(ctypes.byref(handle), module, function.encode())
            _checked(found, f"cuModuleGetFunction of {function}")
            handles.append(handle.value or 0)
    loaded.update(handles)
    return handles


def check_launch(name: str, failed: int) -> None:
    """Raises RuntimeError if the driver did not launch a kernel of that source."""
    if failed:
        raise RuntimeError(f"a kernel of {name} was not launched: error {failed} of CUDA's driver")


def blocks_at_once(function: int, threads: int, device: int) -> int:
    """How many blocks of so many threads run at once on a multiprocessor of a device."""
    with torch.cuda.device(device):
        number = ctypes.c_int()
        found = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(number), ctypes.c_void_p(function), threads, ctypes.c_size_t(0)
        )
        _checked(found, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
    return number.value


def multiprocessors(device: int) -> int:
    """Of a device."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def driver() -> Any:
    """The library of CUDA's driver, which is there where PyTorch found a GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        # there since CUDA 11.8
        library.cuLaunchKernelEx  # noqa: B018
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"CUDA's driver was not found, or is older than CUDA 11.8: {error}") from None
    return library


@cache
def driver_address(function: str = "cuLaunchKernelEx") -> int:
    """The address of a function of the driver's, for `kernels/launch.cpp`; else of its launch."""
    return ctypes.cast(getattr(driver(), function), ctypes.c_void_p).value or 0


def parameter_sizes(function: int) -> list[int]:
    """Bytes of each parameter of a kernel.

    Raises:
        NoCompiler: if the driver does not say, as before CUDA 12.4.
    """
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    try:
        ask = driver().cuFuncGetParamInfo
    except AttributeError as error:
        raise NoCompiler(f"CUDA's driver is older than CUDA 12.4: {error}") from None
    while ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


@cache
def _compiler() -> Any:
    """The library of CUDA's compiler, NVRTC: of PyTorch's own packages first."""
    if torch.version.cuda is None:
        raise NoCompiler("this PyTorch was built without CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    packages = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (packages.submodule_search_locations or ())] if packages is not None else []
    for path in [*(str(path) for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))), name]:
        try:
            return ctypes.CDLL(path)
        except OSError as found:
            error = found
    raise NoCompiler(f"NVRTC was not found: {error}")


def _version() -> tuple[int, int]:
    """The compiler's."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


FILE = "kernels.cubin"
"""What a binary is called in its folder of the cache."""


def _kept(key: str) -> bytes | None:
    """The binary that the cache has for a key. A cache that cannot be read or written is none, but no error."""
    try:
        path = get_cache_manager(key).get_file(FILE)
        return None if path is None else Path(path).read_bytes()
    except (OSError, RuntimeError):
        return None


def _keep(key: str, binary: bytes) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        get_cache_manager(key).put(binary, FILE, binary=True)


def compiled(name: str, source: bytes, options: Sequence[str]) -> bytes:
    """The binary of a source.

    Raises:
        NoCompiler: with the compiler's messages, if it does not compile.
    """
    nvrtc, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None) != 0:
        raise NoCompiler(f"NVRTC refused {name}")
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), flags) != 0:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise NoCompiler(f"NVRTC could not compile {name} with {' '.join(options)}: {log.value.decode()}")
        if nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) != 0:
            raise NoCompiler(f"this NVRTC makes no binaries for {options[0]}")
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _checked(result: int, what: str) -> None:
    if result in CAPTURING:
        raise RuntimeError(f"{what} failed since another thread captures a CUDA graph: run one batch before capturing")
    if result != 0:
        raise NoCompiler(f"{what} failed with error {result} of CUDA's driver")
