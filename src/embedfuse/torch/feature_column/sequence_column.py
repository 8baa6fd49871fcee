"""Categorical columns whose ids keep their order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bags import Bags
from .categorical import categorical_column_with_hash_bucket, categorical_column_with_identity
from .column import CategoricalColumn, Features, check_categorical
from .vocabulary import categorical_column_with_vocabulary_file, categorical_column_with_vocabulary_list


def sequence_categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> "SequenceCategoricalColumn":
    """`categorical_column_with_identity` of a sequence, for `SequenceInputLayer`."""
    return SequenceCategoricalColumn(categorical_column_with_identity(key, num_buckets, default_value))


def sequence_categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: Any = "string"
) -> "SequenceCategoricalColumn":
    """`categorical_column_with_hash_bucket` of a sequence, for `SequenceInputLayer`."""
    return SequenceCategoricalColumn(categorical_column_with_hash_bucket(key, hash_bucket_size, dtype))


def sequence_categorical_column_with_vocabulary_list(
    key: str, vocabulary_list: Sequence[Any], dtype: Any = None, default_value: int = -1, num_oov_buckets: int = 0
) -> "SequenceCategoricalColumn":
    """`categorical_column_with_vocabulary_list` of a sequence, for `SequenceInputLayer`."""
    return SequenceCategoricalColumn(
        categorical_column_with_vocabulary_list(key, vocabulary_list, dtype, default_value, num_oov_buckets)
    )


def sequence_categorical_column_with_vocabulary_file(
    key: str, vocabulary_file: str | Path, vocabulary_size: int | None = None, num_oov_buckets: int = 0,
    default_value: int | None = None, dtype: Any = "string",
) -> "SequenceCategoricalColumn":  # fmt: skip
    """`categorical_column_with_vocabulary_file` of a sequence, for `SequenceInputLayer`."""
    return SequenceCategoricalColumn(
        categorical_column_with_vocabulary_file(
            key, vocabulary_file, vocabulary_size, num_oov_buckets, default_value, dtype
        )
    )


@dataclass(frozen=True)
class SequenceCategoricalColumn(CategoricalColumn):
    """Ids in order, each looked up by itself."""

    categorical_column: CategoricalColumn

    def __post_init__(self) -> None:
        check_categorical(self.categorical_column)

    @property
    def name(self) -> str:
        return self.categorical_column.name

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    def ids(self, features: Features) -> Bags:
        return self.categorical_column.ids(features)


def check_not_sequence(column: CategoricalColumn, where: str) -> None:
    """Raises ValueError for a sequence where examples are pooled."""
    if isinstance(column, SequenceCategoricalColumn):
        raise ValueError(
            f"{where} of {column.name!r} must not be of a sequence column where each example becomes one row: use "
            "categorical_column_with_… in place of sequence_categorical_column_with_…, or SequenceInputLayer in place "
            "of InputLayer"
        )
