"""`PEER`: a mixture of a million experts of one neuron each, found by product keys (He, 2024)."""

from typing import Any

from torch import Tensor, nn

from ..gather.expert import ACTIVATIONS, Activation, expert_lookup
from .addressing import ProductKeys, ScoreFunction
from .checks import check_choice, check_count, check_input, check_keys, check_rate
from .norms import QUERY_NORMS, QueryNorm
from .product_key import default_dim_key, without_padding
from .query import QueryNetwork
from .value_table import ValueTable, checked_table


class PEER(nn.Module):
    """`[..., dim] → [..., dim]`: `heads * topk` of `num_keys ** 2` experts, each one neuron.

    Equivalent, for the experts `ids` and scores that `ProductKeys` finds, to

        hidden = activation(torch.einsum("...d,...kd->...k", x, down[ids]))
        torch.einsum("...k,...kd->...d", hidden * scores, up[ids])

    Args:
        dim: width of the tokens.
        num_keys: keys of each half.
        dim_key: width of a query, even; half of `dim`, from 4 to 512, if None.
        heads: queries of a token.
        topk: experts of each head.
        query_norm: as that of `ProductKeyMemory`.
        qk_norm: as that of `ProductKeyMemory`.
        score_function: as that of `ProductKeyMemory`.
        activation: "gelu", "relu", "silu" or "identity".
        gated: experts are `activation(gate · x) * (down · x)`, with a third table.
        shared_keys: all heads have the same keys.
        down: a `ValueTable` of `num_keys ** 2` rows of width `dim`; one of its own if None.
        up: likewise.
        dropout: of the output.

    Raises:
        ValueError, TypeError: arguments that do not fit together.
    """

    def __init__(
        self, dim: int, num_keys: int = 128, dim_key: int | None = None, heads: int = 8, topk: int = 16, *,
        query_norm: QueryNorm = "batch", qk_norm: bool = False, score_function: ScoreFunction = "softmax",
        activation: Activation = "gelu", gated: bool = False, shared_keys: bool = True,
        down: ValueTable | None = None, up: ValueTable | None = None, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_count("dim", dim)
        dim_key = default_dim_key(dim) if dim_key is None else dim_key
        check_keys(num_keys, dim_key, heads, topk)
        check_choice("query_norm", query_norm, QUERY_NORMS)
        check_choice("activation", activation, ACTIVATIONS)
        check_rate("dropout", dropout)
        self.dim, self.activation = dim, activation
        self.query = QueryNetwork(dim, heads, dim_key, query_norm)
        self.keys = ProductKeys(
            num_keys, dim_key, heads, topk, shared=shared_keys, qk_norm=qk_norm, score_function=score_function
        )
        self.down = checked_table("down", down, num_keys**2, dim)
        self.up = checked_table("up", up, num_keys**2, dim)
        self.gate = ValueTable(num_keys**2, dim, update=_update_of(self.down)) if gated else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Asks the experts; `mask` as in `ProductKeyMemory`."""
        check_input(x, self.dim, mask)
        x = without_padding(x, mask)
        self._check_row_masks()
        scores, ids = self.keys(self.query(x, mask), mask)
        out = expert_lookup(
            x, self.down.source, self.up.source, ids.flatten(-2), scores.flatten(-2), self.activation,
            None if self.gate is None else self.gate.source, row_mask=self.down.row_mask, out_of_range="drop",
        ).to(x.dtype)  # fmt: skip
        return without_padding(self.dropout(out), mask)

    def _check_row_masks(self) -> None:
        for name, table in (("up", self.up), ("gate", self.gate)):
            if table is not None and table.row_mask is not None and table.row_mask is not self.down.row_mask:
                raise ValueError(
                    f"`row_mask` of `{name}` must be left to `down`, whose mask says which experts learn: assign it to "
                    "`down.row_mask`"
                )

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of a forward pass; a multiplication and an addition count as two."""
        tables = 2 if self.gate is None else 3
        references = self.keys.heads * self.keys.topk
        return self.query.flops_per_token + self.keys.flops_per_token + 2 * tables * references * self.dim

    def extra_repr(self) -> str:
        return f"dim={self.dim}, activation={self.activation!r}"


def _update_of(table: ValueTable) -> Any:
    return table.update
