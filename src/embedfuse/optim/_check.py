"""Checks of hyper-parameters: every refusal names the argument, the rule, the value and the way out."""

import math
from numbers import Real
from typing import Any

SMALLEST = "1.2e-38"
"""Lower bound of what a denominator rests on. Anything smaller is 0 in float32, and 0 / 0 would be NaN."""


def check_interval(name: str, value: Any, interval: str, way_out: str) -> None:
    """Raises unless `value` is a number in `interval`, which is written as in mathematics: `"[0, 1)"`."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    # NaN compares false, so it is in no interval; a bool is no number
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    above = number >= low if interval[0] == "[" else number > low
    below = number <= high if interval[-1] == "]" else number < high
    if not (above and below):
        raise ValueError(f"`{name}` must be a number in {interval}, got {value!r}: {way_out}")


def check_flag(name: str, value: Any) -> None:
    """Raises unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be a bool, got {value!r}: use True or False")


def check_betas(beta_1: Any, beta_2: Any) -> None:
    """Raises unless both are decay rates of a running mean."""
    check_interval("beta_1", beta_1, "[0, 1)", "0.9 is usual")
    check_interval("beta_2", beta_2, "[0, 1)", "0.999 is usual")


def log_beta(beta: float) -> float:
    """`log(beta)` for `1 - beta**t = -expm1(t * log(beta))`; finite for 0, where `exp` of it is 0 all the same."""
    return math.log(beta) if beta > 0 else -1e4
