"""How CUDA sources become kernels, with a compiler and a driver that only pretend."""

import ctypes
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from embedfuse.torch.backends import cuda_source, radix_sort
from embedfuse.torch.backends.cuda_source import NoCompiler


class _Driver:
    """Loads binaries that begin with "good", unless told an error."""

    def __init__(self) -> None:
        self.binaries: list[bytes] = []
        self.error = 0

    def cuModuleLoadData(self, module: object, binary: bytes) -> int:
        self.binaries.append(binary)
        return self.error or (0 if binary.startswith(b"good") else 200)

    def cuModuleGetFunction(self, handle: object, module: ctypes.c_void_p, name: bytes) -> int:
        handle._obj.value = 1000 + len(name)  # type: ignore[attr-defined]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Driver:
    """The driver, on a machine whose compiler makes b"good 1", b"good 2", …"""
    found, made = _Driver(), []

    def compile_one(name: str, source: bytes, options: list[str]) -> bytes:
        assert b"radix_sort_" in source
        assert "--gpu-architecture=sm_90" in options
        made.append(options)
        return b"good %d" % len(made)

    for name in ("is_current_stream_capturing", "get_device_capability", "device"):
        monkeypatch.setattr(torch.cuda, name, {
            "is_current_stream_capturing": lambda: False, "get_device_capability": lambda device: (9, 0),
            "device": lambda device: torch.no_grad(),
        }[name])  # fmt: skip
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: None)
    monkeypatch.setattr(cuda_source, "_version", lambda: (13, 0))
    monkeypatch.setattr(cuda_source, "compiled", compile_one)
    monkeypatch.setattr(cuda_source, "driver", lambda: found)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return found


def _functions(bits: int = 8) -> list[int]:
    return cuda_source.functions_of("radix_sort.cu", ["count_digits", "sort"], {"BITS": bits}, 0)


def test_compiled_once_for_each_choice_of_constants(driver: _Driver) -> None:
    assert _functions() == [1012, 1004]
    assert _functions() == [1012, 1004]
    _functions(7)
    assert driver.binaries == [b"good 1", b"good 1", b"good 2"]
    assert {1012, 1004} <= cuda_source.loaded


def test_a_torn_file_is_made_anew(driver: _Driver, tmp_path: Path) -> None:
    _functions()
    (file,) = (tmp_path / "cache").rglob(cuda_source.FILE)
    file.write_bytes(b"")
    _functions()
    assert driver.binaries == [b"good 1", b"", b"good 2"]
    assert file.read_bytes() == b"good 2"


def test_a_cache_that_cannot_be_written_is_no_error(driver: _Driver, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    _functions()
    _functions()
    assert driver.binaries == [b"good 1", b"good 2"]


def test_nothing_is_loaded_while_a_graph_is_captured(driver: _Driver, monkeypatch) -> None:
    driver.error = 900
    radix_sort.radix_sort.cache_clear()
    with pytest.raises(RuntimeError, match=r"another thread captures a CUDA graph: run one batch before"):
        radix_sort.radix_sort(20, 0)
    driver.error = 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"radix_sort\.cu cannot be loaded while .* call `embedfuse\.torch\.warmup`"):
        radix_sort.radix_sort(20, 0)
    # no such refusal is for good
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(radix_sort, "blocks_at_once", lambda *args: 4)
    monkeypatch.setattr(radix_sort, "multiprocessors", lambda device: 132)
    for name in ("raw_stream", "driver_address", "launch"):
        monkeypatch.setattr(radix_sort, name, lambda *args: 0)
    assert radix_sort.radix_sort(20, 0) is not None
    radix_sort.radix_sort.cache_clear()


def test_a_binary_that_the_driver_refuses_has_a_reason(driver: _Driver) -> None:
    driver.error = 218
    with pytest.raises(NoCompiler, match=r"cuModuleLoadData failed with error 218 of CUDA's driver"):
        _functions()


def test_without_cuda_there_is_no_compiler(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    cuda_source._compiler.cache_clear()
    with pytest.raises(NoCompiler, match="this PyTorch was built without CUDA"):
        cuda_source._compiler()


def test_without_nvrtc_the_reason_names_it(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    cuda_source._compiler.cache_clear()
    with pytest.raises(NoCompiler, match=r"NVRTC was not found: libnvrtc\.so\.99"):
        cuda_source._compiler()
