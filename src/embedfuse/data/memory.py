"""A data set that lies in memory as columns; batches are gathered from it by row number."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .schema import Batch, Floats, Ids, Ragged, Schema


@dataclass(frozen=True)
class InMemoryDataset:
    """Columns of all rows, and which rows are for what.

    Attributes:
        columns: ids of each field of the schema, `[rows]`, or `Ragged` with one bag a row.
        numeric: `[rows, n]`.
        labels: `[rows]`, 0 or 1.
        train, test: row numbers. No row is in both.
        validation: row numbers, a part of `train`.
        facts: what `describe` adds to the counts.
    """

    name: str
    schema: Schema
    columns: Mapping[str, Ids | Ragged]
    numeric: Floats
    labels: Floats
    train: NDArray[np.int64]
    test: NDArray[np.int64]
    validation: NDArray[np.int64]
    facts: dict[str, Any] = field(default_factory=dict)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """The rows of those numbers, in that order."""
        ids = {
            name: column.take(indices) if isinstance(column, Ragged) else column[indices]
            for name, column in self.columns.items()
        }
        return Batch(ids, self.numeric[indices], self.labels[indices])

    def train_batches(
        self, batch_size: int, seed: int, epoch: int, start: int = 0, validating: bool = False
    ) -> Iterator[Batch]:
        """Batches of one epoch in an order drawn from `(seed, epoch)`; see `Dataset`."""
        rows = np.setdiff1d(self.train, self.validation) if validating else self.train
        order = np.random.default_rng((seed, epoch)).permutation(rows)
        for step in range(start, max(1, len(rows) // batch_size)):
            yield self.batch(order[step * batch_size : (step + 1) * batch_size])

    def train_steps(self, batch_size: int) -> int:
        """Batches of one epoch."""
        return max(1, len(self.train) // batch_size)

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """The validation rows in order."""
        return self._in_order(self.validation, batch_size)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """The held-out rows in order."""
        return self._in_order(self.test, batch_size)

    def _in_order(self, rows: NDArray[np.int64], batch_size: int) -> Iterator[Batch]:
        for begin in range(0, len(rows), batch_size):
            yield self.batch(rows[begin : begin + batch_size])

    def describe(self) -> dict[str, Any]:
        """Row counts, share of positives, and `facts`."""
        return {
            "name": self.name,
            "train_rows": len(self.train),
            "test_rows": len(self.test),
            "positive_share_train": round(float(self.labels[self.train].mean()), 4),
            "positive_share_test": round(float(self.labels[self.test].mean()), 4),
            **self.facts,
        }
