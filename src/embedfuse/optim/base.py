"""What every fused optimizer is: hyper-parameters, state slots, and one rule per row.

An optimizer never sees a whole table. It is given a few rows, the gradient of each (already summed over all duplicates
in the batch) and the state of each, and says what they become. Backends do the rest: the order below is theirs, and the
same everywhere.

    g = clip(sum of gradients)          clipvalue
    w = w - decay * w                   weight_decay_factor (times the learning rate, if asked)
    w, slots = rule(w, g, slots)        the optimizer
    w = clip(w)                         clip_weight_min, clip_weight_max
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Literal

from ._check import check_flag, check_interval

COMMON_HYPER = ("learning_rate", "gradient_min", "gradient_max", "decay", "weight_min", "weight_max")
OWN_HYPER = len(COMMON_HYPER)
HYPER_WIDTH = 16
ROUNDING_SEED = HYPER_WIDTH - 1
"""Place of the seed of stochastic rounding; 0 rounds to the nearest. Set by the front, never by an optimizer."""
MAX_SLOTS = 2


@dataclass(frozen=True)
class Slot:
    """One piece of state: `per="element"` is shaped like the table, `per="row"` holds one number a row."""

    name: str
    per: Literal["row", "element"]
    initial: float = 0.0


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimizers. Immutable: a table's optimizer is part of its configuration.

    All but an optimizer's own arguments and `learning_rate` are given by name.

    Args:
        learning_rate: a number ≥ 0, or a function of no arguments called once a step.
        clip_weight_min: lower bound of a row's elements after the update.
        clip_weight_max: upper bound of a row's elements after the update.
        weight_decay_factor: decoupled decay of touched rows, before the gradient step: `w -= factor * w`.
        multiply_weight_decay_factor_by_learning_rate: decay by `factor * learning_rate` instead.
        clipvalue: bound of the summed row gradient, elementwise: `c` for [-c, c], or a pair `(low, high)` of which
            either may be None.
        use_gradient_accumulation: sum all contributions to a row, then step once (True); or step once for each, in
            the order of the batch (False).
    """

    learning_rate: float | Callable[[], float] = 0.001
    _: KW_ONLY
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clipvalue: float | tuple[float | None, float | None] | None = None
    use_gradient_accumulation: bool = True

    native: ClassVar[str | None] = None
    """Name of the rule in the native CPU engine; None sends CPU rows through `update`."""
    rule: ClassVar[Any] = None
    """The Triton form of `update`: `rule(w, g, s0, s1, p_hyper, step, dim, mask) -> (w, s0, s1)` on float32 blocks.

    `w`, `g` and `mask` are `[R, D]` blocks, `s0` and `s1` `[R, D]` or `[R, 1]` as the slot says. `p_hyper` points at
    the float64 hyper-parameters of the table, and `step` and `dim` are numbers; or all three are `[R, 1]`, one a row.
    """
    slot_kinds: ClassVar[tuple[Literal["row", "element"], ...]] = ()
    """`per` of each slot, known without an instance."""

    def __post_init__(self) -> None:
        if not callable(self.learning_rate):
            check_interval("learning_rate", self.learning_rate, "[0, inf)", "or use a function of no arguments")
        self._check_clipvalue()
        self._check_weight_bounds()
        if self.weight_decay_factor is not None:
            way_out = "a negative factor would make the rows grow; use None for no decay"
            check_interval("weight_decay_factor", self.weight_decay_factor, "[0, inf)", way_out)
        if self.multiply_weight_decay_factor_by_learning_rate is not None:
            name = "multiply_weight_decay_factor_by_learning_rate"
            check_flag(name, self.multiply_weight_decay_factor_by_learning_rate)
        check_flag("use_gradient_accumulation", self.use_gradient_accumulation)
        if not self.use_gradient_accumulation and (self.dense or self.clipvalue is not None):
            reason = "dense steps" if self.dense else f"`clipvalue={self.clipvalue!r}`"
            raise ValueError(
                f"`use_gradient_accumulation` must be True with {reason}, which need the sum of a row's gradients, "
                "got False: set it to True"
            )

    def _check_clipvalue(self) -> None:
        pair = self.clipvalue if isinstance(self.clipvalue, tuple) else (self.clipvalue,)
        if isinstance(self.clipvalue, tuple) and len(pair) != 2:
            raise ValueError(f"`clipvalue` must be a number or a pair, got {self.clipvalue!r}: use (low, high)")
        for bound in pair:
            if bound is not None:
                check_interval("clipvalue", bound, "[-inf, inf]", "use a number or (low, high), None for no bound")
        low, high = self.gradient_bounds()
        if low > high:
            raise ValueError(
                f"`clipvalue` must not be an empty range, got {self.clipvalue!r}: use a positive number or (low, high)"
            )

    def _check_weight_bounds(self) -> None:
        for name, value in (("clip_weight_min", self.clip_weight_min), ("clip_weight_max", self.clip_weight_max)):
            if value is not None:
                check_interval(name, value, "[-inf, inf]", "use a number, or None for no bound")
        low, high = self.weight_bounds()
        if low > high:
            raise ValueError(
                f"`clip_weight_min` must not exceed `clip_weight_max`, got {self.clip_weight_min} and "
                f"{self.clip_weight_max}: swap them"
            )

    # --- what an optimizer defines -------------------------------------------------------------------------------

    def slots(self) -> tuple[Slot, ...]:
        """The state this optimizer keeps, at most `MAX_SLOTS` pieces."""
        return ()

    @property
    def dense(self) -> bool:
        """Whether a step moves every row, with gradient 0 where not looked up; else only the rows in the batch."""
        return False

    def kernel_class(self) -> "type[Optimizer]":
        """The class whose `native`, `rule`, `slot_kinds` and `update` do this optimizer's work.

        Its own class, unless some setting has a leaner form: then an internal class that reads the same `own_hyper`.
        """
        return type(self)

    def own_hyper(self) -> tuple[float, ...]:
        """The optimizer's constants, in the order its `update` and `rule` read them after the common ones."""
        return ()

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        """New rows and new state, in array arithmetic that NumPy, PyTorch and JAX share.

        Args:
            w: rows, `[U, D]`.
            g: gradient of each row, `[U, D]`, clipped.
            slots: state of each row, `[U, D]` or `[U, 1]` as the slot says.
            h: hyper-parameters; `h[i]` is a number or `[U, 1]`. See `COMMON_HYPER`, own ones from `OWN_HYPER` on.
            step: number of this step, from 1; a number or `[U, 1]`.
            xp: the array module (`numpy` or `torch`), for `sqrt`, `where`, `abs`, `exp`, `expm1`, ….
        """
        raise NotImplementedError

    # --- what all share --------------------------------------------------------------------------------------------

    def current_learning_rate(self) -> float:
        """The learning rate as a number; calls it if it is a function."""
        return float(self.learning_rate() if callable(self.learning_rate) else self.learning_rate)

    def gradient_bounds(self) -> tuple[float, float]:
        """`clipvalue` as a pair of numbers."""
        if self.clipvalue is None:
            return -math.inf, math.inf
        if isinstance(self.clipvalue, tuple):
            low, high = self.clipvalue
            return (-math.inf if low is None else float(low), math.inf if high is None else float(high))
        return -float(self.clipvalue), float(self.clipvalue)

    def weight_bounds(self) -> tuple[float, float]:
        """`clip_weight_min` and `clip_weight_max` as numbers."""
        low, high = self.clip_weight_min, self.clip_weight_max
        return (-math.inf if low is None else float(low), math.inf if high is None else float(high))

    def decay(self, learning_rate: float) -> float:
        """The fraction of each touched row that is taken off before the gradient step."""
        factor = self.weight_decay_factor or 0.0
        return factor * learning_rate if self.multiply_weight_decay_factor_by_learning_rate else factor

    def hyper(self, learning_rate: float) -> tuple[float, ...]:
        """All numbers the row rule reads, `HYPER_WIDTH` of them, for one step at `learning_rate`."""
        # a schedule that goes wrong must not reach the tables: there is no way back from NaN
        check_interval("learning_rate", learning_rate, "[0, inf)", "correct the schedule that gave it")
        common = (learning_rate, *self.gradient_bounds(), self.decay(learning_rate), *self.weight_bounds())
        row = tuple(float(value) for value in (*common, *self.own_hyper()))
        return row + (0.0,) * (HYPER_WIDTH - len(row))

    def describe(self) -> dict[str, Any]:
        """Name and hyper-parameters as plain data, for checkpoints and reports; `from_description` reads it back.

        A learning rate that is a function is given as its value now.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["learning_rate"] = self.current_learning_rate()
        return {"name": type(self).__name__, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return float(value) if isinstance(value, Real) and not isinstance(value, (bool, int)) else value


def apply_rule(
    rule: type[Optimizer], w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any
) -> tuple[Any, tuple[Any, ...]]:
    """One whole step of some rows: clip the gradient, decay, the optimizer's update, clip the weight."""
    g = xp.clip(g, h[1], h[2])
    w = w - h[3] * w
    w, slots = rule.update(w, g, slots, h, step, xp)
    return xp.clip(w, h[4], h[5]), slots
