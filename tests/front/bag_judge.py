"""The judge of `embedding_bag`: plain loops over bags in float64, differentiable, ties going to the first."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from cases import numbers
from tolerance import assert_close, sum_bound
from torch import Tensor


def pool_bag(rows: Tensor, weights: Tensor, mode: str) -> Tensor:
    """One bag of rows `[n, D]` as one row."""
    if rows.shape[0] == 0:
        return rows.new_zeros(rows.shape[1])
    if mode == "max":
        first = (rows == rows.amax(0)).to(torch.int8).argmax(0)
        return rows.gather(0, first[None])[0]
    total = (rows * weights[:, None]).sum(0)
    if mode == "sum":
        return total
    divisor = weights.sum() if mode == "mean" else weights.square().sum().sqrt()
    return total / divisor if divisor != 0 else total * 0


def judge(
    ids: Any, bounds: Any, table: Tensor, mode: str, weights: Tensor | None = None, padding: int | None = None
) -> Tensor:
    """Bags `ids[bounds[b] : bounds[b + 1]]` pooled one by one, `[B, D]`."""
    ids, bounds = torch.as_tensor(ids).reshape(-1).long(), [int(bound) for bound in bounds]
    weights = table.new_ones(len(ids)) if weights is None else weights.reshape(-1)
    bags = []
    for start, end in pairwise(bounds):
        kept = torch.tensor([at for at in range(start, end) if int(ids[at]) != padding], dtype=torch.int64)
        bags.append(pool_bag(table[ids[kept]], weights[kept], mode))
    return torch.stack(bags) if bags else table[:0].clone()


@dataclass
class Batch:
    """Ids, where each bag starts and where the last ends, weights, and an upstream gradient."""

    ids: Tensor
    bounds: Tensor
    table: Tensor
    weights: Tensor | None
    upstream: Tensor

    def absolute(self) -> "Batch":
        """The same batch without signs."""
        weights = None if self.weights is None else self.weights.abs()
        return replace(self, table=self.table.abs(), weights=weights, upstream=self.upstream.abs())

    def answers(self, mode: str, padding: int | None = None) -> list[Tensor]:
        """Output, gradient of the table, and gradient of the weights if there are any, in float64."""
        table = self.table.detach().double().requires_grad_()
        weights = None if self.weights is None else self.weights.detach().double().requires_grad_()
        out = judge(self.ids, self.bounds, table, mode, weights, padding)
        inputs = [table] if weights is None else [table, weights]
        return [out, *torch.autograd.grad(out, inputs, self.upstream.double(), materialize_grads=True)]


def random_batch(
    rows: int = 11, dim: int = 5, bags: int = 9, longest: int = 6, dtype: torch.dtype = torch.float64,
    weighted: bool = False, ids_dtype: torch.dtype = torch.int64, device: str = "cpu",
) -> Batch:  # fmt: skip
    """Bags of 0 to `longest` ids with many duplicates; positive weights."""
    lengths = torch.randint(0, longest + 1, (bags,))
    lengths[: bags // 3] = 0
    lengths = lengths[torch.randperm(bags)]
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(bounds[-1])
    ids = torch.randint(0, rows, (count,)).to(ids_dtype)
    table, upstream = torch.randn(rows, dim).to(dtype), torch.randn(bags, dim).to(dtype)
    weights = torch.rand(count).to(dtype) + 0.5 if weighted else None
    moved = (None if x is None else x.to(device) for x in (ids, bounds, table, weights, upstream))
    return Batch(*moved)


def check_answers(batch: Batch, mode: str, padding: int | None, answers: list[Tensor]) -> None:
    """Raises unless output and gradients are the judge's, to the last rounding and that of the sums."""
    dtype = str(batch.table.dtype).removeprefix("torch.")
    host = Batch(*(None if x is None else x.cpu() for x in vars(batch).values()))
    expected = host.answers(mode, padding)
    if mode == "max":
        magnitudes = replace(host, upstream=host.upstream.abs()).answers(mode, padding)
    else:
        magnitudes = host.absolute().answers(mode, padding)
    if mode in ("mean", "sqrtn") and host.weights is not None:
        # the difference of two sums, divided by weights of 0.5 at least
        magnitudes[2].fill_(4 * float(host.absolute().answers("sum", padding)[2].max()))
    terms = batch.ids.numel() + batch.table.shape[1]
    names = ("out", "table.grad", "weights.grad")[: len(expected)]
    for what, answer, right, magnitude in zip(names, answers, expected, magnitudes, strict=True):
        allowed = sum_bound(numbers(right), numbers(magnitude), dtype, terms)
        assert_close(numbers(answer), numbers(right), allowed, what)
