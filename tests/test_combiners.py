"""Scales for whatever weights."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import assert_close

from embedfuse.combiners import COMBINERS, Combiner, scale_of

WEIGHTS = st.lists(st.floats(-100, 100, allow_nan=False, width=32), max_size=8)


def test_names_and_meanings() -> None:
    assert {name: (combiner.moment, combiner.power) for name, combiner in COMBINERS.items()} == {
        "sum": (0, 0), "mean": (1, 2), "sqrtn": (2, 1), "mean_by_count": (0, 2),
    }  # fmt: skip
    with pytest.raises(AttributeError):
        COMBINERS["sum"].moment = 1  # type: ignore[misc]
    assert Combiner(1, 2) == COMBINERS["mean"]


@given(WEIGHTS)
def test_scale_is_the_formula_and_never_infinite(weights: list[float]) -> None:
    w = np.array(weights, np.float64)
    expected = {
        "mean": 1 / w.sum() if w.sum() else 0.0,
        "sqrtn": 1 / math.sqrt((w * w).sum()) if (w * w).sum() else 0.0,
        "mean_by_count": 1 / len(w) if len(w) else 0.0,
    }
    for name, right in expected.items():
        combiner = COMBINERS[name]
        total = np.array([np.sum(w**combiner.moment)])
        with np.errstate(all="raise", under="ignore"):
            if np.isfinite(right):
                scale = scale_of(total, combiner.power, np)
                assert_close(scale, [right], 4e-16 * abs(right), name)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("power", [1, 2])
def test_torch_and_numpy_agree(kind: torch.dtype, power: int) -> None:
    total = torch.tensor([0.0, 1.0, 4.0, 9.0, 1e-6], dtype=kind)
    scale = scale_of(total, power, torch)
    assert scale.dtype == kind and scale[0] == 0
    expected = scale_of(total.double().numpy(), power, np)
    assert_close(scale.double().numpy(), expected, 2 * torch.finfo(kind).eps * expected)


def test_negative_total_of_a_mean() -> None:
    assert scale_of(np.array([-4.0]), 2, np)[0] == -0.25
