"""`InputLayer`: columns of a batch side by side, as TensorFlow's `input_layer` has them."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...optim import Optimizer
from .column import CategoricalColumn, DenseColumn, FeatureColumn, Features, check_batch
from .embedding import EmbeddingColumn
from .lookup import ColumnTables, Lookup, Options, moved
from .sequence_column import check_not_sequence


class InputLayer(nn.Module):
    """All columns of a model as one tensor `[B, sum of widths]`, in the order of their names, as in TensorFlow.

    All embedding columns with `do_fusion` are looked up in one launch. Their tables are parameters of the collection
    `tables.fused`, to be stepped by `FusedOptimizer(layer)`; those of columns without are ordinary parameters, for
    any torch optimizer.

    Args:
        columns: dense columns: embedding, indicator, numeric and bucketized ones.
        optimizer: of the fused tables; an `Optimizer` or its name.
        update: when rows change: "step", "backward" or "autograd", as of `EmbeddingCollection`.
        device: where the tables live. Features may come from the CPU: they are brought there.
        grad: in "autograd" mode, and for columns without fusion, "dense" or "sparse" gradients.

    `layer.half()` and the like change tables and numbers.

    Attributes:
        columns: in the order of the output.
        slices: for each column's name, its place in the second dimension of the output.

    Raises:
        TypeError: something that is not a dense column.
        ValueError: no columns, two of one name, or columns of sequences.
    """

    def __init__(
        self,
        columns: Iterable[FeatureColumn],
        optimizer: Optimizer | str | None = None,
        update: Literal["step", "backward", "autograd"] = "step",
        device: Any = None,
        *,
        grad: Literal["dense", "sparse"] = "dense",
    ) -> None:
        super().__init__()
        self.columns = [_dense(column) for column in in_order(columns)]
        self.slices: dict[str, slice] = {}
        self.width = 0
        for column in self.columns:
            self.slices[column.name] = slice(self.width, self.width + column.width)
            self.width += column.width
        lookups = [
            Lookup(column.name, column.categorical_column, column.table, column.combiner, column.do_fusion)
            for column in self.columns
            if isinstance(column, EmbeddingColumn)
        ]
        self.tables = ColumnTables(lookups, Options(optimizer, update, device, grad)) if lookups else None
        self._device = None if device is None else torch.device(device)
        # follows `.half()` and the like, which numbers do, too; columns make them in float32
        self._numbers: Tensor
        self.register_buffer("_numbers", torch.empty(0, device=self._device or "cpu"), persistent=False)

    def forward(self, features: Mapping[str, Any]) -> Tensor:
        """The columns of a batch.

        Args:
            features: by key; each a tensor, `Bags`, `SparseIds`, jagged nested tensor, list, NumPy array, pyarrow
                array, or column of a data frame. Those that are not columns' are ignored.

        Raises:
            ValueError: a feature is missing, or has another batch size or shape.
            TypeError: a feature is of another kind than its column.
            IndexError: an id is too large for its column.
        """
        batch = Features(features)
        bags, dense = {}, {}
        for column in self.columns:
            if isinstance(column, EmbeddingColumn):
                bags[column.name] = column.categorical_column.ids(batch)
            else:
                dense[column.name] = column.dense(batch)
        check_batch(
            [*bags, *dense],
            [*(one.offsets.shape[0] - 1 for one in bags.values()), *(one.shape[0] for one in dense.values())],
        )
        device = self._place(dense)
        dtype = self._numbers.dtype
        dense = {name: numbers.to(device, dtype, non_blocking=True) for name, numbers in dense.items()}
        fused = None
        if self.tables is not None:
            fused, plain = self.tables(moved(bags, device))
            dense.update(plain)
        pieces = self._pieces(fused, dense)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def _place(self, dense: Mapping[str, Tensor]) -> torch.device:
        """Where the output is: with the tables; without any, where it was asked for, or where its numbers are."""
        if self.tables is not None:
            return self.tables.device
        if self._device is not None:
            return self._device
        devices = [numbers.device for numbers in dense.values()]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def _pieces(self, fused: Tensor | None, others: Mapping[str, Tensor]) -> list[Tensor]:
        """What to put side by side; fused columns that stay neighbours in one piece."""
        pieces: list[Tensor] = []
        begin = end = 0
        for column in self.columns:
            if column.name not in others:
                end += column.width
                continue
            if fused is not None and end > begin:
                pieces.append(fused[:, begin:end])
                begin = end
            pieces.append(others[column.name])
        if fused is not None and end > begin:
            pieces.append(fused if not pieces else fused[:, begin:end])
        return pieces

    def extra_repr(self) -> str:
        return f"{len(self.columns)} columns, {self.width} wide"


def in_order(columns: Iterable[FeatureColumn]) -> list[FeatureColumn]:
    """Columns sorted by name.

    Raises:
        TypeError: no columns, but something else.
        ValueError: none, or two of one name.
    """
    if isinstance(columns, FeatureColumn):
        columns = [columns]
    if isinstance(columns, Mapping):
        raise TypeError("`columns` must be a list of columns, got a dict: features are given when the layer is called")
    found = list(columns)
    if not found:
        raise ValueError("`columns` must hold at least one column, got none")
    for column in found:
        if not isinstance(column, FeatureColumn):
            raise TypeError(f"`columns` must hold feature columns, got {type(column).__name__}: {column!r}")
    found.sort(key=lambda column: column.name)
    for before, after in pairwise(found):
        if before.name == after.name:
            raise ValueError(
                f"`columns` must have different names, got {after.name!r} twice: drop one, or give its feature to the "
                "batch a second time under another key"
            )
    return found


def _dense(column: FeatureColumn) -> DenseColumn:
    if isinstance(column, EmbeddingColumn):
        check_not_sequence(column.categorical_column, "embedding_column")
    if isinstance(column, DenseColumn):
        return column
    if isinstance(column, CategoricalColumn):
        check_not_sequence(column, "a column")
        raise TypeError(
            f"`columns` must be dense, got the categorical column {column.name!r}: wrap it in embedding_column or "
            "indicator_column"
        )
    raise TypeError(f"`columns` must be dense columns, got {type(column).__name__}")
