"""What the timing scripts here share: one clock for CPU and GPU, and what a result says of its machine."""

import datetime
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

import embedfuse


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of wall time of one call, with all that it started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


LEAD = 6_000_000
"""Cycles that the device waits, about 3 ms, in which the host gets ahead of it."""


def timed_on_device(work: Callable[[], Any]) -> float:
    """Seconds of the GPU for one call: what it takes of a loop in which the host is ahead of the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(LEAD)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def about(device: torch.device) -> dict[str, Any]:
    """Date, machine and versions."""
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "embedfuse": embedfuse.__version__,
        "python": platform.python_version(),
    }
