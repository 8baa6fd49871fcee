"""The embedding part of a model, twice: as one `EmbeddingCollection`, and as one `torch.nn.EmbeddingBag` per table.

Both take the same inputs, give the same `[B, sum of dims]`, and start from the same weights if seeded alike, so a model
that is given one or the other differs in nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import FeatureConfig, TableConfig
from ..data.schema import Field
from ..optim import Optimizer
from ..torch import Bags, EmbeddingCollection, FusedOptimizer
from ..torch.initializers import initialize
from .torch_optimizers import TorchOptimizers, moves_only_touched

Gradients = Literal["auto", "sparse", "dense"]
DENSE_ROWS = 5000
"""Tables up to this size get dense gradients by `"auto"`."""

Inputs = Mapping[str, Tensor | Bags]
"""Ids by the name of their field: `[B]`, or `Bags` for a ragged one."""


@dataclass(frozen=True)
class Lookup:
    """One table and the field that is looked up in it.

    Attributes:
        name: of the table and of its piece of the output.
        field: where the ids come from; several lookups may read one field.
        dim: width of a row.
        optimizer: how the table learns.
        initializer: as in `TableConfig`.
    """

    name: str
    field: Field
    dim: int
    optimizer: Optimizer
    initializer: Any = None

    def table(self) -> TableConfig:
        """The table as the engine is told of it. A bag of several ids is their weighted mean."""
        return TableConfig(self.field.vocabulary_size, self.dim, self.initializer, self.optimizer, "mean", self.name)


class FusedEmbeddings(nn.Module):
    """All lookups in one launch, and all tables updated in one pass.

    Args:
        lookups: the tables.
        device: where they live.
        update: as of `EmbeddingCollection`; "autograd" leaves the tables to any torch optimizer.
    """

    def __init__(
        self,
        lookups: Sequence[Lookup],
        device: torch.device | None = None,
        update: Literal["step", "backward", "autograd"] = "step",
    ) -> None:
        super().__init__()
        self._fields = {lookup.name: lookup.field.name for lookup in lookups}
        self.collection = EmbeddingCollection(
            {lookup.name: FeatureConfig(lookup.table()) for lookup in lookups}, device=device, update=update
        )

    def forward(self, inputs: Inputs) -> Tensor:
        """The rows of every lookup side by side, `[B, sum of dims]`."""
        return self.collection.concatenated({name: inputs[field] for name, field in self._fields.items()})

    def weights(self) -> dict[str, nn.Parameter]:
        """The tables by name."""
        return {name: self.collection.tables[name] for name in self._fields}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of all tables."""
        return FusedOptimizer(self)


class UnfusedEmbeddings(nn.Module):
    """One `torch.nn.EmbeddingBag` per lookup, as a PyTorch user writes it, updated by `torch.optim`.

    Args:
        lookups: the tables.
        device: where they live.
        gradients: what `EmbeddingBag` is asked for. `"sparse"` touches only the rows of the batch, `"dense"` whole
            tables, which is quicker where they are small; `"auto"` chooses for each table. Where a dense step would
            move rows that were not looked up, as with Adam, it is sparse in any case.
    """

    def __init__(
        self,
        lookups: Sequence[Lookup],
        device: torch.device | None = None,
        gradients: Gradients = "auto",
    ) -> None:
        super().__init__()
        self.lookups = tuple(lookups)
        self._sparse = {lookup.name: _is_sparse(lookup, gradients) for lookup in lookups}
        self.tables = nn.ModuleDict()
        for lookup in lookups:
            weight = torch.empty(lookup.field.vocabulary_size, lookup.dim, device=device)
            initialize(weight, lookup.table())
            self.tables[lookup.name] = nn.EmbeddingBag.from_pretrained(
                weight,
                freeze=False,
                # torch takes weights per id with "sum" only, so a weighted mean is a sum with divided weights
                mode="sum" if lookup.field.ragged else "mean",
                sparse=self._sparse[lookup.name],
                include_last_offset=lookup.field.ragged,
            )

    def forward(self, inputs: Inputs) -> Tensor:
        """The rows of every lookup side by side, `[B, sum of dims]`."""
        shares: dict[str, Tensor] = {}
        rows = []
        for lookup in self.lookups:
            value, table = inputs[lookup.field.name], self.tables[lookup.name]
            if isinstance(value, Bags):
                if lookup.field.name not in shares:
                    shares[lookup.field.name] = weight_shares(value)
                ids, offsets = value.ids, value.offsets.to(value.ids.dtype)
                rows.append(table(ids, offsets, per_sample_weights=shares[lookup.field.name]))
            else:
                rows.append(table(value.unsqueeze(1)))
        return torch.cat(rows, 1)

    def weights(self) -> dict[str, nn.Parameter]:
        """The tables by name."""
        return {lookup.name: self.tables[lookup.name].weight for lookup in self.lookups}  # type: ignore[misc]

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of all tables: those of `torch.optim` where there is one, see `TorchOptimizers`."""
        weights = self.weights()
        return TorchOptimizers(
            [(weights[lookup.name], lookup.optimizer, self._sparse[lookup.name]) for lookup in self.lookups]
        )


def _is_sparse(lookup: Lookup, gradients: Gradients) -> bool:
    if gradients == "sparse" or not moves_only_touched(lookup.optimizer):
        return True
    return gradients == "auto" and lookup.field.vocabulary_size > DENSE_ROWS


def weight_shares(bags: Bags) -> Tensor:
    """Each id's weight divided by the sum of its bag's, `[N]`."""
    weights = bags.weights if bags.weights is not None else torch.ones(len(bags.ids), device=bags.ids.device)
    lengths = bags.offsets[1:] - bags.offsets[:-1]
    bag = torch.repeat_interleave(lengths, output_size=len(bags.ids))
    totals = torch.zeros(len(lengths), dtype=weights.dtype, device=weights.device).index_add_(0, bag, weights)
    return weights / totals[bag]
