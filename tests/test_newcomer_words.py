"""Words and types that newcomers give in another spelling, and where two rules of one name differ."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from embedfuse import Adam, TableConfig
from embedfuse.optim.registry import resolve


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("rowwise_adagrad", "RowWiseAdagrad"),
        ("row-wise-adagrad", "RowWiseAdagrad"),
        ("Adagrad_Momentum", "AdagradMomentum"),
        ("adamw", "AdamW"),
        ("lamb", "Adagrad"),
    ],
)
def test_an_optimizer_is_suggested_whatever_its_spelling(word: str, found: str) -> None:
    with pytest.raises(ValueError, match=rf"an object such as embedfuse\.{found}\(\)"):
        resolve(word)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64"])
def test_dtypes_of_torch_go_by_their_names(name: str) -> None:
    config = TableConfig(3, 2, dtype=getattr(torch, name))
    assert config.dtype == name and type(config.dtype) is str


@pytest.mark.parametrize("given", [torch.int64, torch.float8_e4m3fn, torch, float, np.float16, None, "float8"])
def test_other_dtypes_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="`dtype` must be one of float32, float16, bfloat16, float64, got"):
        TableConfig(3, 2, dtype=given)


def test_sparse_adam_has_its_epsilon_elsewhere() -> None:
    """As the docstring of `Adam` says: ε of torch's SparseAdam is `ε / √(1-β₂ᵗ)` here."""
    gradient, epsilon, rate = 1e-4, 1e-3, 0.1
    theirs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    sparse = torch.optim.SparseAdam([theirs], rate, eps=epsilon)

    def stepped(table: np.ndarray, slots: tuple[np.ndarray, ...], step: int, epsilon: float) -> tuple[Any, Any]:
        hyper = Adam(rate, epsilon=epsilon, bias_correction=True).hyper(rate)
        return Adam.update(table, np.full((1, 1), gradient), slots, hyper, step, np)

    ours = same = np.zeros((1, 1)), (np.zeros((1, 1)), np.zeros((1, 1)))
    for step in (1, 2, 3):
        theirs.grad = torch.full((1, 1), gradient, dtype=torch.float64).to_sparse(1)
        sparse.step()
        ours = stepped(*ours, step, epsilon)
        same = stepped(*same, step, epsilon / math.sqrt(1 - 0.999**step))
    np.testing.assert_allclose(same[0], theirs.detach(), rtol=1e-9)
    assert ours[0] < 5 * same[0] < 0
