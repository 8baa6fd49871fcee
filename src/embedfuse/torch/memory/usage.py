"""How much of a memory is in use, and how evenly."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .addressing import Addressing


@dataclass(frozen=True)
class UsageStats:
    """Of `num_slots` slots.

    Attributes:
        num_slots: how many there are.
        used: the share that was read at least once.
        top1_used: the share that was the best of a head at least once; None if that was not counted.
        kl: Kullback-Leibler divergence of the shares of reads from equal ones: 0 if all slots are read alike, the
            logarithm of `num_slots` if only one is read.
        weighted_kl: the same of the shares of scores; None if scores were not counted.
        gini: Gini coefficient of the shares of reads: near 0 if equal, near 1 if few slots have all.
        hold_50, hold_90, hold_99: the least number of slots that have that percentage of the reads.
    """

    num_slots: int
    used: float
    top1_used: float | None
    kl: float
    weighted_kl: float | None
    gini: float
    hold_50: int
    hold_90: int
    hold_99: int

    def describe(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def usage_counts(ids: Tensor, num_slots: int, weights: Tensor | None = None) -> Tensor:
    """How often each slot is in `ids`, or the sum of its weights; ids below 0 count as absent. float64 `[num_slots]`.

    Equivalent to `torch.bincount(ids[ids >= 0], weights[ids >= 0], minlength=num_slots)`.

    Raises:
        ValueError: `weights` of another shape.
    """
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"`weights` must have the shape of `ids`, {tuple(ids.shape)}, got {tuple(weights.shape)}")
    flat = ids.reshape(-1).long()
    amount = torch.ones_like(flat, dtype=torch.float64) if weights is None else weights.detach().reshape(-1).double()
    counts = torch.zeros(num_slots, dtype=torch.float64, device=ids.device)
    return counts.index_add(0, flat.clamp(min=0), torch.where(flat < 0, 0.0, amount))


def usage_stats(counts: Tensor, weights: Tensor | None = None, top1: Tensor | None = None) -> UsageStats:
    """Statistics of counts by slot.

    Args:
        counts: how often each slot was read, `[num_slots]`.
        weights: the sum of the (absolute) scores it was read with.
        top1: how often it was the best of a head.

    Raises:
        ValueError: not one count a slot, or nothing counted.
    """
    for name, given in (("counts", counts), ("weights", weights), ("top1", top1)):
        if given is not None and (given.dim() != 1 or given.shape != counts.shape):
            raise ValueError(f"`{name}` must have one entry a slot, [num_slots], got shape {tuple(given.shape)}")
    total = float(counts.sum())
    if not total > 0:
        raise ValueError("`counts` must not all be 0: record while the model reads its memory")
    shares = (counts.double() / total).sort(descending=True).values.cpu()
    cumulated = shares.cumsum(0)
    slots = shares.numel()
    # what the largest shares leave out is what the smallest ones have
    rising = shares.flip(0).cumsum(0)
    hold = [min(slots, int((cumulated < share - 1e-12).sum()) + 1) for share in (0.5, 0.9, 0.99)]
    return UsageStats(
        slots, float((counts > 0).sum()) / slots, None if top1 is None else float((top1 > 0).sum()) / slots,
        _divergence(counts), None if weights is None else _divergence(weights), float(1 - 2 * rising.mean()), *hold,
    )  # fmt: skip


def _divergence(counts: Tensor) -> float:
    shares = counts.double() / counts.double().sum().clamp(min=1e-300)
    return math.log(shares.numel()) + float(torch.xlogy(shares, shares).sum())


class SlotUse:
    """What one memory was asked for, while it was recorded.

    Attributes:
        counts, weights, top1: see `usage_stats`.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.counts, self.weights, self.top1 = (
            torch.zeros(num_slots, dtype=torch.float64, device=device) for _ in range(3)
        )

    @torch.no_grad()
    def add(self, scores: Tensor, ids: Tensor) -> None:
        """Counts a call: ids `[..., topk]`, the best first; scores likewise, or with slices in front."""
        slots = self.counts.numel()
        scores = scores.abs().sum(0) if scores.dim() > ids.dim() else scores.abs()
        self.counts += usage_counts(ids, slots)
        self.weights += usage_counts(ids, slots, scores)
        self.top1 += usage_counts(ids[..., :1], slots)

    def stats(self) -> UsageStats:
        """Statistics of all calls so far."""
        return usage_stats(self.counts, self.weights, self.top1)


@contextlib.contextmanager
def record_usage(model: nn.Module) -> Iterator[dict[str, SlotUse]]:
    """Counts which slots the memories of `model` read, by the name of the memory, until the block ends.

    Raises:
        ValueError: there is no memory in `model`.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, Addressing)}
    if not found:
        raise ValueError(f"`model` must contain a memory layer, got {type(model).__name__} without one")
    uses: dict[str, SlotUse] = {}
    handles = []
    for name, module in found.items():
        use = uses[name.rpartition(".")[0]] = SlotUse(module.num_slots, next(module.parameters()).device)
        handles.append(module.register_forward_hook(_counter(use)))
    try:
        yield uses
    finally:
        for handle in handles:
            handle.remove()


def _counter(use: SlotUse) -> Any:
    def count(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        use.add(*output)

    return count


def plot_usage(uses: Mapping[str, SlotUse], path: Path | str) -> None:
    """Draws, for each memory, which part of all reads its most-read slots have; writes a picture.

    Raises:
        ImportError: matplotlib is not installed; `pip install 'embedfuse[cli]'` brings it.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ImportError(
            "`plot_usage` needs matplotlib, which is not installed: run  pip install 'embedfuse[cli]'  (in a checkout: "
            "pip install '.[cli]')"
        ) from error
    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes: Any = figure.subplots()
    for name, use in uses.items():
        draw_usage(axes, use.counts, name or "memory")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


def draw_usage(axes: Any, counts: Tensor, label: str, colour: str | None = None) -> None:
    """The curve of `plot_usage`, into a matplotlib axes."""
    shares = (counts / counts.sum().clamp(min=1e-300)).sort(descending=True).values.cumsum(0).cpu()
    at = torch.linspace(0, shares.numel() - 1, min(shares.numel(), 500), device="cpu").long()
    axes.plot((100.0 * (at + 1) / shares.numel()).tolist(), (100.0 * shares[at]).tolist(), label=label, color=colour)
    axes.plot([0, 100], [0, 100], color="#bbbbbb", linewidth=0.8, linestyle=":")
    axes.set(xlabel="slots, most read first (%)", ylabel="part of all reads (%)", xlim=(0, 100), ylim=(0, 100))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
