"""Draws `docs/pictures/speed.png` from the recorded runs of `collection.py`: how much faster than one bag per table.

python benchmarks/plot.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
RUNS = {"CPU, 2 cores": "cpu-collection.json", "NVIDIA H200": "h200-collection.json"}


def main() -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
    for axis, (title, name) in zip(axes, RUNS.items(), strict=True):
        cases = json.loads((ROOT / "benchmarks/results" / name).read_text())["cases"]
        places = range(len(cases))
        for shift, key, label in ((-0.2, "forward ratio", "forward"), (0.2, "train ratio", "training step")):
            bars = axis.bar([place + shift for place in places], [case[key] for case in cases], 0.38, label=label)
            axis.bar_label(bars, fmt="%.1f", fontsize=8)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(list(places), [str(case["ids a bag"]) for case in cases])
        axis.set_xlabel("ids a bag")
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("times as fast as\ntorch, table by table")
    axes[0].set_ylim(0, 9.5)
    axes[0].legend(fontsize=8, loc="upper left", ncols=2)
    figure.savefig(ROOT / "docs/pictures/speed.png", dpi=120)


if __name__ == "__main__":
    main()
