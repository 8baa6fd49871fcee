"""One picture of a run: how the models learnt, and where the time of a step went."""

from pathlib import Path
from typing import Any

from .clock import PHASES

COLOURS = {"fused": "#0b6e4f", "unfused": "#c2571a"}
PHASE_COLOURS = ("#bdbdbd", "#4c78a8", "#72b7b2", "#e45756", "#b279a2")
INK = "#333333"


def draw(metrics: dict[str, Any], path: Path) -> None:
    """Writes the picture of what `metrics.json` holds."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    settings, models = metrics["settings"], metrics["models"]
    figure = Figure(figsize=(11.5, 4.4), layout="constrained")
    curves, times = figure.subplots(1, 2, width_ratios=(1.1, 1))
    _draw_curves(curves, metrics)
    _draw_times(times, models)
    place = settings["device"]
    if place == "cpu":
        place += f" with {metrics['machine']['threads']} thread(s)"
    figure.suptitle(f"{settings['model']} on {settings['data']}, batch {settings['batch_size']}, {place}", color=INK)
    figure.savefig(path, dpi=130)


def _draw_curves(axes: Any, metrics: dict[str, Any]) -> None:
    for kind, model in metrics["models"].items():
        steps = [point["step"] for point in model["curve"]]
        values = [point["auc"] for point in model["curve"]]
        dash = "-" if kind == "fused" else "--"
        axes.plot(steps, values, dash, color=COLOURS[kind], marker="o", markersize=4, label=f"{kind} {values[-1]:.4f}")
    baseline = metrics["logistic_regression"]
    if baseline is not None:
        axes.axhline(
            baseline["auc"], color="#777777", linewidth=1.2, label=f"logistic regression {baseline['auc']:.4f}"
        )
    axes.set(xlabel="step", ylabel="AUC on the held-out rows", title="Learning curves")
    axes.legend(frameon=False, loc="lower right")
    _plain(axes)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


def _draw_times(axes: Any, models: dict[str, Any]) -> None:
    kinds = list(models)
    widest = max(sum(models[kind]["phases"].values()) for kind in kinds)
    left = [0.0] * len(kinds)
    for phase, colour in zip(PHASES, PHASE_COLOURS, strict=True):
        widths = [models[kind]["phases"][phase] for kind in kinds]
        axes.barh(kinds, widths, left=left, color=colour, label=phase, height=0.55)
        for row, width in enumerate(widths):
            if width > 0.07 * widest:
                place = left[row] + width / 2
                axes.text(place, row, f"{width:.2g}", ha="center", va="center", color="white", fontsize=9)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 0.01 * widest, row, f"{total:.3g}", va="center", color=INK)
    axes.set(xlabel="milliseconds (medians)", title="Where a step's time goes", xlim=(0, 1.1 * widest))
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9)
    _plain(axes)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
