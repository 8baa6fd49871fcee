"""Logistic regression: one weight per id and per number, the baseline every ranker must beat."""

from torch import Tensor, nn

from ..data.schema import Schema
from ..optim import SGD, Optimizer
from .embeddings import FusedEmbeddings, Inputs, Lookup


class LogisticRegression(nn.Module):
    """`logit = bias + Σ weight[id] + Σ weight · number`; a ragged field adds the weighted mean of its ids' weights."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        # ordinary gradients, since a penalty moves every weight in every step
        self.embeddings = FusedEmbeddings(self.lookups(schema, SGD()), update="autograd")
        self.numbers = nn.Linear(len(schema.numeric), 1)
        nn.init.zeros_(self.numbers.weight)
        nn.init.zeros_(self.numbers.bias)

    @staticmethod
    def lookups(schema: Schema, optimizer: Optimizer) -> list[Lookup]:
        """A table of width 1 for each field."""
        return [Lookup(field.name, field, 1, optimizer, 0.0) for field in schema.fields]

    def forward(self, inputs: Inputs, numeric: Tensor) -> Tensor:
        """Logits `[B]` of ids and numbers `[B, n]`."""
        total: Tensor = self.embeddings(inputs).sum(1) + self.numbers(numeric).squeeze(1)
        return total
