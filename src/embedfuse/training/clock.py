"""Where the time of a step goes, without making a GPU wait: events there, the host's clock on a CPU."""

import itertools
import statistics
import time
from typing import Any

import torch

PHASES = ("data", "forward", "backward", "embedding optimizer", "dense optimizer")
WARM_UP = 5
KEPT = 4000


class StepClock:
    """Called with the name of each phase as it ends; keeps the milliseconds of every step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self._waiting: list[list[Any]] = []
        self.steps: list[list[float]] = []

    def start(self) -> None:
        """A step begins."""
        self._marks = [self._now()]

    def mark(self) -> None:
        """The next phase of `PHASES` ends."""
        self._marks.append(self._now())
        if len(self._marks) == len(PHASES) + 1:
            self._waiting.append(self._marks)

    def collect(self) -> None:
        """Reads the steps since the last call; waits for the GPU to have made them."""
        if self._on_gpu and self._waiting:
            self._waiting[-1][-1].synchronize()
        for marks in self._waiting:
            if len(self.steps) < KEPT:
                self.steps.append([self._between(a, b) for a, b in itertools.pairwise(marks)])
        self._waiting = []

    def medians(self) -> dict[str, float]:
        """Milliseconds of each phase, the median over all steps after the first few."""
        steps = self.steps[WARM_UP:] or self.steps
        if not steps:
            return dict.fromkeys(PHASES, 0.0)
        return {
            phase: round(statistics.median(column), 4)
            for phase, column in zip(PHASES, zip(*steps, strict=True), strict=True)
        }

    def median_step(self) -> float:
        """Milliseconds of a whole step, the median."""
        steps = self.steps[WARM_UP:] or self.steps
        return round(statistics.median(map(sum, steps)), 4) if steps else 0.0

    def _now(self) -> Any:
        if self._on_gpu:
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) if self._on_gpu else (second - first) * 1000.0
