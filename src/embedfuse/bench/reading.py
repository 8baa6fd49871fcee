"""Numbers out of a report: what its JSON says of a case, a provider and a phase."""

import math
from collections.abc import Iterable
from typing import Any

from .providers import PHASES

Report = dict[str, Any]
MUCH_SLOWER = 5
"""Times; a free core more makes no provider so much slower."""


def phases_of(report: Report) -> list[str]:
    """The phases of a report with their threads, in order."""
    found: dict[str, None] = {}
    for case in report["cases"]:
        for entry in case["providers"].values():
            found |= dict.fromkeys(entry.get("phases", {}))
    order = {phase: number for number, phase in enumerate(PHASES)}
    return sorted(found, key=lambda phase: (order.get(base_of(phase), len(order)), phase))


def base_of(phase: str) -> str:
    """`forward` of `forward, 2 threads`."""
    return phase.split(",")[0] if "ids checked" not in phase else "forward, ids checked"


def is_busy(report: Report, case: Report) -> bool:
    """Whether a CPU had more to do than it has cores, while a case was timed."""
    own = report["machine"]
    return not own["device"].startswith("cuda") and (case.get("load") or 0) > own["cores"]


def is_disturbed(report: Report, case: Report, phase: str) -> bool:
    """Whether times on several threads say more of other work on the machine: all wait for the slowest thread.

    The load lags behind by a minute, so a provider that is much slower on several threads than on one is a sign too.
    """
    if report["machine"]["device"].startswith("cuda") or not phase.endswith(" threads"):
        return False
    alone = phase.rpartition(", ")[0] + ", 1 thread"
    pairs = ((time_of(case, name, phase), time_of(case, name, alone)) for name in case["providers"])
    return is_busy(report, case) or any(several and one and several > MUCH_SLOWER * one for several, one in pairs)


def version_of(report: Report) -> str:
    """Of embedfuse, with the commit if that is known."""
    own = report["machine"]
    return f"embedfuse {own['embedfuse']}" + (f" at {own['commit']}" if own["commit"] else "")


def time_of(case: Report, provider: str, phase: str, clock: str = "wall") -> float | None:
    """Median milliseconds, if they were measured."""
    sample = case["providers"].get(provider, {}).get("phases", {}).get(phase, {}).get(clock)
    return None if sample is None else float(sample["median"])


def device_time(case: Report, provider: str, phase: str) -> float | None:
    """Of the graph, or else of the kernels alone."""
    found = time_of(case, provider, phase, "device")
    if found is None:
        found = case["providers"].get(provider, {}).get("phases", {}).get(phase, {}).get("kernels ms")
    return found


def share_of_copy(report: Report, case: Report, provider: str, phase: str) -> float | None:
    """Least bytes over device time (wall time on a CPU), as a share of the copy's."""
    spent = device_time(case, provider, phase) or time_of(case, provider, phase)
    moved = case["bytes"].get(base_of(phase))
    if not spent or moved is None:
        return None
    return float(moved / (spent * 1e-3) / report["copy bytes per second"])


def better_of(case: Report, providers: Iterable[str], phase: str, clock: str) -> float | None:
    """The least time of several providers."""
    found = [
        device_time(case, name, phase) if clock == "device" else time_of(case, name, phase, clock) for name in providers
    ]
    return min((value for value in found if value is not None), default=None)


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
