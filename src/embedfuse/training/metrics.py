"""How good a ranking is: AUC and log loss, exact, in float64."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..data.schema import Batch
from .inputs import to_torch


class DivergedError(ArithmeticError):
    """A model's scores are no numbers any more."""


@dataclass(frozen=True)
class Quality:
    """Of one model on the held-out rows."""

    auc: float
    log_loss: float


def auc(labels: NDArray[np.floating], scores: NDArray[np.floating]) -> float:
    """The chance that a positive row scores above a negative one, ties counting one half; NaN without both kinds.

    Equivalent to `np.mean([(p > n) + (p == n) / 2 for p in positives for n in negatives])`, by ranks.

    Raises:
        DivergedError: a score is NaN.
    """
    if np.isnan(scores).any():
        raise DivergedError("the model scores NaN: the training has diverged, try a lower learning rate")
    positive = labels > 0.5
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # equal scores share the mean of their ranks
    rank = np.cumsum(counts) - (counts - 1) / 2
    return float((rank[place][positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def log_loss(labels: NDArray[np.floating], logits: NDArray[np.floating]) -> float:
    """Mean cross entropy of logits, as `torch.nn.functional.binary_cross_entropy_with_logits`."""
    exact = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, exact) - labels * exact))


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Quality:
    """Scores rows in evaluation mode; the model is left in the mode it was in."""
    was_training = model.training
    model.eval()
    logits, labels = [], []
    for batch in batches:
        rows = to_torch(batch, device)
        logits.append(model(rows.inputs, rows.numeric))
        labels.append(batch.labels)
    model.train(was_training)
    if not logits:
        return Quality(float("nan"), float("nan"))
    scores, truth = torch.cat(logits).float().cpu().numpy(), np.concatenate(labels)
    return Quality(auc(truth, scores), log_loss(truth, scores))
