"""`SequenceInputLayer`: embedded sequences side by side, as TensorFlow's `SequenceFeatures` has them."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...optim import Optimizer
from ..bags import Bags
from .column import FeatureColumn, Features
from .embedding import EmbeddingColumn
from .layer import in_order
from .lookup import ColumnTables, Lookup, Options, moved
from .sequence_column import SequenceCategoricalColumn


class SequenceInputLayer(nn.Module):
    """Embedding columns of sequence columns, each id's row by itself: `[B, L, sum of widths]`, zeros after the end.

    Args:
        columns: embedding or shared embedding columns of `sequence_categorical_column_with_…`.
        optimizer: of the tables, as of `InputLayer`.
        update: when rows change, as of `InputLayer`.
        device: where the tables live.
        max_length: L; sequences are cut to it. None takes the longest of the batch, which a GPU must be waited for.
    """

    def __init__(
        self,
        columns: Iterable[FeatureColumn],
        optimizer: Optimizer | str | None = None,
        update: Literal["step", "backward", "autograd"] = "step",
        device: Any = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        self.columns: list[EmbeddingColumn] = []
        for column in in_order(columns):
            if not isinstance(column, EmbeddingColumn) or not isinstance(
                column.categorical_column, SequenceCategoricalColumn
            ):
                raise TypeError(
                    f"`columns` must be embedding columns of sequence columns, got {column.name!r}: use "
                    "sequence_categorical_column_with_…, or InputLayer for what is no sequence"
                )
            self.columns.append(column)
        if max_length is not None and (isinstance(max_length, bool) or max_length < 1):
            raise ValueError(f"`max_length` must be an int of at least 1, or None, got {max_length!r}")
        self.max_length = max_length
        self.tables = ColumnTables(
            [Lookup(c.name, c.categorical_column, c.table, "sum", c.do_fusion) for c in self.columns],
            Options(optimizer, update, device),
        )

    def forward(self, features: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The rows `[B, L, sum of widths]`, and the lengths of the sequences, int64 `[B]`."""
        batch = Features(features, exact=True)
        given = moved({c.name: c.categorical_column.ids(batch) for c in self.columns}, self.tables.device)
        lengths = [bags.lengths() for bags in given.values()]
        for name, bags, length in zip(given, given.values(), lengths, strict=True):
            if bags.weights is not None:
                raise ValueError(f"the sequence of column {name!r} must have no weights: scale the rows instead")
            if length.shape != lengths[0].shape or (not length.is_cuda and not torch.equal(length, lengths[0])):
                raise ValueError(
                    f"sequences of one batch must have the same lengths in every column, got others in {name!r} than "
                    f"in {self.columns[0].name!r}: use a layer for each"
                )
        longest = int(lengths[0].max()) if len(lengths[0]) else 0
        most = longest if self.max_length is None else self.max_length
        apart = {name: _apart(bags, most) for name, bags in given.items()}
        fused, plain = self.tables(apart)
        begin, pieces = 0, []
        for column in self.columns:
            if column.name in plain:
                pieces.append(plain[column.name])
            else:
                assert fused is not None
                pieces.append(fused[:, begin : begin + column.width])
                begin += column.width
        out = torch.cat(pieces, 1)
        return out.reshape(-1 if most else len(lengths[0]), most, out.shape[1]), lengths[0].clamp(max=most)


def _apart(bags: Bags, length: int) -> Bags:
    """A bag for each of the first `length` places of each bag: of the id there, or of -1 after the end."""
    places = torch.arange(length, device=bags.device)
    here = places < bags.lengths()[:, None]
    count = bags.ids.shape[0]
    if count:
        # clamped, not masked: no size may depend on the data
        ids = bags.ids[(bags.offsets[:-1, None] + places).clamp(max=count - 1)].masked_fill(~here, -1)
    else:
        ids = bags.ids.new_full(here.shape, -1)
    return Bags(ids.reshape(-1), torch.arange(ids.numel() + 1, device=bags.device))
