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


def baseline_steps(dataset: Dataset, settings: Settings) -> int | None:
    """All steps of `train_baseline`, at most; None for data read in a stream."""
    each = dataset.train_steps(_larger_batches(dataset, settings).batch_size)
    if each is None:
        return None
    limit = settings.max_steps
    return (len(PENALTIES) + 1) * EPOCHS * (each if limit is None else min(each, limit))


def train_baseline(
    dataset: Dataset,
    settings: Settings,
    watch: Callable[[str], None],
    move: Callable[[int], None] = lambda _steps: None,
) -> Baseline:
    """Trains the regression on all training rows with the best penalty, and scores the held-out rows.

    Each penalty is tried on the training rows without the validation rows. Data read in a stream gets one pass with
    the middle penalty instead, since its length is unknown.

    Args:
        dataset, settings: what to learn, and the size of batches.
        watch: called with one line before each of the trainings.
        move: called with the steps made so far, of `baseline_steps`.
    """
    began = time.perf_counter()
    whole = baseline_steps(dataset, settings)
    settings = _larger_batches(dataset, settings)
    # a training without the validation rows is shorter, so each starts where it would if it were not
    each, made = (whole or 0) // (len(PENALTIES) + 1), 0
    if whole is None:
        penalty, epochs = PENALTIES[1], 1
        watch(f"one pass, penalty {penalty:g}")
    else:
        epochs = EPOCHS
        trials = []
        for number, penalty in enumerate(PENALTIES):
            watch(f"fit {number + 1} of {len(PENALTIES) + 1}, penalty {penalty:g}")
            model, _ = _fit(dataset, settings, penalty, epochs, move, number * each, validate=True)
            quality = evaluate(model, dataset.validation_batches(EVALUATION_BATCH), CPU)
            trials.append((quality.log_loss, penalty))
        penalty = min(trials)[1]
        made = len(PENALTIES) * each
        watch(f"fit {len(PENALTIES) + 1} of {len(PENALTIES) + 1}, penalty {penalty:g}")
    model, milliseconds = _fit(dataset, settings, penalty, epochs, move, made, validate=False)
    quality = evaluate(model, dataset.test_batches(EVALUATION_BATCH), CPU)
    return Baseline(quality.auc, quality.log_loss, milliseconds, round(time.perf_counter() - began, 2), penalty)


def _larger_batches(dataset: Dataset, settings: Settings) -> Settings:
    """The settings with batches as large as are good for it."""
    steps = dataset.train_steps(settings.batch_size)
    if steps is None:
        return settings
    larger = min(LARGEST_BATCH, steps * settings.batch_size // FEWEST_STEPS)
    return dataclasses.replace(settings, batch_size=max(settings.batch_size, larger))


def _fit(
    dataset: Dataset,
    settings: Settings,
    penalty: float,
    epochs: int,
    move: Callable[[int], None],
    before: int,
    *,
    validate: bool,
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
            move(before + steps)
    return model, round((time.perf_counter() - began) * 1000 / max(steps, 1), 3)


def _batches(dataset: Dataset, settings: Settings, epoch: int, validate: bool) -> Iterator[Batch]:
    batches = dataset.train_batches(settings.batch_size, settings.seed, epoch, validating=validate)
    return itertools.islice(batches, settings.max_steps)
