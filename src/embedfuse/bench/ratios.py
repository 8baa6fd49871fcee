"""Who is faster, and by how much: tables and sentences from a report."""

from collections.abc import Iterator

from rich.table import Table

from .providers import OURS, PHASES
from .reading import (
    Report,
    base_of,
    better_of,
    device_time,
    geometric_mean,
    is_busy,
    is_disturbed,
    phases_of,
    time_of,
)

OTHERS = ("torch", "torch-compiled", "fbgemm", "tensorflow", "jax")
SMALL_STEP = 5
"""Steps that take at most so many times the smallest graph are held against it."""


def ratio_rows(report: Report, phase: str, clock: str) -> Iterator[tuple[str, str, list[tuple[str, float]]]]:
    """For each of ours and each of the others: `(ours, other, [(case, times as fast)])`, without disturbed times."""
    for ours in OURS:
        for other in OTHERS:
            rivals = [other, "fbgemm-v2"] if other == "fbgemm" else [other]
            found = []
            for case in report["cases"]:
                mine, theirs = (better_of(case, names, phase, clock) for names in ([ours], rivals))
                if mine and theirs and not is_disturbed(report, case, phase):
                    found.append((case["name"], theirs / mine))
            if found:
                yield ours, other, found


def ratios(report: Report) -> Table:
    """How many times as fast as the others ours are: geometric mean and worst case."""
    table = Table(
        title="Times as fast, geometric mean over the cases (above 1: embedfuse is faster)", title_justify="left"
    )
    for column in ("phase", "clock", "ours", "other"):
        table.add_column(column)
    for column in ("cases", "mean", "worst"):
        table.add_column(column, justify="right")
    for phase in phases_of(report):
        for clock in ("wall", "device") if report["machine"]["device"].startswith("cuda") else ("wall",):
            for ours, other, found in ratio_rows(report, phase, clock):
                worst = min(found, key=lambda pair: pair[1])
                other = "fbgemm, better of both" if other == "fbgemm" else other
                mean = geometric_mean(value for _, value in found)
                table.add_row(phase, clock, ours, other, str(len(found)), f"{mean:.2f}", f"{worst[1]:.2f} {worst[0]}")
    return table


def warning(report: Report) -> str | None:
    """What must be known before anything is read, if the machine had other work."""
    phases = phases_of(report)
    busy = [
        case
        for case in report["cases"]
        if is_busy(report, case) or any(is_disturbed(report, case, phase) for phase in phases)
    ]
    if not busy:
        return None
    load = max(case.get("load") or 0 for case in busy)
    return (
        f"THE MACHINE WAS BUSY in {len(busy)} of {len(report['cases'])} cases (load up to {load} on "
        f"{report['machine']['cores']} cores): distrust small differences. Times on several threads that are marked "
        "with ! say little, and no ratios are made of them."
    )


def findings(report: Report) -> Iterator[str]:
    """Captured steps against the smallest graph, and what checking ids costs."""
    for case in report["cases"]:
        smallest = case.get("smallest graph ms", report.get("smallest graph ms"))
        for provider in case["providers"]:
            captured, host = (time_of(case, provider, "train", clock) for clock in ("graph, wall", "host"))
            if smallest and captured and host and captured < SMALL_STEP * smallest:
                yield (
                    f"{case['name']}, {provider}: a step in a CUDA graph takes {captured / smallest:.1f} times as long "
                    f"as a graph of one kernel ({smallest * 1e3:.0f} µs); eager it takes the host {host * 1e3:.0f} µs"
                )
    costs = []
    for case in report["cases"]:
        plain, checked = (device_time(case, "embedfuse-engine", p) for p in ("forward", "forward, ids checked"))
        if plain and checked:
            costs.append(checked / plain)
    if costs:
        yield f"Checking ids costs the forward {geometric_mean(costs) - 1:+.1%} (geometric mean, device time)"


def by_case(report: Report) -> Table | None:
    """How many times as fast as the strongest rival that was there, case by case; each of ours."""
    rivals = next((r for r in (["fbgemm", "fbgemm-v2"], ["torch"]) if _has(report, r)), None)
    if rivals is None:
        return None
    clocks = ("wall", "device") if report["machine"]["device"].startswith("cuda") else ("wall",)
    columns = [(phase, clock) for phase in phases_of(report) if base_of(phase) in PHASES for clock in clocks]
    shown = [name for name in OURS if name in report["providers"]]
    table = Table(title=f"Times as fast as {rivals[0]}: {' / '.join(shown)}", title_justify="left")
    table.add_column("case")
    for phase, clock in columns:
        table.add_column(f"{phase}, {clock}", justify="right")
    for case in report["cases"]:
        cells = []
        for phase, clock in columns:
            other = better_of(case, rivals, phase, clock)
            if is_disturbed(report, case, phase):
                cells.append("busy")
                continue
            mine = [better_of(case, [name], phase, clock) for name in shown]
            cells.append(" / ".join(f"{other / own:.2f}" if other and own else "-" for own in mine))
        table.add_row(case["name"], *cells)
    return table


def _has(report: Report, providers: list[str]) -> bool:
    return any(case["providers"].get(name, {}).get("phases") for case in report["cases"] for name in providers)


def scaling(report: Report) -> Iterator[str]:
    """On a CPU: how much faster ours are on more threads, and what the machine gives."""
    said = False
    for phase in PHASES:
        for name in OURS:
            gains = []
            for case in report["cases"]:
                one, two = (time_of(case, name, f"{phase}, {threads}") for threads in ("1 thread", "2 threads"))
                if one and two and not is_disturbed(report, case, f"{phase}, 2 threads"):
                    gains.append(one / two)
            if gains:
                said = True
                yield f"{name}, {phase}: two threads are {geometric_mean(gains):.2f} times as fast as one"
    if said:
        for name, gain in (report.get("gains of two threads") or {}).items():
            yield f"this machine, a {name}: two threads are {gain:.2f} times as fast as one"


def hot_row(report: Report) -> Iterator[str]:
    """What it costs that half of all ids are one row."""
    cases = {case["name"]: case for case in report["cases"]}
    if {"hot_row", "all_unique"} <= cases.keys():
        for phase in PHASES:
            for name in cases["hot_row"]["providers"]:
                hot, unique = (device_time(cases[case], name, phase) for case in ("hot_row", "all_unique"))
                if hot and unique:
                    yield f"{name}, {phase}: one hot row costs {hot / unique:.2f} times as much as no id twice"
