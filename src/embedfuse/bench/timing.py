"""Clocks. All jobs take turns, round after round, so that whatever slows the machine slows all of them.

Four clocks: *wall*, from the call until its result is there; *host*, until the call returns; *device*, of a GPU's work
alone, by replaying a CUDA graph of the call (*warm*: straight after the batch before; *cold*: with an emptied cache);
and, where a call cannot be captured, the sum of its kernels by the profiler. *Graph, wall*: from asking for the graph
until it is done.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .machine import Flusher
from .providers import LIBRARY_ERRORS, Phase

WARM_UP = 3
LEAD = 400_000
"""Cycles of waiting, about 0.2 ms, in which the host gets ahead of the device: launching is not the device's time."""
MARKER = "spin_kernel"
"""What `torch.cuda._sleep` launches."""
CUDA: Any = torch._C._autograd.DeviceType.CUDA
Samples = dict[str, list[float]]


@dataclass
class Job:
    """One phase of one provider, to be timed on a number of threads (0 leaves them as they are)."""

    provider: str
    name: str
    phase: Phase
    batches: Sequence[Any]
    capturable: bool
    threads: int = 0
    graphs: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # what captured calls read
    samples: Samples = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def call(self, number: int) -> None:
        """The phase and what must come before it."""
        batch = self.batches[number % len(self.batches)]
        self.phase.run(batch, self.phase.prepare(batch))

    def keep(self, clock: str, milliseconds: float) -> None:
        """One sample."""
        self.samples.setdefault(clock, []).append(milliseconds)


def quartiles(samples: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, the least, and how many."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "least": min(samples), "samples": len(samples)}


def take_turns(jobs: Sequence[Job], device: torch.device, rounds: int, progress: Callable[[], None]) -> None:
    """Times all jobs in turn; one that fails is left out from there on, with its error."""
    on_gpu = device.type == "cuda"
    flush = Flusher(device) if on_gpu else None
    clocks: list[Callable[[Job, int], None]] = [lambda job, number: _wall(job, number, device)]
    if flush is not None:
        clocks += [_warm, lambda job, number: _cold(job, number, flush)]
    threads = torch.get_num_threads()
    for number in range(-WARM_UP, rounds):
        for clock in clocks:
            for job in turns(jobs, number):
                if job.error is not None:
                    continue
                if job.threads:
                    torch.set_num_threads(job.threads)
                try:
                    clock(job, number)
                except LIBRARY_ERRORS as error:
                    job.error = _first_line(error)
                if number < 0:
                    job.samples.clear()
        progress()
    torch.set_num_threads(threads)


def turns(jobs: Sequence[Job], number: int) -> list[Job]:
    """The jobs in the order of a round: each is first as often as the others, and after each of its neighbours.

    Who is first finds the batch in memory, and the others in a cache.
    """
    first = number // 2 % len(jobs) if jobs else 0
    order = [*jobs[first:], *jobs[:first]]
    return order if number % 2 else order[::-1]


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _wall(job: Job, number: int, device: torch.device) -> None:
    batch = job.batches[number % len(job.batches)]
    prepared = job.phase.prepare(batch)
    _wait(device)
    start = time.perf_counter()
    job.phase.run(batch, prepared)
    returned = time.perf_counter()
    _wait(device)
    job.keep("wall", (time.perf_counter() - start) * 1e3)
    job.keep("host", (returned - start) * 1e3)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _replayed(graph: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _warm(job: Job, number: int) -> None:
    if job.graphs:
        graph = job.graphs[number % len(job.graphs)]
        job.graphs[(number - 1) % len(job.graphs)].replay()
        torch.cuda._sleep(LEAD)
        job.keep("device", _replayed(graph))
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        job.keep("graph, wall", (time.perf_counter() - start) * 1e3)


def _cold(job: Job, number: int, flush: Flusher) -> None:
    if job.graphs:
        flush()
        job.keep("device, cold cache", _replayed(job.graphs[number % len(job.graphs)]))


def smallest_graph(device: torch.device) -> Job:
    """A CUDA graph of one kernel, which takes turns with all other jobs: in less no captured step can be done."""
    one = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.zero_()
    return Job("", "", Phase(lambda batch, prepared: one.zero_()), [None], True, graphs=[graph], held=[one])


class Refusals:
    """Whose calls could not be captured: a failed capture may leave CUDA in disorder, so none is tried twice."""

    def __init__(self) -> None:
        self.reasons: dict[tuple[str, str], str] = {}
        self.stream: Any = None

    def capture(self, job: Job) -> None:
        """Records one graph for each batch, if the provider allows."""
        key = (job.provider, job.name)
        if not job.capturable or key in self.reasons:
            job.facts["no graph"] = self.reasons.get(key, "its calls wait for the device")
            return
        # one for all, since backward runs on the stream where its leaves were first used
        stream = self.stream = self.stream or torch.cuda.Stream()
        try:
            for batch in job.batches:
                # on this stream, since backward runs on the stream of its forward
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        job.phase.run(batch, job.phase.prepare(batch))
                    with _keeping() as saved:
                        prepared = job.phase.prepare(batch)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    result = job.phase.run(batch, prepared)
                torch.cuda.synchronize()
                job.graphs.append(graph)
                job.held.append((prepared, result, saved))
        except LIBRARY_ERRORS as error:
            job.graphs.clear()
            job.held.clear()
            job.facts["no graph"] = _first_line(error)
            if not isinstance(error, torch.OutOfMemoryError):
                self.reasons[key] = job.facts["no graph"]
            _settle()


@contextlib.contextmanager
def _keeping() -> Iterator[list[Any]]:
    """Lists what forwards save for their backward, which frees it; if that is captured, each replay reads it again."""
    saved: list[Any] = []

    def keep(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def _settle() -> None:
    """After a failed capture the first wait may report its error once more."""
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()


def examine(jobs: Sequence[Job], device: torch.device) -> None:
    """What one call of each launches, by the profiler, and what it takes at most of a GPU's memory."""
    if device.type != "cuda":
        return
    for job in jobs:
        try:
            for number in range(2):
                job.call(number)
            prepared = job.phase.prepare(job.batches[0])
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            job.phase.run(job.batches[0], prepared)
            torch.cuda.synchronize(device)
            job.facts["peak bytes"] = torch.cuda.max_memory_allocated(device) - before
        except LIBRARY_ERRORS as error:
            job.error = _first_line(error)
    working = [job for job in jobs if job.error is None]
    # one profile for all, since each takes its time to begin and to end
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for job in working:
            prepared = job.phase.prepare(job.batches[0])
            torch.cuda._sleep(1000)
            job.phase.run(job.batches[0], prepared)
            torch.cuda._sleep(1000)
        torch.cuda.synchronize(device)
    events = [event for event in profile.events() if event.device_type == CUDA]
    pieces = split_at(sorted(events, key=lambda event: event.time_range.start), MARKER)
    if len(pieces) == 2 * len(working) + 1:
        for job, piece in zip(working, pieces[1::2], strict=True):
            job.facts |= kernel_facts([(event.name, float(event.time_range.elapsed_us())) for event in piece])


def split_at(events: Sequence[Any], name: str) -> list[list[Any]]:
    """The events between those whose name holds `name`."""
    pieces: list[list[Any]] = [[]]
    for event in events:
        if name in event.name:
            pieces.append([])
        else:
            pieces[-1].append(event)
    return pieces


def kernel_facts(events: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Launches, copies, and the microseconds of kernels by name; the longest twelve."""
    kernels: dict[str, float] = {}
    copies = 0
    for name, spent in events:
        copies += name.startswith(("Memcpy", "Memset"))
        kernels[name[:100]] = kernels.get(name[:100], 0.0) + spent
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:12]
    return {
        "launches": len(events) - copies,
        "copies": copies,
        # the only device time of calls that cannot be captured; gaps between kernels are not in it
        "kernels ms": sum(kernels.values()) / 1e3,
        "kernels us": {name: round(spent, 2) for name, spent in longest},
    }


def results(job: Job) -> dict[str, Any]:
    """Everything of a job, for JSON. The clocks are in milliseconds."""
    if job.error is not None:
        return {"error": job.error}
    return {**{clock: quartiles(samples) for clock, samples in job.samples.items()}, **job.facts}
