"""CUDA sources of `kernels/cuda/` → functions of the driver, by the compiler in the CUDA libraries that PyTorch brings.

For what Triton cannot say, such as votes of a warp. What is compiled stays in Triton's cache on disk.
"""

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


class NoCompiler(RuntimeError):
    """CUDA sources cannot be compiled or loaded here; the message says why."""


def functions_of(name: str, functions: Sequence[str], defines: dict[str, int], device: int) -> list[int]:
    """Handles of the kernels of one source, loaded on one device.

    Args:
        name: of the file in `kernels/cuda/`.
        functions: names of its kernels.
        defines: its constants.
        device: index.

    Raises:
        NoCompiler: if it does not compile, or there is nothing to compile it with.
    """
    source = (resources.files("embedfuse.kernels") / "cuda" / name).read_bytes()
    binary = _cached(name, source, defines, torch.cuda.get_device_capability(device))
    handles, module = [], ctypes.c_void_p()
    with torch.cuda.device(device):
        # makes the device's context, and makes it the current one of this thread
        torch.empty(1, device=f"cuda:{device}")
        _checked(driver().cuModuleLoadData(ctypes.byref(module), binary), "cuModuleLoadData")
        for function in functions:
            handle = ctypes.c_void_p()
            found = driver().cuModuleGetFunction(ctypes.byref(handle), module, function.encode())
            _checked(found, f"cuModuleGetFunction of {function}")
            handles.append(handle.value or 0)
    return handles


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
        # without these ctypes would cut addresses to 32 bits
        library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"CUDA's driver was not found, or is older than CUDA 11.8: {error}") from None
    return library


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


def _cached(name: str, source: bytes, defines: dict[str, int], capability: tuple[int, int]) -> bytes:
    """The binary of a source, compiled at most once in the life of the cache."""
    options = [
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17",
        *(f"-D{constant}={number}" for constant, number in defines.items()),
    ]  # fmt: skip
    major, minor = ctypes.c_int(), ctypes.c_int()
    _compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256(repr((source, options, major.value, minor.value)).encode()).hexdigest()
    kept, file = get_cache_manager(key), f"{Path(name).stem}.cubin"
    path = kept.get_file(file)
    if path is not None:
        return Path(path).read_bytes()
    binary = compiled(name, source, options)
    kept.put(binary, file, binary=True)
    return binary


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
    if result != 0:
        raise NoCompiler(f"{what} failed with error {result} of CUDA's driver")
