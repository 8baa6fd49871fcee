"""Made-up clicks with a known cause: ids as skewed as real ones, and a label drawn from a hidden model of them.

For smoke runs and benchmarks: any size, no download, the same rows for the same seed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .memory import InMemoryDataset
from .schema import Field, Ids, Ragged, Schema

EVERY = 7


@dataclass(frozen=True)
class SyntheticSize:
    """How much is made.

    Attributes:
        rows: of all, every seventh of which is held out.
        fields: categorical columns of one id a row; one ragged column comes on top.
        vocabulary_size: rows of each table.
        numeric: numeric columns.
        zipf: exponent of the ids' popularity, > 0; 0 makes them uniform.
        longest: of the ragged bags, whose length is uniform from 0.
    """

    rows: int = 50_000
    fields: int = 8
    vocabulary_size: int = 1000
    numeric: int = 4
    zipf: float = 1.05
    longest: int = 6

    def __post_init__(self) -> None:
        for name, least in (("rows", EVERY), ("fields", 1), ("vocabulary_size", 1), ("numeric", 1), ("longest", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}")


def load_synthetic(size: SyntheticSize | None = None, seed: int = 0) -> InMemoryDataset:
    """Rows whose log-odds are a sum over ids, the ragged bag's weighted mean and the numbers, and one product.

    The product of a number with a property of an id is what no linear model of the columns can follow.
    """
    size = size or SyntheticSize()
    random = np.random.default_rng(seed)
    columns: dict[str, Ids | Ragged] = {}
    logit = np.full(size.rows, -1.0)
    for number in range(size.fields):
        ids = zipf_ids(random, size.rows, size)
        columns[f"field_{number}"] = ids
        logit += 0.3 * random.standard_normal(size.vocabulary_size)[ids]
    lengths = random.integers(0, size.longest + 1, size.rows)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    bag_ids = zipf_ids(random, int(offsets[-1]), size)
    weights = random.uniform(0.1, 1.0, len(bag_ids)).astype(np.float32)
    columns["bag"] = Ragged(bag_ids, offsets, weights)
    row = np.repeat(np.arange(size.rows), lengths)
    effects = 0.5 * random.standard_normal(size.vocabulary_size)[bag_ids] * weights
    total = np.bincount(row, weights, size.rows)
    logit += np.bincount(row, effects, size.rows) / np.where(total > 0, total, 1.0)
    numeric = random.standard_normal((size.rows, size.numeric)).astype(np.float32)
    logit += numeric @ (0.3 * random.standard_normal(size.numeric))
    first = columns["field_0"]
    assert isinstance(first, np.ndarray)
    logit += np.where(first % 2 == 0, 1.5, -1.5) * np.sign(numeric[:, 0])
    labels = (random.random(size.rows) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    place = np.arange(size.rows)
    return InMemoryDataset(
        name="synthetic",
        schema=Schema(
            (
                *(Field(f"field_{number}", size.vocabulary_size) for number in range(size.fields)),
                Field("bag", size.vocabulary_size, ragged=True),
            ),
            tuple(f"number_{number}" for number in range(size.numeric)),
        ),
        columns=columns,
        numeric=numeric,
        labels=labels,
        train=np.flatnonzero(place % EVERY != 0),
        test=np.flatnonzero(place % EVERY == 0),
        validation=np.flatnonzero(place % EVERY == 3),
        facts={"zipf": size.zipf, "vocabulary_size": size.vocabulary_size},
    )


def zipf_ids(random: np.random.Generator, count: int, size: SyntheticSize) -> NDArray[np.int32]:
    """Ids of which the k-th most popular has probability ∝ `k ** -zipf`; which id is popular is itself drawn."""
    share = np.arange(1, size.vocabulary_size + 1, dtype=np.float64) ** -size.zipf
    rank = np.searchsorted(np.cumsum(share) / share.sum(), random.random(count))
    names = random.permutation(size.vocabulary_size).astype(np.int32)
    ids: NDArray[np.int32] = names[np.minimum(rank, size.vocabulary_size - 1)]
    return ids
