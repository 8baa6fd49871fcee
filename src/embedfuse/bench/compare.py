"""What moved between two revisions: reports of the same suite, several of each, taken in turn on one machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .providers import OURS

THRESHOLD = 0.05
CLOCKS = ("device", "wall", "host")


@dataclass(frozen=True)
class Change:
    """One clock of one phase of one case, in milliseconds: the least median of the runs of each revision."""

    case: str
    provider: str
    phase: str
    clock: str
    old: float
    new: float
    clear: bool  # the quartiles of no run of the one reach those of a run of the other

    @property
    def ratio(self) -> float:
        """Above 1: it became slower."""
        return self.new / self.old

    def moved(self, threshold: float = THRESHOLD) -> bool:
        """Whether it changed by more than noise."""
        return self.clear and not 1 / (1 + threshold) <= self.ratio <= 1 + threshold


Key = tuple[str, str, str, str]


def _samples(report: dict[str, Any]) -> Iterator[tuple[Key, dict[str, float]]]:
    for case in report["cases"]:
        for provider in OURS:
            for phase, own in case["providers"].get(provider, {}).get("phases", {}).items():
                for clock in CLOCKS:
                    if clock in own:
                        yield (case["name"], provider, phase, clock), own[clock]


def changes(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[Change]:
    """Everything that all reports have, in their order.

    Raises:
        ValueError: reports of different suites, machines or scales.
    """
    for name in ("suite", "scale"):
        if len({str(report[name]) for report in (*old, *new)}) != 1:
            raise ValueError(f"reports must be of one `{name}`, got {[report[name] for report in (*old, *new)]}")
    processors = {report["machine"]["processor"] for report in (*old, *new)}
    if len(processors) != 1:
        raise ValueError(f"reports must be of one machine, got {sorted(processors)}")
    before = [dict(_samples(report)) for report in old]
    after = [dict(_samples(report)) for report in new]
    found = []
    for key in before[0]:
        olds, news = ([run[key] for run in runs if key in run] for runs in (before, after))
        if len(olds) == len(before) and len(news) == len(after):
            clear = min(s["q1"] for s in news) > max(s["q3"] for s in olds) or max(s["q3"] for s in news) < min(
                s["q1"] for s in olds
            )
            least, now = (min(sample["median"] for sample in samples) for samples in (olds, news))
            found.append(Change(key[0], key[1], key[2], key[3], least, now, clear))
    return found


def lost(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[str]:
    """Cases that had a speed and have none now, or the other way round."""
    before, after = ({" ".join(key[:3]) for run in runs for key, _ in _samples(run)} for runs in (old, new))
    gone = [f"{key}: no speed any more" for key in sorted(before - after)]
    return gone + [f"{key}: has a speed now" for key in sorted(after - before)]


def lines(found: Sequence[Change], threshold: float = THRESHOLD) -> Iterator[str]:
    """What moved, the slower first, and a summary."""
    moved = sorted((change for change in found if change.moved(threshold)), key=lambda change: -change.ratio)
    for change in moved:
        word = "slower" if change.ratio > 1 else "faster"
        factor = max(change.ratio, 1 / change.ratio)
        yield (
            f"{factor:.2f}x {word}: {change.case} {change.provider} {change.phase}, {change.clock}: "
            f"{change.old:.4g} -> {change.new:.4g} ms"
        )
    slower = sum(change.ratio > 1 for change in moved)
    yield f"{len(found)} times compared, {slower} slower and {len(moved) - slower} faster by more than {threshold:.0%}"
