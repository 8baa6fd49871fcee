"""DeepFM (Guo et al., 2017) in the shape of DeepRec's model zoo."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..data.schema import Schema
from ..optim import Optimizer
from .dense import stack
from .embeddings import Inputs, Lookup


class DeepFM(nn.Module):
    """First-order terms, products of every two rows (the factorisation machine), and a deep part, joined by a last MLP.

    The zoo's sizes by default: tables of width 16, deep part 1024-256-32, joining part 128-64, batch normalisation
    after every layer. As in the paper the machine and the deep part read the same tables; the zoo's graph makes every
    table twice, by an accident of TensorFlow's variable names. The loss here is cross entropy, in the zoo it is squared
    error.

    Args:
        embeddings: gives `[B, fields * dim + fields]`, the rows and then the first-order terms.
        schema: the columns.
        dim: width of the tables.
        deep: sizes of the deep part.
        final: sizes of the joining part before the logit.
        dropout: share of outputs of the deep part's layers set to 0 in training.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        schema: Schema,
        dim: int = 16,
        deep: Sequence[int] = (1024, 256, 32),
        final: Sequence[int] = (128, 64),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.terms = dim, len(schema.fields)
        self.width = dim * self.terms
        self.embeddings = embeddings
        self.linear = nn.Linear(len(schema.numeric), 1)
        self.deep = stack(self.width + len(schema.numeric), deep, dropout=dropout)
        self.final = nn.Sequential(*stack(1 + dim + deep[-1], final), nn.Linear(final[-1], 1))

    @staticmethod
    def lookups(schema: Schema, optimizer: Optimizer, dim: int = 16) -> list[Lookup]:
        """A table of rows and one of first-order terms for each field."""
        rows = [Lookup(field.name, field, dim, optimizer) for field in schema.fields]
        terms = [Lookup(f"{field.name}_term", field, 1, optimizer, 0.0) for field in schema.fields]
        return rows + terms

    def forward(self, inputs: Inputs, numeric: Tensor) -> Tensor:
        """Logits `[B]` of ids and numbers `[B, n]`."""
        rows, terms = self.embeddings(inputs).split([self.width, self.terms], 1)
        first = terms.sum(1, keepdim=True) + self.linear(numeric)  # [B, 1]
        vectors = rows.view(len(rows), -1, self.dim)
        second = (vectors.sum(1).square() - vectors.square().sum(1)) / 2  # [B, dim]
        deep = self.deep(torch.cat([rows, numeric], 1))
        logits: Tensor = self.final(torch.cat([first, second, deep], 1))
        return logits.squeeze(1)
