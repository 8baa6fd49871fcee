"""Tables from a report of whole models."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from .reading import time_of
from .report import heading

GRAPHS = "compiled, in a CUDA graph"


def show_models(report: dict[str, Any], console: Console) -> None:
    """Prints a report of suite `models`."""
    console.print(heading(report), highlight=False)
    console.print(_times(report))
    console.print(_parts(report))
    for line in _notes(report):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _times(report: dict[str, Any]) -> Table:
    table = Table(title="A training step (milliseconds, medians; wall)", title_justify="left")
    table.add_column("case")
    table.add_column("embeddings")
    for column in ("eager", "compiled", GRAPHS, "embeddings alone", "added, eager", "in a graph", "host", "launches"):
        table.add_column(column, justify="right")
    for case in report["cases"]:
        for number, (name, entry) in enumerate(case["providers"].items()):
            if not entry.get("phases"):
                continue
            table.add_row(
                "" if number else case["name"], name, _cell(time_of(case, name, "eager")),
                _cell(time_of(case, name, "compiled")), _cell(time_of(case, name, "compiled", "graph, wall")),
                _cell(time_of(case, name, "embeddings alone")), _cell(added(case, name, "eager", "wall")),
                _cell(added(case, name, "compiled", "graph, wall")), _cell(time_of(case, name, "eager", "host")),
                str(entry["phases"].get("eager", {}).get("launches", "")),
            )  # fmt: skip
    return table


def added(case: dict[str, Any], name: str, mode: str, clock: str) -> float | None:
    """Milliseconds that tables add to the dense net: the median of each round's differences, if those were kept."""
    own, dense = time_of(case, name, mode, clock), time_of(case, "none", mode, clock)
    if own is None or dense is None or name == "none":
        return None
    found = time_of(case, name, mode, f"added, {clock}")
    return own - dense if found is None else found


def _parts(report: dict[str, Any]) -> Table:
    table = Table(title="Where an eager step's time goes (milliseconds, medians)", title_justify="left")
    table.add_column("case")
    table.add_column("embeddings")
    for column in ("forward", "backward", "embedding optimizer", "dense optimizer"):
        table.add_column(column, justify="right")
    for case in report["cases"]:
        for name, entry in case["providers"].items():
            if "breakdown" in entry:
                table.add_row(case["name"], name, *(_cell(value) for value in entry["breakdown"].values()))
    return table


def _notes(report: dict[str, Any]) -> Iterator[str]:
    for case in report["cases"]:
        best = [time for name in ("torch-dense", "torch-sparse") if (time := time_of(case, name, "eager"))]
        ours = time_of(case, "embedfuse", "eager")
        if best and ours:
            yield f"{case['name']}: {min(best) / ours:.2f} times as fast as the better form of torch.nn.EmbeddingBag"
        for name, entry in case["providers"].items():
            reasons = {key: value for key, value in entry.items() if key.startswith(("wrong", "unsupported", "error"))}
            for key, value in reasons.items():
                yield f"{case['name']}, {name}: {key}: {value}"
            for phase, own in entry.get("phases", {}).items():
                if "error" in own:
                    yield f"{case['name']}, {name}, {phase}: {own['error']}"
                if phase == "compiled" and "no graph" in own:
                    yield f"{case['name']}, {name}: no CUDA graph: {own['no graph']}"
    for entry in report["providers"].items():
        if entry[1]["reason"]:
            yield f"{entry[0]}: {entry[1]['reason']}"
    for missing in report["not run"]:
        yield f"{missing['name']}: {missing['reason']}"
