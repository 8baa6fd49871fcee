"""The judge of the gather functions: plain loops over references in float64, gradients written out by hand."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from cases import numbers
from tolerance import assert_close, sum_bound
from torch import Tensor


def gather_sum(table: Any, ids: Any, weights: Any) -> Any:
    """`out[b] = Σ_k weights[b, k] table[ids[b, k]]`."""
    out = np.zeros((ids.shape[0], table.shape[1]))
    for k in range(ids.shape[1]):
        out += weights[:, k, None] * table[ids[:, k]]
    return out


def gather_dot(table: Any, x: Any, ids: Any) -> Any:
    """`out[b, k] = <table[ids[b, k]], x[b]>`."""
    out = np.zeros(ids.shape)
    for k in range(ids.shape[1]):
        out[:, k] = (table[ids[:, k]] * x).sum(1)
    return out


def scatter_rows(ids: Any, weights: Any, grad: Any, rows: int) -> Any:
    """`out[ids[b, k]] += weights[b, k] grad[b]`."""
    out = np.zeros((rows, grad.shape[1]))
    for k in range(ids.shape[1]):
        # one after the other, so that duplicates add up
        np.add.at(out, ids[:, k], weights[:, k, None] * grad)
    return out


@dataclass
class Problem:
    """One table, bags of references with weights, a vector for each bag, and upstream gradients, all random."""

    table: Tensor  # [N, D]
    indices: Tensor  # [B, K]
    weights: Tensor  # [B, K]
    x: Tensor  # [B, D]
    scores: Tensor  # [B, K], upstream of dot products
    rows: Tensor  # [N, D], upstream of scattered rows

    def to(self, device: str) -> "Problem":
        """The same on a device."""
        return Problem(*(tensor.to(device) for tensor in vars(self).values()))

    def absolute(self) -> "Problem":
        """The same without signs: what bounds the errors of sums."""
        kept = {name: tensor.abs() for name, tensor in vars(self).items() if name != "indices"}
        return replace(self, **kept)

    def answers(self) -> dict[str, Any]:
        """Values and gradients of the three functions; `x` is the upstream of the first, and what the last scatters."""
        table, ids, weights, x, scores, rows = (
            numbers(tensor) if tensor.is_floating_point() else tensor.cpu().numpy() for tensor in vars(self).values()
        )
        count = table.shape[0]
        return {
            "sum": gather_sum(table, ids, weights),
            "sum.table": scatter_rows(ids, weights, x, count),
            "sum.weights": gather_dot(table, x, ids),
            "dot": gather_dot(table, x, ids),
            "dot.table": scatter_rows(ids, scores, x, count),
            "dot.x": gather_sum(table, ids, scores),
            "scatter": scatter_rows(ids, weights, x, count),
            "scatter.weights": gather_dot(rows, x, ids),
            "scatter.grad": gather_sum(rows, ids, weights),
        }

    def check(self, answers: dict[str, Tensor]) -> None:
        """Raises unless the answers are those of the loops, to the rounding of their dtype and that of sums."""
        expected, magnitudes = self.answers(), self.absolute().answers()
        terms = self.indices.numel() + self.table.shape[1]
        # sums are made in the type that the table, or for the last function its stand-in, asks for
        kind = str(self.table.dtype).removeprefix("torch.")
        for name, answer in answers.items():
            dtype = str(answer.dtype).removeprefix("torch.")
            made = "float64" if kind == "float64" and dtype == "float64" else min(dtype, "float32", key=_precision)
            allowed = sum_bound(expected[name], magnitudes[name], made, terms)
            assert_close(numbers(answer), expected[name].reshape(answer.shape), allowed.reshape(answer.shape), name)


def _precision(dtype: str) -> int:
    return ["bfloat16", "float16", "float32", "float64"].index(dtype)


def random_problem(
    rows: int = 11, dim: int = 5, bags: int = 9, places: int = 4, dtype: torch.dtype = torch.float64,
    weights_dtype: torch.dtype | None = None, ids_dtype: torch.dtype = torch.int64,
) -> Problem:  # fmt: skip
    """Many duplicates, weights of both signs, upstream gradients that are all different."""
    indices = torch.randint(0, rows, (bags, places)).to(ids_dtype)
    kind = weights_dtype or dtype
    return Problem(
        torch.randn(rows, dim).to(dtype), indices, torch.randn(bags, places).to(kind), torch.randn(bags, dim).to(dtype),
        torch.randn(bags, places).to(dtype), torch.randn(rows, dim).to(dtype),
    )  # fmt: skip
