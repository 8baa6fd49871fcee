"""Which slots a query reads, by scores that a small Tucker core makes of those of rows and columns."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .addressing import Addressing
from .checks import check_count, check_keys


class TuckerKeys(Addressing):
    """The slots with the highest `rowᵀ C column`, where rows and columns have `rank` scores for each key.

    Equivalent, for one head and one slice, to

        row, column = keys @ query_halves  # [rank, num_keys] each
        grid = row.T @ core @ column
        best, ids = grid.flatten().topk(topk)

    but the grid is only that of the `topk` rows and `topk` columns which are best by the core's nearest matrix of rank
    one; `margin` and `auxiliary_loss` keep the core close to that. Each slot has `slices` scores, by a core each; the
    sum of the cores chooses.

    Args:
        num_keys: rows, and columns.
        dim_key: width of a query, both halves together.
        heads: queries of a token.
        topk: slots that each head reads.
        rank: of the core.
        slices: scores of a slot.
        margin: how large the other singular values of a core may be at no cost.
    """

    def __init__(
        self, num_keys: int, dim_key: int, heads: int, topk: int, rank: int = 2, slices: int = 1, margin: float = 0.15
    ) -> None:
        super().__init__()
        check_keys(num_keys, dim_key, heads, topk)
        check_count("rank", rank)
        check_count("slices", slices)
        self.num_keys, self.num_slots = num_keys, num_keys**2
        self.heads, self.topk, self.rank, self.slices, self.margin = heads, topk, rank, slices, margin
        self.keys = nn.Parameter(torch.randn(heads, 2, rank, num_keys, dim_key // 2))
        # near a matrix of rank one, of which the prefilter is exact
        core = torch.full((slices, heads, rank, rank), 1 / (rank * slices))
        self.core = nn.Parameter(core + 0.1 / slices * torch.randn_like(core))

    def forward(self, queries: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`queries [..., heads, 2, half]` → scores `[slices, ..., heads, topk]` and ids `[..., heads, topk]`."""
        half = queries.shape[-1]
        keys = functional.layer_norm(self.keys, (half,))
        # [..., heads, 2, rank, num_keys]
        halves = torch.einsum("...hpd,hprnd->...hprn", queries, keys) / math.sqrt(half)
        row, column = halves[..., 0, :, :], halves[..., 1, :, :]
        with torch.no_grad():
            left, right = self._nearest_of_rank_one()
            rows = torch.einsum("...hrn,hr->...hn", row, left).topk(self.topk).indices
            columns = torch.einsum("...hrn,hr->...hn", column, right).topk(self.topk).indices
        row, column = _chosen(row, rows), _chosen(column, columns)
        # [slices, ..., heads, topk, topk]
        pulled = torch.einsum("...hra,shrq->s...haq", row, self.core)
        grid = torch.einsum("s...haq,...hqb->s...hab", pulled, column).flatten(-2)
        with torch.no_grad():
            places = grid.sum(0).topk(self.topk).indices
        scores = grid.gather(-1, places.expand(self.slices, *places.shape))
        ids = rows.gather(-1, places // self.topk) * self.num_keys + columns.gather(-1, places % self.topk)
        if mask is None:
            return scores, ids
        real = mask[..., None, None]
        return torch.where(real, scores, 0), torch.where(real, ids, -1)

    def _nearest_of_rank_one(self) -> tuple[Tensor, Tensor]:
        """The first singular vectors `[heads, rank]` of the sum of the cores."""
        left, _, right = torch.linalg.svd(self._whole())
        first, second = left[..., 0], right[..., 0, :]
        # both signs are right; of a core of positive numbers all entries are positive then
        sign = torch.where(first.sum(-1, keepdim=True) < 0, -1.0, 1.0).to(first.dtype)
        return (first * sign).to(self.core.dtype), (second * sign).to(self.core.dtype)

    def _whole(self) -> Tensor:
        return self.core.sum(0).to(torch.promote_types(self.core.dtype, torch.float32))

    def auxiliary_loss(self) -> Tensor:
        """What is too large in the other singular values, to be added to the loss with a factor such as 0.001."""
        if self.rank == 1:
            return self.core.sum() * 0
        others = torch.linalg.svdvals(self._whole())[..., 1:]
        return torch.relu(others - self.margin).square().mean(-1).sum()

    @property
    def flops_per_token(self) -> int:
        """Of the products with the keys and of the grid."""
        half = self.keys.shape[-1]
        grid = self.slices * (self.topk * self.rank**2 + self.topk**2 * self.rank)
        return 2 * self.heads * (2 * self.rank * self.num_keys * half + grid)

    def extra_repr(self) -> str:
        return f"num_keys={self.num_keys}, heads={self.heads}, topk={self.topk}, rank={self.rank}, slices={self.slices}"


def _chosen(scores: Tensor, places: Tensor) -> Tensor:
    """`[..., rank, n]` at `[..., topk]`."""
    shape = (*scores.shape[:-1], places.shape[-1])
    return scores.gather(-1, places[..., None, :].expand(shape))
