"""What a token asks the memory for: a query of two halves for each head."""

from torch import Tensor, nn

from .norms import HalfNorm, MaskedBatchNorm, QueryNorm


class QueryNetwork(nn.Module):
    """`[..., dim] → [..., heads, 2, dim_key / 2]`: a linear layer, a norm, and dropout.

    Args:
        dim: of the input.
        heads: how many queries a token has.
        dim_key: width of a query.
        norm: "batch" over all tokens, "layer" or "rms" over each half of a query, or None.
        dropout: of the normalised query.
        bias: of the linear layer.
    """

    def __init__(
        self, dim: int, heads: int, dim_key: int, norm: QueryNorm = "batch", dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.half_width = heads, dim_key // 2
        self.project = nn.Linear(dim, heads * dim_key, bias=bias)
        self.norm: MaskedBatchNorm | HalfNorm | None
        if norm == "batch":
            self.norm = MaskedBatchNorm(heads * dim_key)
        else:
            self.norm = None if norm is None else HalfNorm(norm, heads, self.half_width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Queries of every token; `mask` is False for padding, which counts in no statistics."""
        query = self.project(x)
        if isinstance(self.norm, MaskedBatchNorm):
            flat = self.norm(query.flatten(0, -2) if query.dim() > 1 else query[None], _flat(mask))
            query = flat.view(query.shape)
        query = query.view(*query.shape[:-1], self.heads, 2, self.half_width)
        if isinstance(self.norm, HalfNorm):
            query = self.norm(query)
        dropped: Tensor = self.dropout(query)
        return dropped

    @property
    def flops_per_token(self) -> int:
        """Of the matrix product, a multiplication and an addition counted as two."""
        return 2 * self.project.in_features * self.project.out_features


def _flat(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.reshape(-1)
