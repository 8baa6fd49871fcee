"""The training loop: batches in order, two optimizers, evaluations on the way, checkpoints, and a clean way to stop."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..data.schema import Batch, DataError, Dataset
from .checkpoints import Parts, Progress, load_run, save_run
from .clock import StepClock
from .inputs import to_torch
from .metrics import Quality, evaluate
from .settings import Settings

EVALUATION_BATCH = 8192
REPORT_EVERY = 10
STREAM_EVALUATION = 1000
"""Steps between evaluations where the number of all steps is unknown."""


class Interrupted(Exception):
    """The run was asked to stop, and has saved itself."""


@dataclass(frozen=True)
class Report:
    """Sent every few steps to whoever watches. `quality` only after an evaluation."""

    step: int
    steps: int | None
    loss: float
    rows_per_second: float
    quality: Quality | None = None


Watcher = Callable[[Report], None]


class Trainer:
    """Trains one model on one data set, in `folder`.

    Args:
        model: has a part `embeddings` with `make_optimizer()`; called with ids and numbers it gives logits.
        dataset: gives the batches.
        settings: all else.
        folder: where checkpoints go.
        watch: called with a `Report` every few steps.
    """

    def __init__(
        self, model: nn.Module, dataset: Dataset, settings: Settings, folder: Path, watch: Watcher | None = None
    ) -> None:
        self.model, self.dataset, self.settings, self.folder = model, dataset, settings, folder
        self.device = torch.device(settings.device)
        embeddings: Any = model.embeddings
        dense = [value for name, value in model.named_parameters() if not name.startswith("embeddings.")]
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "embeddings": embeddings.make_optimizer(),
            "dense": torch.optim.Adam(dense, lr=settings.learning_rate),
        }
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers.values()]
        self.parts = Parts(model, self.optimizers, Progress())
        self.clock = StepClock(self.device)
        self._watch = watch or (lambda report: None)
        self._loss = nn.BCEWithLogitsLoss()
        self._pending: list[torch.Tensor] = []
        self._stop = False

    # --- the run ---------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Continues from the checkpoint in the folder; see `load_run`."""
        load_run(self.folder / "checkpoint", self.parts, self.settings)
        self.clock.steps = self.parts.progress.times

    def train(self) -> Quality:
        """Makes all steps that are left; returns the quality on the held-out rows after the last.

        Raises:
            Interrupted: after Ctrl-C, once the step under way is done and saved.
        """
        progress = self.parts.progress
        self.model.train()
        with self._watching_for_interrupt():
            while not progress.finished:
                self._epoch()
                progress.epoch, progress.position = progress.epoch + 1, 0
                progress.finished = progress.finished or progress.epoch >= self.settings.epochs
            self._collect()
            if not progress.curve or progress.curve[-1]["step"] != progress.step:
                self._evaluate()
            self._save()
        last = progress.curve[-1]
        return Quality(last["auc"], last["log_loss"])

    def _epoch(self) -> None:
        settings, progress = self.settings, self.parts.progress
        batches = self.dataset.train_batches(settings.batch_size, settings.seed, progress.epoch, progress.position)
        began = time.perf_counter()
        while True:
            if self._stop:
                self._save()
                raise Interrupted(f"stopped after step {progress.step}; continue with --resume")
            if not self.step(batches):
                return
            progress.seconds += time.perf_counter() - began
            if progress.step % REPORT_EVERY == 0:
                self._collect()
            if settings.max_steps is not None and progress.step >= settings.max_steps:
                progress.finished = True
                return
            if progress.step % self._evaluate_every() == 0:
                self._collect()
                self._evaluate()
            if settings.checkpoint_every and progress.step % settings.checkpoint_every == 0:
                self._save()
            # neither evaluation nor saving is training
            began = time.perf_counter()

    def step(self, batches: Iterator[Batch]) -> bool:
        """Makes one step with the next batch; False if there is none."""
        progress, clock = self.parts.progress, self.clock
        clock.start()
        batch = next(batches, None)
        if batch is None:
            return False
        if len(batch) < 2:
            raise DataError("training needs at least 2 rows in a batch, got 1: batch normalisation compares them")
        self._set_rates()
        rows = to_torch(batch, self.device)
        clock.mark()
        loss = self._loss(self.model(rows.inputs, rows.numeric), rows.labels)
        clock.mark()
        loss.backward()
        clock.mark()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
            clock.mark()
        self._pending.append(loss.detach())
        progress.step += 1
        progress.position += 1
        return True

    # --- rates, reports, evaluations -------------------------------------------------------------------------------

    def steps(self) -> int | None:
        """All steps of the run, or None where only the end of the data can tell."""
        each = self.dataset.train_steps(self.settings.batch_size)
        total = None if each is None else each * self.settings.epochs
        limit = self.settings.max_steps
        return limit if total is None else total if limit is None else min(total, limit)

    def _set_rates(self) -> None:
        total = self.steps()
        if self.settings.schedule == "constant" or total is None:
            return
        # never quite 0, by which FTRL would divide
        factor = max(total - self.parts.progress.step, 1) / total
        for optimizer, rates in zip(self.optimizers.values(), self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def _evaluate_every(self) -> int:
        total = self.steps()
        return STREAM_EVALUATION if total is None else max(1, total // self.settings.evaluations)

    def _collect(self) -> None:
        """Reads losses and times that may still be on their way from the GPU, and reports."""
        progress = self.parts.progress
        self.clock.collect()
        if self._pending:
            progress.losses += torch.stack(self._pending).tolist()
            self._pending = []
        if progress.losses:
            recent = progress.losses[-REPORT_EVERY:]
            rate = progress.step * self.settings.batch_size / max(progress.seconds, 1e-9)
            self._watch(Report(progress.step, self.steps(), sum(recent) / len(recent), rate))

    def _evaluate(self) -> None:
        progress = self.parts.progress
        quality = evaluate(self.model, self.dataset.test_batches(EVALUATION_BATCH), self.device)
        loss = sum(progress.losses) / len(progress.losses) if progress.losses else float("nan")
        progress.losses = []
        progress.curve.append({"step": progress.step, "loss": loss, "auc": quality.auc, "log_loss": quality.log_loss})
        rate = progress.step * self.settings.batch_size / max(progress.seconds, 1e-9)
        self._watch(Report(progress.step, self.steps(), loss, rate, quality))

    def _save(self) -> None:
        self._collect()
        self.parts.progress.times = self.clock.steps
        save_run(self.folder / "checkpoint", self.parts, self.settings)

    @contextlib.contextmanager
    def _watching_for_interrupt(self) -> Iterator[None]:
        """The first Ctrl-C lets the step under way end; the second is as hard as ever."""

        def ask(_number: int, _frame: FrameType | None) -> None:
            self._stop = True
            signal.signal(signal.SIGINT, previous)

        try:
            previous = signal.signal(signal.SIGINT, ask)
        except ValueError:
            # not the main thread, where Python delivers signals
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
