"""Step times of two models that can be compared: both make each step in turn, so that whatever slows one slows both."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..data.schema import Dataset
from .loop import Trainer
from .settings import Settings

STEPS = 60


@dataclass(frozen=True)
class StepTime:
    """Medians, in milliseconds."""

    whole: float
    phases: dict[str, float]


def time_in_turn(
    trainers: Mapping[str, Trainer], dataset: Dataset, settings: Settings, watch: Callable[[int], None]
) -> dict[str, StepTime]:
    """Trains every model on the same batches, step by step in turn, and tells what a step of each takes.

    Args:
        trainers: fresh ones, by name; their models are trained on.
        dataset, settings: where batches come from. A short data set is gone through again.
        watch: called with the number of steps made.
    """
    runs = []
    for trainer in trainers.values():
        trainer.model.train()
        epochs = (dataset.train_batches(settings.batch_size, settings.seed, epoch) for epoch in itertools.count())
        runs.append((trainer, itertools.chain.from_iterable(epochs)))
    for number in range(STEPS):
        # neither is always first
        for trainer, batches in runs[:: 1 if number % 2 else -1]:
            trainer.step(batches)
        watch(number + 1)
    for trainer in trainers.values():
        trainer.clock.collect()
    return {name: StepTime(trainer.clock.median_step(), trainer.clock.medians()) for name, trainer in trainers.items()}
