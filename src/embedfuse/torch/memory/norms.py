"""Normalisation of queries: over the batch, which keeps all of a memory in use, or over each half of a query."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

QueryNorm = Literal["batch", "layer", "rms"] | None
QUERY_NORMS = ("batch", "layer", "rms", None)


class MaskedBatchNorm(nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` of `[T, features]` whose statistics leave padding out.

    Equivalent, where `mask` is True, to the norm of `x[mask]`.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalises; what is returned for padding means nothing."""
        if not self.training or x.shape[0] == 0:
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        if mask is None:
            return super().forward(x)
        real = mask[:, None]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = mask.sum()
        number = count.clamp(min=1)
        mean = torch.where(real, wide, 0).sum(0) / number
        variance = torch.where(real, wide - mean, 0).square().sum(0) / number
        self._remember(mean, variance, count)
        out = (wide - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias
        return out.to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        # a batch of fewer than two says nothing of a variance
        says = count > 1
        share = (self.momentum or 0.1) * says.to(mean.dtype)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running + share * (new - running))
        self.num_batches_tracked.add_(says.long())


class HalfNorm(nn.Module):
    """Layer or root-mean-square norm of each half of each head's query `[..., heads, 2, half]`."""

    def __init__(self, kind: Literal["layer", "rms"], heads: int, half: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(heads, 2, half))
        self.bias = nn.Parameter(torch.zeros(heads, 2, half)) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        width = x.shape[-1:]
        if self.kind == "layer":
            out = functional.layer_norm(x, width, eps=self.eps) * self.weight
        else:
            out = functional.rms_norm(x, width, eps=self.eps) * self.weight
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.kind!r}, {list(self.weight.shape)}"


def unit(x: Tensor) -> Tensor:
    """Each vector divided by its length, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    made: Any = functional.normalize(wide, dim=-1, eps=1e-6)
    result: Tensor = made.to(x.dtype)
    return result
