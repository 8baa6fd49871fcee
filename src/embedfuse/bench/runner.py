"""A run: every case drawn, every provider checked, the right ones timed in turn, and all of it written down."""

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import machine
from .batches import count_bytes, draw
from .cases import SUITES, Case, choose, fitting, scaled
from .checking import UNIT, expect, measured_phases, wrong
from .providers import (
    BY_NAME,
    LIBRARY_ERRORS,
    OURS,
    REGISTRY,
    Provider,
    Shared,
    Unsupported,
    make,
    version_of,
    why_not,
)
from .timing import Job, Refusals, examine, quartiles, results, smallest_graph, take_turns

FORMAT = 1
COMPILED = ("ten_tables", "single_ids", "fbgemm_default", "tiny", "cpu_bags")
"""Cases that torch.compile is tried on by itself; it takes its time."""
OWN_THREADS = ("tensorflow", "jax")
"""Providers that `torch.set_num_threads` does not reach."""
LOOSE = {dtype: unit for dtype, unit in UNIT.items() if dtype != "float32"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What a run is asked for.

    Attributes:
        suite: "engine", "cpu" or "models".
        cases: patterns of names; none for all.
        providers: names; none for all.
        threads: numbers of CPU threads to time on.
        scale: of rows and batches.
        rounds: samples of each clock.
        budget: seconds after which no further case begins and no further provider is set up.
        gigabytes: most that one copy of a case's tables may take.
        graphs: whether CUDA graphs may be captured.
        commit: of the sources, where git cannot tell.
    """

    suite: str
    device: torch.device
    cases: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    threads: tuple[int, ...] = (1, 2)
    scale: float = 1.0
    rounds: int = 21
    budget: float = 560.0
    gigabytes: float = 24.0
    graphs: bool = True
    command: tuple[str, ...] = ()
    commit: str | None = None
    out: Path | None = None
    say: Say = print
    began: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() - self.began > self.budget

    @property
    def over(self) -> str:
        """The reason of what there was no time for."""
        return f"the budget of {self.budget:g} seconds was used up"


def check_providers(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ValueError at a name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"`providers` must be of {', '.join(known)}, got {name!r}")


def report_of(options: Options, kind: str) -> dict[str, Any]:
    """An empty report: what is known before anything is timed."""
    # larger than caches, but quick where it is only a try
    elements = 1 << 22 if options.scale < 0.1 else None
    on_cpu = options.device.type == "cpu"
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if options.device.type == "cuda" else max(options.threads))
    bandwidth = machine.copy_bandwidth(options.device, elements)
    torch.set_num_threads(threads)
    own = machine.describe(options.device, list(options.command), options.commit)
    if options.device.type == "cpu" and (own["load"] or 0) > own["cores"]:
        options.say(
            f"The machine is busy already: load {own['load']} on {own['cores']} cores. Times will be too long, those "
            "on several threads beyond use. Better wait until it is idle."
        )
    return {
        "format": FORMAT, "kind": kind, "suite": options.suite, "scale": options.scale, "rounds": options.rounds,
        "machine": own,
        "copy bytes per second": bandwidth,
        "gains of two threads": machine.gains_of_threads(2) if on_cpu and 2 in options.threads else None,
        "providers": {}, "cases": [], "not run": [],
    }  # fmt: skip


def save(report: dict[str, Any], options: Options) -> None:
    """Writes the report; called after each case, so that a run that is cut off loses one at most."""
    report["seconds"] = round(time.monotonic() - options.began, 1)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def run(options: Options) -> dict[str, Any]:
    """Runs a suite of cases; returns the report, which is in `options.out` too.

    Raises:
        ValueError: a case or provider that is not known.
    """
    if options.suite not in SUITES:
        raise ValueError(f"`suite` must be one of {', '.join(SUITES)}, models, got {options.suite!r}")
    check_providers(options.providers, list(REGISTRY))
    chosen = choose(options.suite, options.cases)
    report = report_of(options, "cases")
    usable = []
    for name in options.providers or (name for name in REGISTRY if name not in BY_NAME):
        # some take long to import
        reason = options.over if options.is_over() else why_not(name, options.device)
        report["providers"][name] = {"title": REGISTRY[name].title, "reason": reason}
        if reason is None:
            report["providers"][name]["version"] = version_of(name)
            usable.append(name)
    refusals = Refusals()
    for case in chosen:
        if options.is_over():
            report["not run"].append({"name": case.name, "reason": options.over})
            continue
        case = fitting(scaled(case, options.scale), int(options.gigabytes * 2**30))
        options.say(f"{case.name}: {case.describe()}")
        try:
            report["cases"].append(measure(case, usable, options, refusals))
        except LIBRARY_ERRORS as error:
            report["not run"].append({"name": case.name, "reason": f"{type(error).__name__}: {error}"})
        save(report, options)
        _free(options.device)
    save(report, options)
    return report


def measure(case: Case, names: Sequence[str], options: Options, refusals: Refusals) -> dict[str, Any]:
    """One case: checks all providers, then times those that are right."""
    began = time.monotonic()
    work = draw(case, options.device)
    needed = count_bytes(work)
    found: dict[str, Any] = {
        "name": case.name, "shape": case.describe(), "table bytes": case.table_bytes, "ids": needed.ids,
        "distinct rows": needed.unique,
        "bytes": {phase: needed.of(phase) for phase in ("forward", "backward", "train", "asked")}, "providers": {},
    }  # fmt: skip
    expected = expect(work)
    ready: dict[str, Provider] = {}
    shared: Shared = {}
    for name in names:
        entry: dict[str, Any] = {}
        found["providers"][name] = entry
        if options.is_over():
            entry["unsupported"] = options.over
            continue
        if name == "torch-compiled" and name not in options.providers and case.name not in COMPILED:
            entry["unsupported"] = "compiled for a few cases only, unless asked for by name"
            continue
        try:
            provider = make(name, work, shared)
            # one module may serve two providers, so each starts afresh
            provider.reset()
            entry["wrong"] = wrong(provider, work, expected)
            if entry["wrong"] and name not in OURS and case.dtype in LOOSE:
                # 16-bit sums are rougher, not wrong
                provider.reset()
                rougher = wrong(provider, work, expect(work, LOOSE[case.dtype]))
                entry["coarse"], entry["wrong"] = entry["wrong"], rougher
        except Unsupported as error:
            entry["unsupported"] = str(error)
        except LIBRARY_ERRORS as error:
            entry["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        else:
            if entry["wrong"] is None:
                ready[name] = provider
        for key in ("wrong", "unsupported", "error"):
            if entry.get(key):
                options.say(f"  {name}: {key}: {entry[key]}")
    del expected
    checked = time.monotonic()
    jobs = [job for name, provider in ready.items() for job in _jobs(name, provider, work.batches, options)]
    examine(jobs, options.device)
    smallest = []
    if options.device.type == "cuda" and options.graphs:
        smallest.append(smallest_graph(options.device))
        # ours first: what fails to be captured may disturb those after it
        for job in jobs:
            if job.error is None:
                refusals.capture(job)
    take_turns([*jobs, *smallest], options.device, options.rounds, lambda: None)
    for job in smallest:
        found["smallest graph ms"] = quartiles(job.samples["graph, wall"])["median"]
    for job in jobs:
        threads = f", {job.threads} thread{'s' * (job.threads > 1)}" if job.threads else ""
        phases = found["providers"][job.provider].setdefault("phases", {})
        phases[job.name + threads] = results(job)
    found["load"] = machine.load()
    found["seconds"] = {"checking": round(checked - began, 1), "timing": round(time.monotonic() - checked, 1)}
    summary = _summary(found)
    if summary:
        options.say(summary)
    return found


def _jobs(name: str, provider: Provider, batches: Sequence[Any], options: Options) -> list[Job]:
    phases = measured_phases(provider)
    if options.device.type == "cuda":
        return [Job(name, phase, provider.phases[phase], batches, provider.capturable) for phase in phases]
    threads = (max(options.threads),) if name in OWN_THREADS else options.threads
    return [Job(name, p, provider.phases[p], batches, False, number) for p in phases for number in threads]


def _summary(found: dict[str, Any]) -> str:
    """Wall milliseconds in one line, to see a run go on."""
    parts = []
    for name in (*OURS, *(name for name in found["providers"] if name not in OURS)):
        phases = found["providers"].get(name, {}).get("phases", {})
        times = [f"{phase} {p['wall']['median']:.3g}" for phase, p in phases.items() if "wall" in p]
        if times:
            parts.append(f"  {name}: {', '.join(times)} ms")
    return "\n".join(parts)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
