"""The machine a run was made on, and what its memory can do: with every result, so that it can be judged later."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import __version__

PACKAGES = ("torch", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "tensorflow", "tensorflow-cpu", "jax", "jaxlib", "numpy")
COPIES = 15
GPU_ELEMENTS, CPU_ELEMENTS = 1 << 30, 1 << 25
FLUSHED = 256 * 2**20
"""Bytes written to empty a GPU's cache, at least."""


def describe(device: torch.device, command: list[str], known: str | None = None) -> dict[str, Any]:
    """Hardware, driver, versions, commit, command line and date."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": str(device),
        "processor": processor(device),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "embedfuse": __version__,
        "commit": known or commit(Path(__file__).parents[1]),
        "versions": versions(),
    }


def load() -> float | None:
    """Processes that want a core, the mean of the last minute, where the system tells."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def processor(device: torch.device) -> str:
    """Of the GPU, or of the CPU as the system calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of the packages that are here; of torch also which build."""
    found = {"torch": str(torch.__version__)}
    for name in PACKAGES:
        try:
            found.setdefault(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit(folder: Path) -> str | None:
    """Of the sources, with a + if they are changed; None outside of git."""
    found = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if found is None:
        return None
    return found + ("+" if _output("git", "-C", str(folder), "status", "--porcelain", "--", str(folder)) else "")


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def copy_bandwidth(device: torch.device, elements: int | None = None) -> float:
    """Bytes per second of a copy within the device's memory, read and written; the median."""
    elements = elements or (GPU_ELEMENTS if device.type == "cuda" else CPU_ELEMENTS)
    source = torch.zeros(elements, device=device)
    target = torch.ones_like(source)
    seconds = []
    for _ in range(COPIES):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize(device)
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - start)
    return float(2 * source.nbytes / statistics.median(seconds))


def gains_of_threads(threads: int) -> dict[str, float]:
    """How many times as fast a copy, and a product of matrices, are on so many threads as on one; in turn, medians.

    What the machine gives: two "cores" of a virtual machine may be one, and share its memory in any case.
    """
    source, matrix = torch.zeros(CPU_ELEMENTS // 4), torch.ones(512, 512)
    target, product = torch.ones_like(source), torch.ones_like(matrix)
    works: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source), "product of matrices": lambda: torch.mm(matrix, matrix, out=product)
    }  # fmt: skip
    seconds: dict[tuple[str, int], list[float]] = {}
    before = torch.get_num_threads()
    for _ in range(COPIES):
        for number in (1, threads):
            torch.set_num_threads(number)
            for name, work in works.items():
                start = time.perf_counter()
                work()
                seconds.setdefault((name, number), []).append(time.perf_counter() - start)
    torch.set_num_threads(before)
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    return {name: round(middle[name, 1] / middle[name, threads], 3) for name in works}


class Flusher:
    """Empties a GPU's cache by writing something larger."""

    def __init__(self, device: torch.device) -> None:
        cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
        self.buffer = torch.zeros(max(2 * cache, FLUSHED) // 4, device=device)

    def __call__(self) -> None:
        self.buffer.zero_()


def command_line() -> list[str]:
    """The command line as it can be typed again."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
