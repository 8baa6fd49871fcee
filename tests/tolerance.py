"""How far from the judge an answer may be, and the assertions that say so: the only place where tolerances are made.

A bound follows from the storage type (one rounding at the end), the accumulation type, the number of terms added and
the sum of their absolute values. It is never tuned to what a backend happens to give.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance from 1 to the next number: the relative error of one rounding."""
SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
"""The absolute error of one rounding near 0; units that flush subnormal numbers are allowed for in float32."""
ROUNDINGS = 8
"""Roundings of one term beside those of the sum: products, the scale, its root."""
LUCK = 4
"""Rounding errors of a sum partly cancel, so that n of them amount to √n: this many times that is allowed."""
RULE_ROUNDINGS = 32
"""Roundings inside an optimizer's rule."""


def accumulation(dtype: str) -> str:
    """The type that sums of `dtype` are made in."""
    return "float64" if dtype == "float64" else "float32"


def roundings(length: int) -> float:
    """How many units in the last place a sum of `length` terms may be wrong by, whatever the order."""
    return min(length, LUCK * math.sqrt(length)) + ROUNDINGS


def sum_bound(expected: ArrayLike, magnitude: ArrayLike, dtype: str, length: int) -> NDArray[Any]:
    """Error allowed for a sum, stored as `dtype`, of up to `length` terms whose absolute values sum to `magnitude`."""
    unit = UNIT[accumulation(dtype)]
    stored = UNIT[dtype] * np.abs(np.asarray(expected, np.float64)) + SMALLEST[dtype]
    return stored + roundings(length) * unit * np.asarray(magnitude, np.float64)


def step_bound(before: ArrayLike, after: ArrayLike, slope: ArrayLike, dtype: str, length: int) -> NDArray[Any]:
    """Error allowed for weights, or state, after one step of an optimizer.

    Args:
        before: the values before the step.
        after: the values the judge gives.
        slope: how much `after` changes if all gradients grow by 100 %, to first order.
        dtype: storage type.
        length: terms in the largest summed gradient, all of one sign.
    """
    unit = UNIT["float64" if dtype == "float64" else "float32"]
    before, after = np.abs(np.asarray(before, np.float64)), np.abs(np.asarray(after, np.float64))
    stored = UNIT[dtype] * after + SMALLEST[dtype]
    through_gradient = roundings(length) * unit * np.abs(np.asarray(slope, np.float64))
    # terms inside the rule may cancel: they are taken to be no larger than the largest result
    inside = before + after + np.abs(slope) + after.max(initial=0)
    return stored + RULE_ROUNDINGS * unit * inside + through_gradient


def assert_close(actual: ArrayLike, expected: ArrayLike, allowed: ArrayLike, what: str = "result") -> None:
    """Raises AssertionError unless `|actual - expected| <= allowed` everywhere; NaN and infinities must be the same."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {actual.shape}, expected {expected.shape}")
    allowed = np.broadcast_to(np.asarray(allowed, np.float64), expected.shape)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
        wrong = ~same & ~(error <= allowed)
    if not wrong.any():
        return
    excess = np.where(wrong, np.where(np.isfinite(error), error / np.maximum(allowed, 1e-300), np.inf), 0)
    place = np.unravel_index(int(np.argmax(excess)), excess.shape)
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.size} elements are wrong; the worst, at {tuple(map(int, place))}, is "
        f"{actual[place]!r}, expected {expected[place]!r} ± {allowed[place]:.3g}"
    )


def assert_same_bits(actual: ArrayLike, expected: ArrayLike, what: str = "result") -> None:
    """Raises AssertionError unless two arrays have the same shape, type and bytes."""
    actual, expected = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        raise AssertionError(f"{what}: {actual.dtype} {actual.shape}, expected {expected.dtype} {expected.shape}")
    bytes_of = (array.reshape(-1).view(np.uint8).reshape(array.size, -1) for array in (actual, expected))
    different = np.not_equal(*bytes_of).any(axis=1) if actual.size else np.zeros(0, bool)
    if different.any():
        first = int(np.argmax(different))
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.size} elements have other bits; the first is number "
            f"{first}: {actual.reshape(-1)[first]!r}, expected {expected.reshape(-1)[first]!r}"
        )
