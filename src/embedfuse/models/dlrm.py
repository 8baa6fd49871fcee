"""DLRM (Naumov et al., 2019) in the shape of DeepRec's model zoo."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..data.schema import Schema
from ..optim import Optimizer
from .dense import stack
from .embeddings import Inputs, Lookup

INTERACTIONS = ("cat", "dot")


class DLRM(nn.Module):
    """Numbers through a bottom MLP, ids through tables, both put together, and a top MLP to one logit.

    The zoo's sizes by default: tables of width 16, bottom 512-256-64-16, top 512-256, batch normalisation after every
    layer. One thing is not the zoo's: there each top layer is fed the *interaction*, so that all but the last are dead
    weight; here each is fed the layer before it, as the paper means it.

    Args:
        embeddings: gives `[B, fields * dim]`.
        schema: the columns.
        dim: width of every table, and so of the bottom MLP's last layer.
        bottom: sizes of the bottom MLP before that layer.
        top: sizes of the top MLP before the logit.
        interaction: `"cat"` (the default, as in the zoo) gives the top MLP the bottom's output and all rows side by
            side; `"dot"` (as in the paper) gives it the bottom's output and the products of every two of these vectors.
        dropout: share of inputs of the top MLP's layers set to 0 in training.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        schema: Schema,
        dim: int = 16,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
        interaction: Literal["cat", "dot"] = "cat",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if interaction not in INTERACTIONS:
            raise ValueError(f"`interaction` must be one of {', '.join(INTERACTIONS)}, got {interaction!r}")
        self.dim, self.interaction = dim, interaction
        self.embeddings = embeddings
        self.bottom = stack(len(schema.numeric), (*bottom, dim))
        vectors = len(schema.fields) + 1
        width = vectors * dim if interaction == "cat" else dim + vectors * (vectors - 1) // 2
        self.top = nn.Sequential(*stack(width, top, dropout=dropout), nn.Linear(top[-1], 1))
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    @staticmethod
    def lookups(schema: Schema, optimizer: Optimizer, dim: int = 16) -> list[Lookup]:
        """One table a field."""
        return [Lookup(field.name, field, dim, optimizer) for field in schema.fields]

    def forward(self, inputs: Inputs, numeric: Tensor) -> Tensor:
        """Logits `[B]` of ids and numbers `[B, n]`."""
        bottom = self.bottom(numeric)  # [B, dim]
        together = torch.cat([bottom, self.embeddings(inputs)], 1)  # [B, vectors * dim]
        if self.interaction == "dot":
            vectors = together.view(len(together), -1, self.dim)
            products = torch.bmm(vectors, vectors.transpose(1, 2))
            together = torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], 1)
        logits: Tensor = self.top(together)
        return logits.squeeze(1)
