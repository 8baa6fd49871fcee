"""The assertions themselves: each must fail when it should."""

import numpy as np
import pytest
import tolerance
from tolerance import assert_close, assert_same_bits, step_bound, sum_bound


def test_close_accepts_within_and_refuses_beyond() -> None:
    assert_close([1.0, 2.0], [1.0, 2.1], 0.11)
    with pytest.raises(AssertionError, match=r"1 of 2 elements.*at \(1,\)"):
        assert_close([1.0, 2.0], [1.0, 2.1], 0.09)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([np.nan], [1.0]),
        ([1.0], [np.nan]),
        ([np.inf], [1.0]),
        ([np.inf], [-np.inf]),
        ([1.0], [np.inf]),
        ([1.0, 2.0], [1.0]),
        ([[1.0]], [1.0]),
    ],
)
def test_close_refuses_other_kinds_of_number_and_shape(actual: list[float], expected: list[float]) -> None:
    with pytest.raises(AssertionError):
        assert_close(actual, expected, 1e30)


def test_close_refuses_when_the_bound_is_not_a_number() -> None:
    with pytest.raises(AssertionError):
        assert_close([1.0], [1.5], [np.nan])


def test_close_accepts_equal_infinities_nan_and_nothing() -> None:
    assert_close([np.nan, np.inf, -np.inf], [np.nan, np.inf, -np.inf], 0)
    assert_close(np.zeros((0, 3)), np.zeros((0, 3)), 0)


def test_close_names_the_worst_element() -> None:
    with pytest.raises(AssertionError, match=r"weights: 2 of 3 .*at \(2,\).*9\.0"):
        assert_close([1.0, 2.0, 9.0], [1.0, 1.0, 1.0], 0.5, "weights")


def test_same_bits_accepts_nan_and_refuses_negative_zero() -> None:
    assert_same_bits(np.array([np.nan, 1.0]), np.array([np.nan, 1.0]))
    with pytest.raises(AssertionError, match="1 of 2 elements have other bits; the first is number 1"):
        assert_same_bits(np.array([1.0, 0.0]), np.array([1.0, -0.0]))


@pytest.mark.parametrize("other", [np.zeros(3, np.float64), np.zeros(2, np.float32), np.zeros((3, 1), np.float32)])
def test_same_bits_refuses_other_shape_and_type(other: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        assert_same_bits(np.zeros(3, np.float32), other)


@pytest.mark.parametrize("dtype", list(tolerance.UNIT))
def test_unit_is_half_the_spacing_at_one(dtype: str) -> None:
    if dtype != "bfloat16":
        assert tolerance.UNIT[dtype] == np.finfo(dtype).eps / 2
    assert tolerance.UNIT[dtype] == 2.0 ** -{"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}[dtype]


def test_bounds_grow_with_length_and_magnitude_and_stay_below_a_wrong_term() -> None:
    near, far = sum_bound(1.0, 4.0, "float32", 4), sum_bound(1.0, 4.0, "float32", 400)
    assert 0 < near < far < 1e-3
    assert sum_bound(1.0, 8.0, "float32", 4) > near
    assert sum_bound(1.0, 4.0, "bfloat16", 4) > 2.0**-9 > near
    assert sum_bound(1.0, 4.0, "float64", 400) < 1e-12
    # an exact zero of nothing must be an exact zero, but for subnormal numbers
    assert sum_bound(0.0, 0.0, "float32", 400) < 1e-30


def test_float32_sum_in_any_order_is_within_its_bound() -> None:
    terms = np.random.default_rng(0).standard_normal(1000)
    stored = terms.astype(np.float32)
    exact = stored.astype(np.float64).sum()
    allowed = sum_bound(exact, np.abs(stored).sum(dtype=np.float64), "float32", 1000)
    for order in (stored, stored[::-1], np.sort(stored)):
        assert_close(np.add.accumulate(order)[-1], exact, allowed)
    with pytest.raises(AssertionError):
        assert_close(exact + 0.01, exact, allowed)


def test_step_bound_sees_a_step_that_was_left_out() -> None:
    allowed = step_bound(before=1.0, after=0.9, slope=0.1, dtype="float32", length=10)
    with pytest.raises(AssertionError):
        assert_close(1.0, 0.9, allowed)
    with pytest.raises(AssertionError):
        assert_close(0.9 - 1e-4, 0.9, allowed)
    assert_close(0.9 + 1e-7, 0.9, allowed)
