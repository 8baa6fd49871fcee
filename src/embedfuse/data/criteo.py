"""Criteo's click logs: the Kaggle text layout (tab-separated, no header) or Parquet, read in a stream.

- A category becomes `Fingerprint64(its bytes) mod buckets`, which is TensorFlow's `to_hash_bucket_fast` and what
  DeepRec's model zoo feeds its tables (10,000 buckets each). A missing one is hashed as the empty string.
- A number `x` becomes `log(1 + max(x, 0))`, a missing one 0.
- Held out is every seventh line (7, 14, …), unless a second file is given for testing.
- Training shuffles within blocks of about 8 MiB, so the file is read once from front to back and memory stays small.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from .criteo_files import CATEGORIES, NUMBERS, BadLines, Chunk, read_chunks
from .farmhash import fingerprint64
from .schema import Batch, Field, Ids, Ragged, Schema

EVERY = 7
TESTED, VALIDATED = 0, 3
"""Lines whose number leaves this remainder modulo `EVERY`."""
BUCKETS = 10_000


@dataclass(frozen=True)
class CriteoDataset:
    """A file of click logs as a data set that is never held in memory.

    Args:
        path: text (`.gz` and the like are undone) or `.parquet`.
        test_path: rows to test on; None holds out every seventh line of `path`.
        buckets: rows of each table.

    Raises:
        DataError: a file that is missing, empty, or not of this layout.
    """

    path: Path
    test_path: Path | None = None
    buckets: int = BUCKETS
    bad: BadLines = field(default_factory=BadLines, compare=False)
    test_bad: BadLines = field(default_factory=BadLines, compare=False)

    name = "criteo"

    def __post_init__(self) -> None:
        if self.buckets < 1:
            raise ValueError(f"`buckets` must be at least 1, got {self.buckets}")
        # a file that cannot be used is told of before anything is trained
        for path in (self.path, self.test_path):
            if path is not None:
                next(read_chunks(path, BadLines()))

    @property
    def schema(self) -> Schema:
        """26 fields of as many ids as there are buckets, 13 numbers."""
        return Schema(tuple(Field(name, self.buckets) for name in CATEGORIES), NUMBERS)

    def train_batches(
        self, batch_size: int, seed: int, epoch: int, start: int = 0, validating: bool = False
    ) -> Iterator[Batch]:
        """Batches of one reading; with `start`, what comes before is read and passed over. See `Dataset`."""
        batches = _in_batches(self._train_parts(seed, epoch, validating), batch_size, keep_rest=False)
        return itertools.islice(batches, start, None)

    def train_steps(self, batch_size: int) -> int | None:
        """Unknown before the end of the file."""
        return None

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """The training rows of lines 3, 10, …"""
        return _in_batches(self._chosen(self.path, self.bad, VALIDATED), batch_size, keep_rest=True)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """The held-out rows in order."""
        if self.test_path is None:
            parts = self._chosen(self.path, self.bad, TESTED)
        else:
            parts = self._chosen(self.test_path, self.test_bad, None)
        return _in_batches(parts, batch_size, keep_rest=True)

    def describe(self) -> dict[str, Any]:
        """The files, the hash, and the bad lines met so far."""
        return {
            "name": self.name,
            "path": str(self.path),
            "test_path": str(self.test_path or f"every {EVERY}th line of path"),
            "hash": f"FarmHash Fingerprint64 mod {self.buckets}",
            "bad_lines": self.bad.count + self.test_bad.count,
            "first_bad_lines": self.bad.describe() + self.test_bad.describe(),
        }

    def _train_parts(self, seed: int, epoch: int, validating: bool) -> Iterator[Batch]:
        for chunk in read_chunks(self.path, self.bad):
            remainder = chunk.lines % EVERY
            tested = (remainder == TESTED) & (self.test_path is None)
            rows = np.flatnonzero(~tested & ~((remainder == VALIDATED) & validating))
            yield encode(chunk, np.random.default_rng((seed, epoch, chunk.number)).permutation(rows), self.buckets)

    def _chosen(self, path: Path, bad: BadLines, remainder: int | None) -> Iterator[Batch]:
        for chunk in read_chunks(path, bad):
            rows = np.arange(len(chunk.lines))
            yield encode(chunk, rows if remainder is None else rows[chunk.lines % EVERY == remainder], self.buckets)


def encode(chunk: Chunk, rows: NDArray[np.int64], buckets: int) -> Batch:
    """Those rows of a chunk with categories hashed and numbers transformed."""
    ids: dict[str, Ids | Ragged] = {
        name: hash_buckets(column, buckets)[rows] for name, column in zip(CATEGORIES, chunk.categories, strict=True)
    }
    numbers = np.log1p(np.maximum(np.nan_to_num(chunk.numbers[rows], nan=0.0), 0.0))
    return Batch(ids, numbers.astype(np.float32), chunk.labels[rows])


def hash_buckets(column: pa.Array, buckets: int) -> NDArray[np.int32]:
    """`Fingerprint64(value) mod buckets` of a column of bytes without nulls; each distinct value is hashed once."""
    encoded = column.dictionary_encode()
    values = encoded.dictionary
    _, offsets_buffer, data = values.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    bytes_ = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    fingerprints = fingerprint64(bytes_, offsets[:-1], np.diff(offsets))
    found: NDArray[np.int32] = (fingerprints % np.uint64(buckets)).astype(np.int32)[encoded.indices.to_numpy()]
    return found


def _in_batches(parts: Iterator[Batch], batch_size: int, keep_rest: bool) -> Iterator[Batch]:
    """The rows of `parts` cut anew; what is left at the end is dropped unless asked for, or unless it is all."""
    waiting: list[Batch] = []
    count, made = 0, 0
    for part in parts:
        waiting.append(part)
        count += len(part)
        if count >= batch_size:
            together = _joined(waiting)
            for begin in range(0, count - batch_size + 1, batch_size):
                yield _sliced(together, begin, begin + batch_size)
                made += 1
            waiting = [_sliced(together, count - count % batch_size, count)]
            count %= batch_size
    if count and (keep_rest or not made):
        yield _joined(waiting)


def _joined(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    columns = {name: [np.asarray(part.ids[name], np.int32) for part in parts] for name in CATEGORIES}
    return Batch(
        {name: np.concatenate(pieces) for name, pieces in columns.items()},
        np.concatenate([part.numeric for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


def _sliced(batch: Batch, begin: int, end: int) -> Batch:
    return Batch(
        {name: np.asarray(ids, np.int32)[begin:end] for name, ids in batch.ids.items()},
        batch.numeric[begin:end],
        batch.labels[begin:end],
    )
