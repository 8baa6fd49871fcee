"""Step times of two models that can be compared: both make each step in turn, so that whatever slows one slows both."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..data.schema import Batch, Dataset
from .clock import WARM_UP
from .inputs import to_torch
from .loop import Trainer
from .settings import Settings

STEPS = 60


@dataclass(frozen=True)
class StepTime:
    """Medians, in milliseconds.

    `phases` alone cannot compare the embeddings: a fused step sums the gradients of rows in its optimizer, an unfused
    one in its backward. `embeddings` is both and the lookup, without the dense layers.
    """

    whole: float
    phases: dict[str, float]
    embeddings: float


def time_in_turn(
    trainers: Mapping[str, Trainer], dataset: Dataset, settings: Settings, watch: Callable[[int], None]
) -> dict[str, StepTime]:
    """Trains every model on the same batches, step by step in turn, and tells what a step of each takes.

    Args:
        trainers: fresh ones, by name; their models are trained on.
        dataset, settings: where batches come from. A short data set is gone through again.
        watch: called with the number of steps made, of twice `STEPS`.
    """
    runs: list[tuple[Trainer, Iterator[Batch], list[float]]] = []
    for trainer in trainers.values():
        trainer.model.train()
        epochs = (dataset.train_batches(settings.batch_size, settings.seed, epoch) for epoch in itertools.count())
        runs.append((trainer, itertools.chain.from_iterable(epochs), []))
    for number in range(2 * STEPS):
        # neither is always first
        for trainer, batches, alone in runs[:: 1 if number % 2 else -1]:
            if number < STEPS:
                trainer.step(batches)
            else:
                alone.append(_embeddings_alone(trainer, next(batches)))
        watch(number + 1)
    for trainer in trainers.values():
        trainer.clock.collect()
    return {
        name: StepTime(
            trainer.clock.median_step(), trainer.clock.medians(), round(statistics.median(alone[WARM_UP:]), 4)
        )
        for name, (trainer, _, alone) in zip(trainers, runs, strict=True)
    }


def _embeddings_alone(trainer: Trainer, batch: Batch) -> float:
    """Milliseconds of a lookup, its backward and the tables' update."""
    embeddings: Any = trainer.model.embeddings
    optimizer = trainer.optimizers["embeddings"]
    rows = to_torch(batch, trainer.device)
    _wait(trainer.device)
    began = time.perf_counter()
    out = embeddings(rows.inputs)
    out.backward(torch.full_like(out, 1e-3))
    optimizer.step()
    optimizer.zero_grad()
    _wait(trainer.device)
    return (time.perf_counter() - began) * 1000.0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
