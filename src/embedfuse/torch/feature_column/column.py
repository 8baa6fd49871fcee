"""What columns are: categorical ones give ids, dense ones give numbers. And the batch that they read."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..bags import Bags
from .strings import of_sequence
from .values import Values, read

Kind = Literal["string", "integer"]


class Features:
    """A batch: features by key, each read once however many columns use it."""

    def __init__(self, given: Mapping[str, Any], exact: bool = False) -> None:
        if not isinstance(given, Mapping):
            raise TypeError(
                f"`features` must be a dict of features by key, got {type(given).__name__}: a data frame is dict(frame)"
            )
        self._given = given
        self._read: dict[str, Values] = {}
        self._host: Features | None = None
        self.exact = exact
        """Whether ids that are padding must be taken out; else they may be left in, being negative."""

    def get(self, key: str, column: str) -> Values:
        """The feature under `key`, for the column of that name.

        Raises:
            ValueError: it is not there.
        """
        if key not in self._read:
            if key not in self._given:
                raise ValueError(
                    f"`features` must hold {key!r}, which column {column!r} reads, got only "
                    f"{sorted(map(str, self._given))}: add it to the batch, or leave the column out"
                )
            value = self._given[key]
            self._read[key] = value if isinstance(value, Values) else read(key, value)
        return self._read[key]

    def on_host(self) -> "Features":
        """The same batch in memory of the CPU, for columns that can only be made there."""
        if self._host is None:
            self._host = Features(_OnHost(self._given), exact=True)
        return self._host

    def without_padding(self) -> "Features":
        """The same batch for columns whose ids must be counted."""
        if self.exact:
            return self
        twin = Features(self._given, exact=True)
        twin._read = self._read
        return twin


class _OnHost(Mapping[str, Any]):
    """Features read and moved when asked for."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def __getitem__(self, key: str) -> Values:
        value = self._given[key]
        return (value if isinstance(value, Values) else read(key, value)).on_host()

    def __iter__(self) -> Any:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


class FeatureColumn:
    """Base of all columns. Columns are immutable and hold no weights; layers do."""

    @property
    def name(self) -> str:
        """TensorFlow's name, by which columns are put in order."""
        raise NotImplementedError


class CategoricalColumn(FeatureColumn):
    """A column of ids from 0 to `num_buckets - 1`."""

    @property
    def num_buckets(self) -> int:
        """How many ids there are."""
        raise NotImplementedError

    def ids(self, features: Features) -> Bags:
        """The ids of a batch. A negative one stands for none, as it does in TensorFlow."""
        raise NotImplementedError


class DenseColumn(FeatureColumn):
    """A column of `width` numbers for each example."""

    @property
    def width(self) -> int:
        """How many numbers an example has."""
        raise NotImplementedError

    def dense(self, features: Features) -> Tensor:
        """The numbers of a batch, float32 `[B, width]`."""
        raise NotImplementedError


def check_key(key: Any, name: str = "key") -> None:
    """Raises TypeError unless `key` can name a feature."""
    if not isinstance(key, str) or not key:
        raise TypeError(f"`{name}` must be the name of a feature, a non-empty string, got {key!r}")


def check_size(name: str, value: Any, most: int | None = None) -> None:
    """Raises ValueError unless `value` is an int from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
        limits = "of at least 1" if most is None else f"from 1 to {most}"
        raise ValueError(f"`{name}` must be an int {limits}, got {value!r}")


def check_categorical(column: Any, name: str = "categorical_column") -> None:
    """Raises TypeError unless `column` gives ids."""
    if not isinstance(column, CategoricalColumn):
        raise TypeError(
            f"`{name}` must be a categorical column, got {type(column).__name__}: make one with "
            "categorical_column_with_identity, …_hash_bucket, …_vocabulary_list, bucketized_column or crossed_column"
        )


def kind_of(dtype: Any) -> Kind:
    """What a dtype of TensorFlow, PyTorch, NumPy, or its name, says of ids.

    Raises:
        ValueError: neither strings nor integers.
    """
    name = "string" if dtype is str else getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if name == "string" or name.startswith(("str", "bytes", "<U", "<S")):
        return "string"
    if name.lstrip("<u").startswith("int"):
        return "integer"
    raise ValueError(f'`dtype` must be "string" or an integer type such as "int64", got {dtype!r}')


def categories_of(features: Features, key: str, wanted: Kind | None, column: str) -> Values:
    """The feature `key` for a categorical column, checked; padding of dense input is still in it.

    Raises:
        TypeError: floats, or strings where integers are wanted, or the other way round.
        ValueError: more than two dimensions.
    """
    values = features.get(key, column)
    if (values.items.shape[0] if isinstance(values.items, Tensor) else len(values.items)) == 0:
        # no item, no kind: an empty list fits every column
        values = replace(values, items=of_sequence([]) if wanted == "string" else values.offsets.new_empty(0))
    if values.kind == "float":
        raise TypeError(
            f"feature {key!r} must hold strings or integers for column {column!r}, got floats: use numeric_column with "
            "bucketized_column, or convert the ids to integers"
        )
    if wanted is not None and values.kind != wanted:
        raise TypeError(
            f"feature {key!r} must hold {wanted}s, as the `dtype` of column {column!r} says, got {values.kind}s: "
            "convert the feature, or make the column with that dtype"
        )
    if values.shape is not None and len(values.shape) > 1:
        raise ValueError(
            f"feature {key!r} must be [batch] or [batch, places] for column {column!r}, got an example of shape "
            f"{values.shape}: reshape it"
        )
    return values


def check_batch(names: Iterable[str], sizes: Iterable[int]) -> None:
    """Raises ValueError unless all columns have one batch size."""
    found = dict(zip(names, sizes, strict=True))
    # no set: symbolic sizes have no hash, and would be fixed
    first = next(iter(found.values()), 0)
    if any(size != first for size in found.values()):
        raise ValueError(f"`features` must have one batch size, got {found} for the columns")


def to_ids(items: Any) -> Tensor:
    """NumPy's unsigned integers below 2⁶³ as a tensor of ids."""
    return torch.from_numpy(items.astype("int64"))
