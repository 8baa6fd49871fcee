"""`UltraMem`: memory with Tucker scores, virtual blocks of rows, and scores for slices of rows (Huang et al., 2024)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..gather.grouped import grouped_gather_sum
from ..gather.remap import virtual_rows
from .checks import check_choice, check_count, check_input, check_keys, check_rate
from .norms import QUERY_NORMS, QueryNorm
from .product_key import default_dim_key, without_padding
from .query import QueryNetwork
from .tucker import TuckerKeys
from .value_table import ValueTable, checked_table


class UltraMem(nn.Module):
    """`[..., dim] → [..., dim]`: slots outnumber rows `blocks` to one, and each slot has `slices` scores.

    Equivalent, for the ids and scores `[slices, ..., K]` that `TuckerKeys` finds, to

        virtual = torch.einsum("ned,edo->eno", values[None], project)  # of each block, [blocks, rows, dim]

    for one slice, `torch.einsum("...k,...kd->...d", scores, virtual.flatten(0, 1)[ids])`; slice h of a row is weighted
    with its own scores. The rows are read once and projected after they are summed, a sum for each block.

    Args:
        dim: width of the tokens.
        num_keys: rows, and columns, of the grid of slots; `num_keys ** 2` must be a multiple of `blocks`.
        dim_key: width of a query, even; half of `dim`, from 4 to 512, if None.
        heads: queries of a token.
        topk: slots that each head reads.
        rank: of the Tucker core.
        blocks: virtual blocks, each with a projection of its own.
        slices: scores of a slot; must divide `dim_value`.
        dim_value: width of the rows; half of `dim`, or the multiple of `slices` below that, if None.
        values: a `ValueTable` of `num_keys ** 2 / blocks` rows; one of its own, that learns by autograd, if None.
        query_norm: as that of `ProductKeyMemory`.
        margin: see `TuckerKeys`.
        dropout: of the output.

    Raises:
        ValueError, TypeError: arguments that do not fit together.
    """

    def __init__(
        self, dim: int, num_keys: int = 128, dim_key: int | None = None, heads: int = 2, topk: int = 32, *,
        rank: int = 2, blocks: int = 4, slices: int = 2, dim_value: int | None = None,
        values: ValueTable | None = None, query_norm: QueryNorm = "layer", margin: float = 0.15, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_count("dim", dim)
        dim_key = default_dim_key(dim) if dim_key is None else dim_key
        check_keys(num_keys, dim_key, heads, topk)
        check_choice("query_norm", query_norm, QUERY_NORMS)
        check_rate("dropout", dropout)
        for name, value in (("blocks", blocks), ("slices", slices)):
            check_count(name, value)
        if num_keys**2 % blocks:
            raise ValueError(f"`blocks` must divide `num_keys ** 2`, {num_keys**2}, got {blocks}")
        width = max(1, dim // 2 // slices) * slices if dim_value is None else dim_value
        check_count("dim_value", width)
        if width % slices:
            raise ValueError(f"`slices` must divide `dim_value`, {width}, got {slices}")
        self.dim, self.blocks, self.slices = dim, blocks, slices
        self.num_rows = num_keys**2 // blocks
        self.query = QueryNetwork(dim, heads, dim_key, query_norm)
        self.keys = TuckerKeys(num_keys, dim_key, heads, topk, rank, slices, margin)
        if values is None:
            deviation = math.sqrt(blocks / (2 * topk * heads))
            values = ValueTable(self.num_rows, width, initializer=_normal(deviation))
        self.values = checked_table("values", values, self.num_rows, width)
        self.project = nn.Parameter(torch.randn(blocks, width, dim) / math.sqrt(width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Reads the memory; `mask` as in `ProductKeyMemory`."""
        check_input(x, self.dim, mask)
        x = without_padding(x, mask)
        scores, ids = self.keys(self.query(x, mask), mask)
        ids, scores = ids.flatten(-2), scores.flatten(-2)
        blocks, rows = virtual_rows(ids.clamp(min=0), self.num_rows, self.num_rows)
        rows = torch.where(ids < 0, -1, rows)
        summed = grouped_gather_sum(
            self.values.source, rows, scores, blocks, self.blocks, row_mask=self.values.row_mask, out_of_range="drop"
        )
        out = torch.einsum("...ed,edo->...o", summed.to(x.dtype), self.project)
        return without_padding(self.dropout(out), mask)

    def auxiliary_loss(self) -> Tensor:
        """See `TuckerKeys.auxiliary_loss`."""
        return self.keys.auxiliary_loss()

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of a forward pass; a multiplication and an addition count as two."""
        references = self.keys.heads * self.keys.topk
        made = 2 * references * self.values.dim + 2 * self.project.numel()
        return self.query.flops_per_token + self.keys.flops_per_token + made

    def extra_repr(self) -> str:
        return f"dim={self.dim}, blocks={self.blocks}, slices={self.slices}"


def _normal(deviation: float) -> Any:
    def fill(table: Tensor) -> None:
        nn.init.normal_(table, std=deviation)

    return fill
