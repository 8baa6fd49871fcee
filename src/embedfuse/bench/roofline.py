"""A picture from a report: bytes that must move against the time they took, beside the line of a plain copy."""

from pathlib import Path
from typing import Any

from .reading import base_of, device_time, is_busy, is_disturbed, phases_of, time_of, version_of

COLOURS = {
    "embedfuse": "#0b6e4f", "embedfuse-backward": "#2f9372", "embedfuse-engine": "#57b894",
    "torch": "#c2571a", "torch-compiled": "#e9a26b",
    "fbgemm": "#34558b", "fbgemm-v2": "#8fa9d6", "tensorflow": "#b279a2", "jax": "#9d755d",
}  # fmt: skip
SHOWN = ("forward", "backward", "train")


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes a PNG with one panel for each phase (on a CPU: of its largest number of threads with times to trust)."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    panels: dict[str, str] = {}
    for phase in phases_of(report):
        title = base_of(phase)
        if title in SHOWN and (title not in panels or _undisturbed(report, phase)):
            panels[title] = phase
    figure = Figure(figsize=(4.6 * max(len(panels), 1), 4.4), layout="constrained")
    for number, (title, phase) in enumerate(panels.items()):
        _panel(figure.add_subplot(1, len(panels), number + 1), report, phase, title)
    own = report["machine"]
    figure.suptitle(f"{own['processor']}, {version_of(report)}, {own['date'][:10]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _undisturbed(report: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [case for case in report["cases"] if not is_disturbed(report, case, phase)]


def _panel(axes: Any, report: dict[str, Any], phase: str, title: str) -> None:
    bandwidth = report["copy bytes per second"]
    lowest, highest = float("inf"), 0.0
    cases = _undisturbed(report, phase) or report["cases"]
    busy = ", machine busy" if any(is_busy(report, case) for case in cases) else ""
    for provider in report["providers"]:
        points = []
        for case in cases:
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
        _label_few(axes, highest / lowest)
        axes.legend(frameon=False, fontsize=7)
    clock = "device" if report["machine"]["device"].startswith("cuda") else "wall"
    axes.set(xlabel="least megabytes to move", ylabel=f"milliseconds ({clock})", title=phase + busy)
    axes.grid(color="#eeeeee", which="both")
    axes.set_axisbelow(True)


def _label_few(axes: Any, span: float) -> None:
    """Labels along x that do not overlap: more of them to a decade where there are few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    labelled = (1.0, 2.0, 5.0) if span < 30 else (1.0, 3.0) if span < 1000 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=labelled))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
