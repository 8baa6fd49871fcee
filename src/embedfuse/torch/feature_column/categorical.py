"""Categorical columns whose ids are the feature itself, or a hash of it; and weights beside ids."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bags import Bags
from .column import (
    CategoricalColumn,
    Features,
    categories_of,
    check_categorical,
    check_key,
    check_size,
    kind_of,
    to_ids,
)
from .strings import Strings, of_integers
from .values import MISSING_ID, Values

LARGEST = 2**63 - 1


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> "IdentityCategoricalColumn":
    """Ids as they are.

    Args:
        key: the feature.
        num_buckets: ids run from 0 to `num_buckets - 1`.
        default_value: the id to use for those out of range. If None, too large ones are an error, and negative ones
            count as absent.
    """
    return IdentityCategoricalColumn(key, num_buckets, default_value)


def categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: Any = "string"
) -> "HashedCategoricalColumn":
    """`Fingerprint64(value) mod hash_bucket_size`: the id that TensorFlow gives.

    Args:
        key: the feature.
        hash_bucket_size: number of buckets.
        dtype: "string", or an integer type; integers are hashed as decimal text.
    """
    return HashedCategoricalColumn(key, hash_bucket_size, dtype)


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: Any = "float32"
) -> "WeightedCategoricalColumn":
    """A column with a weight for each id.

    Args:
        categorical_column: gives the ids.
        weight_feature_key: the feature with the weights, of the shape of the ids'. Weights given dense beside ids that
            are not have their zeros left out, as in TensorFlow.
        dtype: a float type.
    """
    return WeightedCategoricalColumn(categorical_column, weight_feature_key, dtype)


@dataclass(frozen=True)
class IdentityCategoricalColumn(CategoricalColumn):
    """See `categorical_column_with_identity`."""

    key: str
    size: int
    default_value: int | None = None

    def __post_init__(self) -> None:
        check_key(self.key)
        check_size("num_buckets", self.size, LARGEST)
        default = self.default_value
        if default is not None:
            if isinstance(default, bool) or not isinstance(default, int) or not 0 <= default < self.num_buckets:
                raise ValueError(f"`default_value` must be an id below {self.num_buckets}, or None, got {default!r}")

    @property
    def name(self) -> str:
        return self.key

    @property
    def num_buckets(self) -> int:
        return self.size

    def ids(self, features: Features) -> Bags:
        values = categories_of(features, self.key, "integer", self.name)
        if features.exact:
            values = values.only(values.present())
        ids = values.items
        assert isinstance(ids, Tensor)
        if self.default_value is not None:
            wrong = (ids < 0) | (ids >= self.num_buckets)
            if values.padded:
                wrong &= ids != MISSING_ID
            ids = ids.masked_fill(wrong, self.default_value)
        elif ids.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check(ids)
        if values.bags is not None and ids is values.bags.ids:
            return values.bags
        return Bags(ids, values.offsets, values.weights)

    def _check(self, ids: Tensor) -> None:
        """What the lookup would find too, but here there is more to say."""
        if ids.shape[0] and int(ids.max()) >= self.num_buckets:
            place = int((ids >= self.num_buckets).nonzero()[0])
            raise IndexError(
                f"feature {self.key!r} must hold ids below `num_buckets={self.num_buckets}`, got {int(ids[place])} at "
                f"position {place}: raise `num_buckets`, or give `default_value`"
            )


@dataclass(frozen=True)
class HashedCategoricalColumn(CategoricalColumn):
    """See `categorical_column_with_hash_bucket`."""

    key: str
    hash_bucket_size: int
    dtype: Any = "string"

    def __post_init__(self) -> None:
        check_key(self.key)
        check_size("hash_bucket_size", self.hash_bucket_size, LARGEST)
        kind_of(self.dtype)

    @property
    def name(self) -> str:
        return self.key

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    def ids(self, features: Features) -> Bags:
        values = categories_of(features, self.key, kind_of(self.dtype), self.name)
        host = values.on_host()
        host = host.only(host.present())
        ids = to_ids(text_of(host).fingerprints() % np.uint64(self.hash_bucket_size))
        return Bags(ids, host.offsets, host.weights).to(values.offsets.device)


def text_of(values: Values) -> Strings:
    """The items as strings; integers in decimal."""
    return values.items if isinstance(values.items, Strings) else of_integers(values.items.numpy().astype(np.int64))


@dataclass(frozen=True)
class WeightedCategoricalColumn(CategoricalColumn):
    """See `weighted_categorical_column`."""

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        check_categorical(self.categorical_column)
        check_key(self.weight_feature_key, "weight_feature_key")
        if "float" not in (getattr(self.dtype, "name", None) or str(self.dtype)):
            raise ValueError(f'`dtype` must be a float type such as "float32", got {self.dtype!r}')

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    def ids(self, features: Features) -> Bags:
        features = features.without_padding()
        bags = self.categorical_column.ids(features)
        if bags.weights is not None:
            raise ValueError(
                f"the ids of column {self.name!r} must come without weights, got some of their own: drop those, or "
                "leave weighted_categorical_column out"
            )
        values = features.get(self.weight_feature_key, self.name)
        if isinstance(values.items, Strings):
            raise TypeError(f"feature {self.weight_feature_key!r} must hold numbers, being weights, got strings")
        weights = self._aligned(values, bags, features)
        return Bags(bags.ids, bags.offsets, weights.items.float().to(bags.device))  # type: ignore[union-attr]

    def _aligned(self, values: Values, bags: Bags, features: Features) -> Values:
        """The weights of the ids that are left, position by position."""
        key: str | None = getattr(self.categorical_column, "key", None)
        if values.padded and key is not None:
            beside = features.get(key, self.name)
            if beside.padded and _equal(beside.offsets, values.offsets):
                here = beside.present()
                return values if here is None else values.only(here.to(values.offsets.device))
        if values.padded and not _equal(values.offsets, bags.offsets):
            assert isinstance(values.items, Tensor)
            values = values.only(values.items != 0)
        if not _equal(values.offsets, bags.offsets):
            raise ValueError(
                f"feature {self.weight_feature_key!r} must hold one weight for each id of column "
                f"{self.categorical_column.name!r}, got {_lengths(values.offsets)} weights for "
                f"{_lengths(bags.offsets)} ids a bag"
            )
        return values


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    if first.is_cuda or second.is_cuda:
        # reading them would wait for the device; the lookup compares the numbers of ids and weights
        return True
    return torch.equal(first, second)


def _lengths(offsets: Tensor) -> str:
    lengths = offsets.diff().tolist()
    return f"{lengths[:8]}…" if len(lengths) > 8 else str(lengths)
