"""Draws `docs/pictures/memory-layers.png`: how a product-key memory finds the rows that a token reads.

python scripts/draw_memory_layer.py
"""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
KEYS, TOPK = 12, 4
GREEN, GREY, LIGHT, INK = "#0b6e4f", "#c9c9c9", "#d8eee4", "#333333"


def main() -> None:
    generator = np.random.default_rng(262)
    first, second = generator.normal(size=(2, KEYS))
    grid = first[:, None] + second[None, :]
    best = np.argsort(-grid, axis=None, kind="stable")[:TOPK]
    scores = np.exp(grid.flat[best] - grid.max())
    figure, axes = pyplot.subplots(1, 4, figsize=(11.5, 3.6), width_ratios=(1, 1.25, 1.25, 1.1), layout="constrained")
    _draw_keys(axes[0], first, second)
    _draw_grid(axes[1], best)
    _draw_staircase(axes[2], first, second, best)
    _draw_rows(axes[3], best, scores / scores.sum())
    figure.savefig(ROOT / "docs/pictures/memory-layers.png", dpi=120)


def _draw_keys(axes: Any, first: Any, second: Any) -> None:
    """Scores of both halves, the best of each in green."""
    for at, (scores, name) in enumerate(((first, "first half"), (second, "second half"))):
        kept = set(np.argsort(-scores)[:TOPK])
        colours = [GREEN if number in kept else GREY for number in range(KEYS)]
        axes.bar(np.arange(KEYS), 0.8 * scores / np.abs([first, second]).max(), 0.8, -2.4 * at, color=colours)
        axes.text(-0.6, 1.0 - 2.4 * at, f"{name} of the query · {KEYS} keys", fontsize=8, color=INK)
    axes.set_ylim(-3.4, 1.4)
    axes.axis("off")
    axes.set_title("1. Score the keys of each half", fontsize=9, color=INK)


def _draw_grid(axes: Any, best: Any) -> None:
    """All slots, the chosen ones in green."""
    chosen = np.zeros(KEYS**2)
    chosen[best] = 1
    axes.pcolormesh(chosen.reshape(KEYS, KEYS), cmap=_colours("#f4f4f4", GREEN), edgecolors="white", linewidth=1)
    _label(axes, "key of the second half", "key of the first half")
    _plain(axes)
    axes.set_title(f"2. {KEYS} × {KEYS} slots: a score is a sum", fontsize=9, color=INK)


def _draw_staircase(axes: Any, first: Any, second: Any, best: Any) -> None:
    """The same with rows and columns in the order of their scores: only the steps can hold the best."""
    rank = np.arange(1, KEYS + 1)
    cells = (np.outer(rank, rank) <= TOPK).astype(float)
    rows, columns = np.argsort(np.argsort(-first)), np.argsort(np.argsort(-second))
    for slot in best:
        cells[rows[slot // KEYS], columns[slot % KEYS]] = 2
    axes.pcolormesh(cells, cmap=_colours("#f4f4f4", LIGHT, GREEN), edgecolors="white", linewidth=1)
    _label(axes, "rank of the second half's key", "rank of the first half's key")
    _plain(axes)
    looked_at = int((np.outer(rank, rank) <= TOPK).sum())
    axes.set_title(f"3. Only {looked_at} of them can be the best {TOPK}", fontsize=9, color=INK)


def _draw_rows(axes: Any, best: Any, weights: Any) -> None:
    """The table, and the rows that are read with their weights."""
    height = 36
    for number in range(height):
        axes.add_patch(pyplot.Rectangle((0, number), 6, 0.8, color="#f0f0f0"))
    for slot, weight in zip(best, weights, strict=True):
        at = slot * height // KEYS**2
        axes.add_patch(pyplot.Rectangle((0, at), 6, 0.8, color=GREEN))
        axes.text(6.3, at + 0.4, f"× {weight:.2f}", va="center", fontsize=8, color=INK)
    axes.set(xlim=(0, 9), ylim=(height, -1))
    axes.axis("off")
    axes.set_title(f"4. Weigh {TOPK} rows of {KEYS**2}, and add", fontsize=9, color=INK)


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8, color=INK)
    axes.set_ylabel(y, fontsize=8, color=INK)


def _colours(*names: str) -> Any:
    return matplotlib.colors.ListedColormap(names)


def _plain(axes: Any) -> None:
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.invert_yaxis()
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
