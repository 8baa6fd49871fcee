"""`LinearModel`: a weight for every id and every number, summed; TensorFlow's `linear_model`."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...optim import Optimizer
from ..tables import Tables
from .column import CategoricalColumn, FeatureColumn, Features, check_batch, check_size
from .embedding import EmbeddingTable, check_combiner
from .layer import InputLayer, in_order
from .lookup import ColumnTables, Lookup, Options, moved
from .sequence_column import check_not_sequence

BIAS = "bias_weights"


class LinearModel(nn.Module):
    """`bias + Σ weights of ids + Σ number * weights`, `[B, units]`. All weights start at 0.

    Categorical columns (bucketized ones too) are taken by id, all in one launch; dense columns by matrix product.

    Args:
        feature_columns: categorical and dense columns.
        units: width of the output.
        sparse_combiner: how the ids of an example are put together: "sum", "mean" or "sqrtn".
        optimizer: of the weights of ids, stepped by `FusedOptimizer(model)`.
        update: when those change, as of `InputLayer`.
        device: where all weights live.
        trainable: whether the weights learn.
        do_fusion: False takes plain PyTorch operations.

    Attributes:
        dense_weights: weights of dense columns, `[width, units]` by name, and the bias as "bias_weights".
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn],
        units: int = 1,
        sparse_combiner: str = "sum",
        optimizer: Optimizer | str | None = None,
        update: Literal["step", "backward", "autograd"] = "step",
        device: Any = None,
        trainable: bool = True,
        do_fusion: bool = True,
    ) -> None:
        super().__init__()
        check_size("units", units)
        check_combiner("sparse_combiner", sparse_combiner)
        columns = in_order(feature_columns)
        self.units = units
        self.categorical = [column for column in columns if isinstance(column, CategoricalColumn)]
        for column in self.categorical:
            check_not_sequence(column, "a column")
        dense = [column for column in columns if not isinstance(column, CategoricalColumn)]
        lookups = [
            Lookup(
                column.name, column, EmbeddingTable(column.name, units, 0.0, trainable=trainable), sparse_combiner,
                do_fusion,
            )
            for column in self.categorical
        ]  # fmt: skip
        self.tables = ColumnTables(lookups, Options(optimizer, update, device)) if lookups else None
        self.dense = InputLayer(dense, optimizer, update, device) if dense else None
        self.dense_weights = Tables()
        for one in self.dense.columns if self.dense is not None else ():
            self.dense_weights.put(one.name, nn.Parameter(torch.zeros(one.width, units, device=device)))
        self.dense_weights.put(BIAS, nn.Parameter(torch.zeros(units, device=device)))
        self.dense_weights.requires_grad_(trainable)

    def forward(self, features: Mapping[str, Any]) -> Tensor:
        """The sums of a batch, `[B, units]`; features as of `InputLayer`."""
        out = self.dense_weights[BIAS]
        device = out.device
        sizes: dict[str, int] = {}
        if self.tables is not None:
            batch = Features(features)
            bags = {column.name: column.ids(batch) for column in self.categorical}
            sizes = {name: one.offsets.shape[0] - 1 for name, one in bags.items()}
            check_batch(sizes, sizes.values())
            fused, plain = self.tables(moved(bags, device))
            parts = list(plain.values())
            if fused is not None:
                parts.append(fused.unflatten(1, (-1, self.units)).sum(1))
            for part in parts:
                out = out + part
        if self.dense is not None:
            numbers = self.dense(features)
            first = next(iter(sizes), None)
            if first is not None:
                check_batch([first, self.dense.columns[0].name], [sizes[first], numbers.shape[0]])
            weights = torch.cat([self.dense_weights[column.name] for column in self.dense.columns])
            out = out + numbers.to(device, weights.dtype) @ weights
        return out

    def extra_repr(self) -> str:
        return f"{len(self.categorical)} categorical columns, units={self.units}"


def linear_model(feature_columns: Iterable[FeatureColumn], units: int = 1, sparse_combiner: str = "sum",
                 **options: Any) -> LinearModel:  # fmt: skip
    """`LinearModel(feature_columns, units, sparse_combiner, **options)`: a module, to be called with the features."""
    return LinearModel(feature_columns, units, sparse_combiner, **options)
