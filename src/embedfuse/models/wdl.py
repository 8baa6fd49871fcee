"""Wide & Deep (Cheng et al., 2016) in the shape of DeepRec's model zoo."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..data.schema import Schema
from ..optim import FTRL, Optimizer
from .dense import stack
from .embeddings import Inputs, Lookup

DIM = 64
WIDE_DIM = 128
WIDE_FIELDS = frozenset({"C3", "C4", "C10", "C12", "C16", "C21", "C24", "C26"})
"""Criteo's largest vocabularies, which the zoo gives wider tables."""


class WDL(nn.Module):
    """A linear model of the ids (wide) beside a deep network over their rows, their logits added.

    The zoo's sizes by default: tables of width 64 (128 for the eight largest of Criteo), deep part 1024-512-256, no
    batch normalisation; one weight per id in the wide part, a table of width 1 that FTRL steps, while the deep part's
    tables have the optimizer asked for. The numbers' wide weights belong to the dense optimizer, in the zoo to FTRL.

    Args:
        embeddings: gives the deep rows and then one wide weight a field.
        schema: the columns.
        dim: width of all deep tables; None for the zoo's.
        deep: sizes of the deep part before its logit.
        dropout: share of outputs of the deep part's layers set to 0 in training.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        schema: Schema,
        dim: int | None = None,
        deep: Sequence[int] = (1024, 512, 256),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width = sum(_dim(field.name, dim) for field in schema.fields)
        self.wide_width = len(schema.fields)
        self.embeddings = embeddings
        self.wide = nn.Linear(len(schema.numeric), 1)
        inputs = self.width + len(schema.numeric)
        self.deep = nn.Sequential(*stack(inputs, deep, batch_norm=False, dropout=dropout), nn.Linear(deep[-1], 1))

    @staticmethod
    def lookups(schema: Schema, optimizer: Optimizer, dim: int | None = None) -> list[Lookup]:
        """A deep and a wide table for each field."""
        linear = FTRL(learning_rate=0.2)
        deep = [Lookup(field.name, field, _dim(field.name, dim), optimizer) for field in schema.fields]
        return deep + [Lookup(f"{field.name}_wide", field, 1, linear, 0.0) for field in schema.fields]

    def forward(self, inputs: Inputs, numeric: Tensor) -> Tensor:
        """Logits `[B]` of ids and numbers `[B, n]`."""
        rows, weights = self.embeddings(inputs).split([self.width, self.wide_width], 1)
        deep: Tensor = self.deep(torch.cat([rows, numeric], 1))
        wide: Tensor = weights.sum(1, keepdim=True) + self.wide(numeric)
        return (deep + wide).squeeze(1)


def _dim(field: str, dim: int | None) -> int:
    if dim is not None:
        return dim
    return WIDE_DIM if field in WIDE_FIELDS else DIM
