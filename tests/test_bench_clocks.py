"""How the benchmarks measure time, launches and memory."""

import contextlib
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_helpers import (
    CPU,
    quick_backend,  # noqa: F401 (a fixture for all tests here)
)

from embedfuse import SGD, FeatureConfig, TableConfig
from embedfuse.bench import (
    models,
    providers,
    timing,
)
from embedfuse.torch import EmbeddingCollection, FusedOptimizer, use_backend


def lookup() -> tuple[EmbeddingCollection, FusedOptimizer]:
    """Of two features, whose ids are put together in the forward."""
    tables = [TableConfig(1000, 16, 0.0, combiner="sum", name=name) for name in "ab"]
    collection = EmbeddingCollection(
        {table.name: FeatureConfig(table) for table in tables}, SGD(1.0),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    return collection, FusedOptimizer(collection)


def test_what_a_forward_saves_is_kept() -> None:
    collection, optimizer = lookup()
    ids = torch.arange(5, device=next(collection.parameters()).device)
    with timing._keeping() as saved:
        out = collection.concatenated({"a": ids, "b": ids})
    out.sum().backward()
    optimizer.step()
    assert any(torch.equal(tensor, torch.cat([ids, ids])) for tensor in saved)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_backward_does_not_read_what_was_freed() -> None:
    collection, optimizer = lookup()
    rows = torch.randperm(1000, device="cuda")[:700]
    prepare = lambda ids: collection.concatenated({"a": ids, "b": ids})  # noqa: E731

    def run(_: Any, out: torch.Tensor) -> None:
        out.backward(torch.ones_like(out))
        optimizer.step()

    job = timing.Job("ours", "backward", providers.Phase(run, prepare), [rows], True)
    # the one backend that waits for nothing
    with use_backend("triton"):
        timing.Refusals().capture(job)
    assert job.error is None and len(job.graphs) == 1, job.facts
    for table in collection.tables.values():
        table.data.zero_()
    # what was freed goes back to the driver, or to others
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), -1, device="cuda") for _ in range(20)]
    job.graphs[0].replay()
    torch.cuda.synchronize()
    expected = torch.zeros(1000, device="cuda")
    expected[rows] = -1
    for table in collection.tables.values():
        assert torch.equal(table.detach()[:, 7], expected)
    del junk


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_job_is_first_and_last_as_often_as_the_others(count: int) -> None:
    jobs = [timing.Job(str(n), "train", providers.Phase(lambda *_: None), [], False) for n in range(count)]
    orders = [[job.provider for job in timing.turns(jobs, number)] for number in range(4 * count)]
    for place in (0, -1):
        assert sorted(order[place] for order in orders) == sorted(job.provider for job in jobs * 4)
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert timing.turns([], 3) == []


def test_jobs_take_turns_and_one_that_fails_does_not_stop_the_others() -> None:
    order: list[str] = []

    def job(name: str, run: Callable[[Any, Any], Any]) -> timing.Job:
        return timing.Job(name, "train", providers.Phase(run), ["first", "second"], False)

    def failing(batch: Any, _: Any) -> None:
        order.append("b")
        if len(order) > 20:
            raise ValueError("too often\nand more")

    jobs = [job("a", lambda batch, _: order.append("a")), job("b", failing), job("c", lambda *_: time.sleep(0.002))]
    timing.take_turns(jobs, CPU, 12, lambda: None)
    assert {tuple(order[at : at + 2]) for at in range(0, 20, 2)} == {("a", "b"), ("b", "a")}
    assert timing.results(jobs[1]) == {"error": "ValueError: too often"}
    wall = timing.results(jobs[2])["wall"]
    assert wall["samples"] == 12
    assert wall["q1"] <= wall["median"] <= wall["q3"]
    assert wall["median"] >= 2


def test_what_comes_before_a_phase_is_not_timed() -> None:
    phase = providers.Phase(lambda _batch, prepared: prepared, lambda _batch: time.sleep(0.01))
    job = timing.Job("a", "backward", phase, [0], False)
    timing.take_turns([job], CPU, 3, lambda: None)
    assert timing.results(job)["wall"]["median"] < 5


class ActedGraph:
    """What stands for a CUDA graph: knows how often it was replayed."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class ActedEvent:
    """Takes 2 ms from one to the next."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, other: "ActedEvent") -> float:
        return 2.0


def acted_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that says it is a GPU, and the calls of torch that a GPU would answer."""
    nothing = contextlib.nullcontext
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name, act in {
        "Stream": lambda: stream, "stream": lambda _: nothing(), "current_stream": lambda: stream,
        "synchronize": lambda *_: None, "CUDAGraph": ActedGraph, "graph": lambda graph, stream: nothing(),
        "Event": ActedEvent, "reset_peak_memory_stats": lambda _: None, "memory_allocated": lambda _: 100,
        "max_memory_allocated": lambda _: 150, "_sleep": lambda _: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, act)
    span = types.SimpleNamespace
    seen = [
        span(name=name, device_type=timing.CUDA, time_range=span(start=at, elapsed_us=lambda: 3.0))
        for at, name in enumerate(
            ["spin_kernel", "look_up", "spin_kernel", "zero", "spin_kernel", "a", "b", "spin_kernel"]
        )
    ]
    profile = types.SimpleNamespace(events=lambda: reversed(seen))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nothing(profile))
    monkeypatch.setattr(timing, "Flusher", lambda device: lambda: None)
    return types.SimpleNamespace(type="cuda")


def test_the_clocks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = acted_gpu(monkeypatch)

    def refusing(batch: Any, prepared: Any) -> None:
        calls.append(batch)
        # the fourth call is the first one that is captured
        if len(calls) > 5:
            raise RuntimeError("operation not permitted when stream is capturing")

    calls: list[Any] = []
    free = timing.Job("a", "forward", providers.Phase(lambda *_: None), [0, 1, 2], True)
    refused = timing.Job("b", "forward", providers.Phase(refusing), [0, 1, 2], True)
    timing.examine([free, refused], device)
    assert (free.facts["launches"], refused.facts["launches"]) == (1, 2)
    assert refused.facts["kernels us"] == {"a": 3.0, "b": 3.0}
    assert free.facts["peak bytes"] == 50
    refusals = timing.Refusals()
    for job in (free, refused):
        refusals.capture(job)
    assert len(free.graphs) == 3
    assert refused.graphs == []
    assert "stream is capturing" in refused.facts["no graph"]
    again = timing.Job("b", "forward", providers.Phase(lambda *_: None), [0], True)
    refusals.capture(again)
    assert again.graphs == []
    timing.take_turns([free, again], device, 4, lambda: None)
    found = timing.results(free)
    assert found["device"]["median"] == found["device, cold cache"]["median"] == 2.0
    assert {"wall", "host", "graph, wall"} <= found.keys()
    # in each round three times warm (one before, one by events, one by the clock on the wall) and once cold
    assert sum(graph.replays for graph in free.graphs) == (4 + timing.WARM_UP) * 4
    assert "device" not in timing.results(again)


class Event:
    """A kernel as the profiler shows it."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_kernels_are_counted_between_markers() -> None:
    events = [Event(name) for name in ("a", "spin_kernel(long)", "b", "Memcpy DtoD", "b", "at::spin_kernel", "c")]
    pieces = timing.split_at(events, timing.MARKER)
    assert [[event.name for event in piece] for piece in pieces] == [["a"], ["b", "Memcpy DtoD", "b"], ["c"]]
    facts = timing.kernel_facts([(event.name, 2.0) for event in pieces[1]])
    assert facts == {
        "launches": 2, "copies": 1, "kernels ms": 0.006, "kernels us": {"b": 4.0, "Memcpy DtoD": 2.0},
    }  # fmt: skip


def test_what_tables_add_is_compared_within_a_round() -> None:
    alone, job = (timing.Job(name, "eager", None, [], False) for name in ("none", "ours"))  # type: ignore[arg-type]
    for number, slow in enumerate([1.0, 5.0, 9.0, 2.0, 7.0]):
        alone.keep("wall", slow)
        job.keep("wall", slow + 0.5 + 0.1 * number)
        job.keep("host", slow)
    found = models.added_to(alone, job)
    assert list(found) == ["added, wall"]
    assert found["added, wall"]["median"] == pytest.approx(0.7) and found["added, wall"]["samples"] == 5
    assert models.added_to(None, job) == models.added_to(alone, alone) == {}
    job.error = "failed"
    assert models.added_to(alone, job) == {}
