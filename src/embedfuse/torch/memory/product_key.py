"""`ProductKeyMemory`: a feed-forward block whose hidden units are looked up (Lample et al., 2019)."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .addressing import ProductKeys, ScoreFunction
from .checks import check_choice, check_count, check_input, check_keys, check_rate
from .norms import QUERY_NORMS, QueryNorm
from .query import QueryNetwork
from .value_table import ValueTable, checked_table

Gating = Literal["silu", "swilu"] | None
GATINGS = ("silu", "swilu", None)


class ProductKeyMemory(nn.Module):
    """`[..., dim] → [..., dim]`: each token reads `heads * topk` of `num_keys ** 2` rows.

    Equivalent, for one head, to

        first, second = norm(query(x)).chunk(2, -1)
        grid = (first @ keys[0].T)[..., :, None] + (second @ keys[1].T)[..., None, :]
        best, ids = grid.flatten(-2).topk(topk)
        out = torch.einsum("...k,...kd->...d", best.softmax(-1), values[ids])

    and the sum of that for several. Neither the grid nor the rows that are read are ever in memory.

    Args:
        dim: width of the tokens.
        num_keys: keys of each half; the memory has `num_keys ** 2` slots.
        dim_key: width of a query, even; half of `dim`, from 4 to 512, if None.
        heads: queries of a token.
        topk: slots that each head reads.
        query_norm: "batch", which keeps most of the memory in use but looks at other tokens; "layer" or "rms", which do
            not; or None.
        qk_norm: scores are cosines of queries and keys, times a factor that each head learns.
        score_function: "softmax" over the slots of a head; "relu" or "sigmoid" of each for itself; or None.
        gating: "silu" multiplies what is read by `silu(W x)`; "swilu" then also projects it; or None.
        shared_keys: all heads have the same keys.
        output_projection: a linear layer at the end; where needed, and for "swilu", if None.
        dim_value: width of the rows; `dim` if None, or that of `values`.
        values: a `ValueTable` to share with other layers; one of its own if None.
        input_dropout: of `x`.
        query_dropout: of the queries.
        score_dropout: of the scores of slots.
        value_dropout: of the output.
        bias: of the linear layers.

    Raises:
        ValueError, TypeError: arguments that do not fit together.
    """

    def __init__(
        self, dim: int, num_keys: int = 128, dim_key: int | None = None, heads: int = 4, topk: int = 32, *,
        query_norm: QueryNorm = "batch", qk_norm: bool = False, score_function: ScoreFunction = "softmax",
        gating: Gating = None, shared_keys: bool = False, output_projection: bool | None = None,
        dim_value: int | None = None, values: ValueTable | None = None, input_dropout: float = 0.0,
        query_dropout: float = 0.0, score_dropout: float = 0.0, value_dropout: float = 0.0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        check_count("dim", dim)
        dim_key = default_dim_key(dim) if dim_key is None else dim_key
        check_keys(num_keys, dim_key, heads, topk)
        check_choice("query_norm", query_norm, QUERY_NORMS)
        check_choice("gating", gating, GATINGS)
        for name, rate in (
            ("input_dropout", input_dropout), ("query_dropout", query_dropout), ("value_dropout", value_dropout),
        ):  # fmt: skip
            check_rate(name, rate)
        width = dim_value if dim_value is not None else values.dim if isinstance(values, ValueTable) else dim
        check_count("dim_value", width)
        projected = gating == "swilu" or width != dim if output_projection is None else output_projection
        if width != dim and not projected:
            raise ValueError(
                f"`output_projection` must not be False where rows have another width, {width}, than tokens, {dim}: "
                "leave it out"
            )
        self.dim, self.gating = dim, gating
        self.query = QueryNetwork(dim, heads, dim_key, query_norm, query_dropout, bias)
        self.keys = ProductKeys(
            num_keys, dim_key, heads, topk, shared=shared_keys, qk_norm=qk_norm, score_function=score_function,
            dropout=score_dropout,
        )  # fmt: skip
        self.values = checked_table("values", values, num_keys**2, width)
        self.gate = None if gating is None else nn.Linear(dim, width, bias=bias)
        self.out = nn.Linear(width, dim, bias=bias) if projected else None
        self.input_dropout = nn.Dropout(input_dropout)
        self.value_dropout = nn.Dropout(value_dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Reads the memory.

        Args:
            x: `[..., dim]`.
            mask: bool `[...]`, False for padding: that reads nothing, trains nothing, counts in no statistics, and
                gives zeros.

        Raises:
            ValueError, TypeError: shapes that do not fit.
        """
        check_input(x, self.dim, mask)
        x = without_padding(x, mask)
        dropped = self.input_dropout(x)
        scores, ids = self.keys(self.query(dropped, mask), mask)
        out = self.values(ids.flatten(-2), scores.flatten(-2)).to(x.dtype)
        if self.gate is not None:
            out = out * functional.silu(self.gate(dropped))
        if self.out is not None:
            out = self.out(out)
        return without_padding(self.value_dropout(out), mask)

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of a forward pass; a multiplication and an addition count as two."""
        references = self.keys.heads * self.keys.topk
        linear = sum(2 * layer.weight.numel() for layer in (self.gate, self.out) if layer is not None)
        return self.query.flops_per_token + self.keys.flops_per_token + 2 * references * self.values.dim + linear

    def extra_repr(self) -> str:
        return f"dim={self.dim}, gating={self.gating!r}"


def default_dim_key(dim: int) -> int:
    """Half the width of the tokens, even, from 4 to 512."""
    return max(4, min(512, dim // 4 * 2))


def without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros where `mask` is False, whatever was there."""
    return x if mask is None else torch.where(mask[..., None], x, 0)
