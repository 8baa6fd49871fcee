"""Which slots a query reads, and how much of each: product keys."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..gather.product_topk import product_topk
from .checks import check_choice, check_keys, check_rate
from .norms import unit

ScoreFunction = Literal["softmax", "relu", "sigmoid"] | None
SCORE_FUNCTIONS = ("softmax", "relu", "sigmoid", None)


class Addressing(nn.Module):
    """What all ways to find slots have in common: `(queries, mask) → scores, ids`, both `[..., heads, topk]`.

    Slots are numbered from 0 to `num_slots - 1`, the best of each head first; padding reads slot -1 with a score of 0.
    Watching the outputs of these modules is how `record_usage` counts.
    """

    num_slots: int


class ProductKeys(Addressing):
    """The slots with the highest sums of two key scores, of `num_keys ** 2`, found without scoring them all.

    Equivalent, for one head, to

        grid = (first @ keys[0].T)[..., :, None] + (second @ keys[1].T)[..., None, :]
        scores, ids = grid.flatten(-2).topk(topk)

    with the score function applied to what is chosen.

    Args:
        num_keys: of each half.
        dim_key: width of a query, both halves together.
        heads: queries of a token.
        topk: slots that each head reads.
        shared: all heads have the same keys.
        qk_norm: scores are cosines times a factor, which each head learns.
        score_function: "softmax" over the chosen slots, "relu" or "sigmoid" of each for itself, or None.
        dropout: of the scores.
    """

    def __init__(
        self, num_keys: int, dim_key: int, heads: int, topk: int, *, shared: bool = False, qk_norm: bool = False,
        score_function: ScoreFunction = "softmax", dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_keys(num_keys, dim_key, heads, topk)
        check_choice("score_function", score_function, SCORE_FUNCTIONS)
        check_rate("score_dropout", dropout)
        self.topk, self.heads, self.score_function = topk, heads, score_function
        self.num_keys, self.num_slots = num_keys, num_keys**2
        half = dim_key // 2
        self.keys = nn.Parameter(torch.empty(1 if shared else heads, 2, num_keys, half))
        self.scale = nn.Parameter(torch.full((heads,), math.sqrt(half))) if qk_norm else None
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Keys anew, as the first product-key memory had them."""
        bound = 1 / math.sqrt(self.keys.shape[-1])
        nn.init.uniform_(self.keys, -bound, bound)

    def forward(self, queries: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`queries [..., heads, 2, half]`, `mask [...]` → scores and ids `[..., heads, topk]`."""
        keys = self.keys if self.scale is None else unit(self.keys)
        queries = queries if self.scale is None else unit(queries)
        if keys.shape[0] == 1:
            halves = torch.einsum("...hpd,pnd->...hpn", queries, keys[0])
        else:
            halves = torch.einsum("...hpd,hpnd->...hpn", queries, keys)
        if self.scale is not None:
            halves = halves * self.scale[:, None, None]
        best, ids = product_topk(halves[..., 0, :], halves[..., 1, :], self.topk)
        scores = self.dropout(scored(best, self.score_function))
        return masked(scores, ids, mask)

    @property
    def flops_per_token(self) -> int:
        """Of the products with the keys."""
        return 2 * self.heads * 2 * self.num_keys * self.keys.shape[-1]

    def extra_repr(self) -> str:
        return (
            f"num_keys={self.num_keys}, heads={self.heads}, topk={self.topk}, shared={self.keys.shape[0] == 1}, "
            f"score_function={self.score_function!r}"
        )


def scored(best: Tensor, function: ScoreFunction) -> Tensor:
    """The weights of the chosen slots; a softmax is made in float32 at least."""
    if function == "softmax":
        wide = best.to(torch.promote_types(best.dtype, torch.float32))
        return wide.softmax(-1).to(best.dtype)
    if function == "relu":
        return torch.relu(best)
    return torch.sigmoid(best) if function == "sigmoid" else best


def masked(scores: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Padding reads nothing."""
    if mask is None:
        return scores, ids
    real = mask[..., None, None]
    return torch.where(real, scores, 0), torch.where(real, ids, -1)
