"""Clocks of `gpu_engine.py`: CUDA-graph replays over several batches, the host's share, and the profiler's."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from clocks import LEAD
from gpu_cases import BATCHES, DEVICE

WARM_SECONDS = 0.05


def graphs_of(work: Callable[[int], Any]) -> list[torch.cuda.CUDAGraph]:
    """One graph for each batch."""
    graphs = []
    for batch in range(BATCHES):
        work(batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work(batch)
        graphs.append(graph)
    return graphs


def milliseconds(work: Callable[[int], Any], rounds: int) -> float:
    """Median device time of one call."""
    graphs = graphs_of(work)
    # the first replays are slower, clocks of the card among the reasons
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_SECONDS:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    torch.cuda._sleep(LEAD)
    for number, (start, end) in enumerate(events):
        start.record()
        graphs[number % BATCHES].replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def host_microseconds(work: Callable[[int], Any], rounds: int = 200) -> float:
    """Host time of one call, the device not waited for."""
    work(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        work(0)
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / rounds * 1e6


def kernel_times(work: Callable[[int], Any]) -> dict[str, float]:
    """Device microseconds of each kernel of one call, by the profiler; the mean over the batches."""
    work(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in range(BATCHES):
            work(batch)
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profile.events():
        spent = getattr(event, "device_time_total", 0) or 0
        if spent:
            name = event.name if len(event.name) < 60 else event.name[:57] + "..."
            times[name] = times.get(name, 0.0) + spent / BATCHES
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy, read and written."""
    source = torch.empty(1 << 30, device=DEVICE).uniform_()
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() * 4 / (statistics.median(times) * 1e-3)
