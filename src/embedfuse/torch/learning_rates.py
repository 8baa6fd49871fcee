"""The learning rates of a step: numbers in `param_groups`, which schedulers write, or what functions give."""

import warnings
from collections.abc import Sequence
from typing import Any

from ..optim import Optimizer
from .state import ordinary_tensors


def rates_of_tables(rates: list[float], groups: Sequence[int]) -> list[float]:
    """The rate of each table, given its group."""
    return rates * len(groups) if len(rates) == 1 else [rates[group] for group in groups]


class LearningRates:
    """Of the groups of a `FusedOptimizer`, one for each of its optimizers.

    Attributes:
        functions: the optimizers whose rate is a function, with their numbers.
    """

    def __init__(self, optimizers: Sequence[Optimizer], groups: Sequence[dict[str, Any]]) -> None:
        self.functions = [(number, one) for number, one in enumerate(optimizers) if callable(one.learning_rate)]
        self._warned = False
        self.accept(groups)

    def accept(self, groups: Sequence[dict[str, Any]]) -> None:
        """Takes the rates that groups have as written by us, as after loading."""
        self._written = [group["lr"] for group in groups]

    def now(self, groups: Sequence[dict[str, Any]]) -> list[float]:
        """The rates of a step, those of functions written to `"lr"`; warns once if somebody else had written there."""
        for number, optimizer in self.functions:
            group = groups[number]
            if not self._warned and group["lr"] != self._written[number]:
                self._warned = True
                warnings.warn(
                    f"`learning_rate` of {type(optimizer).__name__} is a function, which decides at each step: what "
                    'was written to its "lr" in `param_groups`, as by a scheduler, is lost. For schedulers give a '
                    "number",
                    stacklevel=2,
                )
            with ordinary_tensors():
                group["lr"] = self._written[number] = optimizer.current_learning_rate()
        return [float(group["lr"]) for group in groups]
