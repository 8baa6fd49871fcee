"""Crosses: one id for each combination of the values of several features."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..bags import Bags
from .categorical import LARGEST, HashedCategoricalColumn, WeightedCategoricalColumn
from .column import CategoricalColumn, Features, check_size, to_ids
from .strings import U64, Strings, combined
from .values import Values

DEFAULT_HASH_KEY = 0xDECAFCAFFE


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> "CrossedColumn":
    """Hashes of all combinations of the values of an example, as TensorFlow's `SparseCross` makes them.

    Features that are given dense are taken as they are: their "" and -1 are values here, and, as in TensorFlow, they
    are combined after the others.

    Args:
        keys: two or more names of features (strings or integers), or categorical columns, which are crossed by their
            ids. A cross among them counts as the keys it is made of.
        hash_bucket_size: number of buckets.
        hash_key: start of the hash; None is TensorFlow's own.
    """
    return CrossedColumn(tuple(keys), hash_bucket_size, hash_key)


@dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    """See `crossed_column`."""

    keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None = None

    def __post_init__(self) -> None:
        check_size("hash_bucket_size", self.hash_bucket_size, LARGEST)
        if len(self.keys) < 2:
            raise ValueError(f"`keys` must hold at least two keys to cross, got {list(self.keys)}")
        for key in self.keys:
            if isinstance(key, HashedCategoricalColumn):
                raise ValueError(
                    f"`keys` must not hold a categorical_column_with_hash_bucket, got that of {key.key!r}: give the "
                    f"name {key.key!r} itself, which is hashed once instead of twice"
                )
            if isinstance(key, WeightedCategoricalColumn):
                raise ValueError(
                    f"`keys` must have no weights, which a cross has no use for, got {key.name!r}: cross its "
                    "`categorical_column`"
                )
            if not isinstance(key, (str, CategoricalColumn)) or key == "":
                raise TypeError(f"`keys` must be names of features or categorical columns, got {key!r}")

    @property
    def leaves(self) -> tuple[str | CategoricalColumn, ...]:
        """The keys, those of crosses inside among them."""
        return tuple(leaf for key in self.keys for leaf in (key.leaves if isinstance(key, CrossedColumn) else (key,)))

    @property
    def name(self) -> str:
        return "_X_".join(sorted(leaf if isinstance(leaf, str) else leaf.name for leaf in self.leaves))

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def ids(self, features: Features) -> Bags:
        host = features.on_host()
        given = [self._values(leaf, host) for leaf in self.leaves]
        # TensorFlow's kernel sees sparse inputs first
        given = [values for values in given if not values.padded] + [values for values in given if values.padded]
        sizes = [len(values) for values in given]
        if len(set(sizes)) > 1:
            raise ValueError(f"the features of column {self.name!r} must have one batch size, got {sizes}")
        crossed, offsets = self._cross(given)
        return Bags(to_ids(crossed % np.uint64(self.hash_bucket_size)), torch.from_numpy(offsets))

    def _values(self, leaf: str | CategoricalColumn, features: Features) -> Values:
        if isinstance(leaf, CategoricalColumn):
            bags = leaf.ids(features)
            return Values(bags.ids, bags.offsets)
        values = features.get(leaf, self.name)
        if values.kind == "float":
            raise TypeError(
                f"feature {leaf!r} must hold strings or integers to be crossed in {self.name!r}, got floats: cross a "
                "bucketized_column of it"
            )
        return values

    def _cross(self, given: Sequence[Values]) -> tuple[U64, NDArray[np.int64]]:
        """All combinations of each example, the last feature changing fastest."""
        starts = [values.offsets.numpy() for values in given]
        counts = [np.diff(offsets) for offsets in starts]
        totals = np.prod(np.stack(counts), 0, dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(totals)])
        row = np.repeat(np.arange(len(totals)), totals)
        rest = np.arange(offsets[-1]) - offsets[row]
        parts: list[U64] = []
        for values, start, count in zip(reversed(given), reversed(starts), reversed(counts), strict=True):
            hashes = _hashes(values)
            parts.append(hashes[start[row] + rest % count[row]])
            rest = rest // count[row]
        key = DEFAULT_HASH_KEY if self.hash_key is None else self.hash_key
        result = np.full(len(row), key % 2**64, np.uint64)
        for part in reversed(parts):
            result = combined(result, part)
        return result, offsets


def _hashes(values: Values) -> U64:
    if isinstance(values.items, Strings):
        return values.items.fingerprints()
    return values.items.numpy().astype(np.int64).view(np.uint64)
