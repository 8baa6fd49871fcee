"""A picture from a report: bytes that must move against the time they took, beside the line of a plain copy."""

from pathlib import Path
from typing import Any

from .reading import base_of, device_time, phases_of, time_of

COLOURS = {
    "embedfuse": "#0b6e4f", "embedfuse-engine": "#57b894", "torch": "#c2571a", "torch-compiled": "#e9a26b",
    "fbgemm": "#34558b", "fbgemm-v2": "#8fa9d6", "tensorflow": "#b279a2", "jax": "#9d755d",
}  # fmt: skip
SHOWN = ("forward", "backward", "train")


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes a PNG with one panel for each phase (on a CPU: of its largest number of threads)."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    panels = {base_of(phase): phase for phase in phases_of(report) if base_of(phase) in SHOWN}
    figure = Figure(figsize=(4.6 * max(len(panels), 1), 4.4), layout="constrained")
    for number, (title, phase) in enumerate(panels.items()):
        _panel(figure.add_subplot(1, len(panels), number + 1), report, phase, title)
    own = report["machine"]
    figure.suptitle(f"{own['processor']}, embedfuse {own['embedfuse']} at {own['commit']}, {own['date'][:10]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panel(axes: Any, report: dict[str, Any], phase: str, title: str) -> None:
    bandwidth = report["copy bytes per second"]
    lowest, highest = float("inf"), 0.0
    for provider in report["providers"]:
        points = []
        for case in report["cases"]:
            spent = device_time(case, provider, phase) or time_of(case, provider, phase)
            if spent:
                points.append((case["bytes"][title] / 1e6, spent))
        if points:
            moved, spent_all = zip(*points, strict=True)
            axes.scatter(moved, spent_all, s=22, color=COLOURS.get(provider, "#777777"), label=provider, alpha=0.85)
            lowest, highest = min(lowest, *moved), max(highest, *moved)
    if highest:
        ends = [lowest / 1.5, highest * 1.5]
        axes.plot(
            ends, [end * 1e6 / bandwidth * 1e3 for end in ends], color="black", linewidth=1,
            label=f"copy, {bandwidth / 1e9:,.0f} GB/s",
        )  # fmt: skip
        axes.set(xscale="log", yscale="log")
        axes.legend(frameon=False, fontsize=7)
    clock = "device" if report["machine"]["device"].startswith("cuda") else "wall"
    axes.set(xlabel="least megabytes to move", ylabel=f"milliseconds ({clock})", title=phase)
    axes.grid(color="#eeeeee", which="both")
    axes.set_axisbelow(True)
