"""What a data set is to a model: named fields of ids, some numbers, and a label, in batches of NumPy arrays.

No tensor library is known here; `training/inputs.py` hands the arrays to PyTorch without copying them.

Letters: B rows of a batch, N ids of a ragged field, n numeric columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32] | NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Field:
    """One categorical column.

    Attributes:
        name: unique in its schema.
        vocabulary_size: ids are in `[0, vocabulary_size)`.
        ragged: any number of weighted ids a row (`Ragged`) instead of exactly one.
    """

    name: str
    vocabulary_size: int
    ragged: bool = False


@dataclass(frozen=True)
class Schema:
    """The columns of a data set: `fields` of ids, then `numeric` columns by name."""

    fields: tuple[Field, ...]
    numeric: tuple[str, ...]


class Ragged(NamedTuple):
    """Bags in CSR form: row `r` owns `ids[offsets[r]:offsets[r + 1]]` and the weights at the same places."""

    ids: Ids  # [N]
    offsets: NDArray[np.int64]  # [B + 1]
    weights: Floats  # [N]

    def take(self, rows: NDArray[np.int64]) -> "Ragged":
        """The bags of those rows, in that order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.ids[positions], offsets, self.weights[positions])


@dataclass(frozen=True)
class Batch:
    """Rows ready for a model."""

    ids: dict[str, Ids | Ragged]  # every field of the schema: [B], or B bags
    numeric: Floats  # [B, n]
    labels: Floats  # [B], 0 or 1

    def __len__(self) -> int:
        return len(self.labels)


class Dataset(Protocol):
    """What training asks of a data set, whether it lies in memory or is read in a stream."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Schema: ...

    def train_batches(
        self, batch_size: int, seed: int, epoch: int, start: int = 0, validating: bool = False
    ) -> Iterator[Batch]:
        """The batches of one epoch from number `start` on, always the same ones for the same arguments.

        An incomplete last batch is left out, unless it is the only one.

        Args:
            batch_size: rows of a batch.
            seed, epoch: what the order is drawn from.
            start: number of the first batch to give.
            validating: leave the validation rows out.
        """
        ...

    def train_steps(self, batch_size: int) -> int | None:
        """Batches of one epoch, or None if only reading to the end can tell."""
        ...

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """A part of the *training* rows, for early stopping and other choices that must not see the test rows."""
        ...

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """All rows held out, in order, the last batch as short as it comes."""
        ...

    def describe(self) -> dict[str, Any]:
        """Counts and choices worth recording with a result, as plain data."""
        ...


class DataError(ValueError):
    """The data cannot be used; the message says which file or line and what to do."""
