"""The picture of a run of `embedfuse lm`: how both models learnt, what they cost, and how the memory was used."""

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ..torch.memory.usage import draw_usage

COLOURS = {"feed-forward": "#c2571a", "memory": "#0b6e4f"}
INK = "#333333"


def draw(metrics: dict[str, Any], counts: Tensor, path: Path) -> None:
    """Writes the picture of what `metrics.json` holds, and of how often each slot was read."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.2), layout="constrained")
    curves, use = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _draw_curves(curves, metrics)
    stats = metrics["models"]["memory"]["usage"]
    draw_usage(use, counts, f"{stats['num_slots']:,} slots", COLOURS["memory"])
    use.set(title=f"Memory: {stats['used']:.0%} of slots read, {stats['top1_used']:.0%} as the best")
    use.legend(frameon=False, loc="lower right")
    settings = metrics["settings"]
    figure.suptitle(
        f"Next byte of Python's standard library: {settings['layers']} layers of width {settings['dim']}, memory in "
        f"layer {settings['memory_layer']}", color=INK,
    )  # fmt: skip
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    figure.savefig(part, dpi=130, format="png")
    part.replace(path)


def _draw_curves(axes: Any, metrics: dict[str, Any]) -> None:
    for kind, model in metrics["models"].items():
        steps = [point["step"] for point in model["curve"]]
        bits = [point["bits_per_byte"] for point in model["curve"]]
        label = (
            f"{kind}: {bits[-1]:.3f} ({model['parameters'] / 1e6:.1f} M parameters, {model['flops'] / 1e6:.2f} MFLOP)"
        )
        axes.plot(steps, bits, color=COLOURS[kind], marker="o", markersize=4, label=label)
    axes.set(xlabel="step", ylabel="bits per held-out byte", title="Learning curves")
    axes.legend(frameon=False, loc="upper right")
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
