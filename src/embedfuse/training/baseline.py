"""The baseline: a logistic regression on the same columns, trained well enough to be worth beating."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..data.schema import Batch, Dataset
from ..models.logistic import LogisticRegression
from .inputs import to_torch
from .loop import EVALUATION_BATCH
from .metrics import evaluate
from .settings import Settings

PENALTIES = (1e-5, 3e-5, 1e-4)
"""Of the squared weights of ids; the one that does best on the validation rows is taken."""
EPOCHS = 5
RATE = 0.02
LARGEST_BATCH, FEWEST_STEPS = 4096, 60
"""Batches as large as leave so many steps to an epoch: the problem is convex and small."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Baseline:
    """The regression's result and what it was chosen by."""

    auc: float
    log_loss: float
    milliseconds_per_step: float
    seconds: float
    penalty: float


def train_baseline(dataset: Dataset, settings: Settings, watch: Callable[[str], None]) -> Baseline:
    """Trains the regression on all training rows with the best penalty, and scores the held-out rows.

    Each penalty is tried on the training rows without the validation rows. Data read in a stream gets one pass with
    the middle penalty instead, since its length is unknown.
    """
    began = time.perf_counter()
    steps = dataset.train_steps(settings.batch_size)
    if steps is not None:
        larger = min(LARGEST_BATCH, steps * settings.batch_size // FEWEST_STEPS)
        settings = dataclasses.replace(settings, batch_size=max(settings.batch_size, larger))
    if steps is None:
        penalty, epochs = PENALTIES[1], 1
    else:
        epochs = EPOCHS
        trials = []
        for penalty in PENALTIES:
            watch(f"penalty {penalty:g}")
            model, _ = _fit(dataset, settings, penalty, epochs, validate=True)
            quality = evaluate(model, dataset.validation_batches(EVALUATION_BATCH), CPU)
            trials.append((quality.log_loss, penalty))
        penalty = min(trials)[1]
    watch(f"penalty {penalty:g}, all training rows")
    model, milliseconds = _fit(dataset, settings, penalty, epochs, validate=False)
    quality = evaluate(model, dataset.test_batches(EVALUATION_BATCH), CPU)
    return Baseline(quality.auc, quality.log_loss, milliseconds, round(time.perf_counter() - began, 2), penalty)


def _fit(
    dataset: Dataset, settings: Settings, penalty: float, epochs: int, validate: bool
) -> tuple[LogisticRegression, float]:
    """A regression after some epochs of Adam, its rate falling to 0, and the milliseconds of a step."""
    model = LogisticRegression(dataset.schema)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    each = dataset.train_steps(settings.batch_size)
    loss_of = nn.BCEWithLogitsLoss()
    steps, began = 0, time.perf_counter()
    for epoch in range(epochs):
        for batch in _batches(dataset, settings, epoch, validate):
            if each is not None:
                optimizer.param_groups[0]["lr"] = RATE * max(1 - steps / (each * epochs), 0.01)
            rows = to_torch(batch, CPU)
            loss = loss_of(model(rows.inputs, rows.numeric), rows.labels)
            weights = model.embeddings.weights().values()
            optimizer.zero_grad()
            (loss + penalty * torch.stack([weight.square().sum() for weight in weights]).sum()).backward()
            optimizer.step()
            steps += 1
    return model, round((time.perf_counter() - began) * 1000 / max(steps, 1), 3)


def _batches(dataset: Dataset, settings: Settings, epoch: int, validate: bool) -> Iterator[Batch]:
    batches = dataset.train_batches(settings.batch_size, settings.seed, epoch, validating=validate)
    return itertools.islice(batches, settings.max_steps)
