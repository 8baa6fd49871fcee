"""Embedding columns: the rows of a table, pooled over the ids of a categorical column."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import check_max_norm
from .column import CategoricalColumn, DenseColumn, check_categorical, check_size

COMBINERS = ("mean", "sqrtn", "sum")


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Callable[..., Any] | float | Any = None,
    ckpt_to_load_from: str | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    do_fusion: bool = True,
) -> "EmbeddingColumn":
    """The pooled rows of a table of its own.

    Args:
        categorical_column: gives the ids.
        dimension: width of a row.
        combiner: "mean", "sum" or "sqrtn".
        initializer: as of `TableConfig`; None is TensorFlow's, a normal of deviation 1/√dimension cut at two.
        ckpt_to_load_from: where the first values come from; what `embedfuse.torch.convert.read_variables` reads.
        tensor_name_in_ckpt: the variable there.
        max_norm: longer rows are cut to this length when looked up.
        trainable: whether the table learns.
        do_fusion: look it up together with all others, in one launch; False takes plain PyTorch operations for this
            column. The numbers are the same.
    """
    table = EmbeddingTable(
        f"{getattr(categorical_column, 'name', '')}_embedding", dimension, initializer, ckpt_to_load_from,
        tensor_name_in_ckpt, max_norm, trainable,
    )  # fmt: skip
    return EmbeddingColumn(categorical_column, table, combiner, do_fusion)


def shared_embedding_columns(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: str = "mean",
    initializer: Callable[..., Any] | float | Any = None,
    shared_embedding_collection_name: str | None = None,
    ckpt_to_load_from: str | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    do_fusion: bool = True,
) -> "list[EmbeddingColumn]":
    """One column for each of `categorical_columns`, all with one table; other arguments as of `embedding_column`.

    Args:
        categorical_columns: of the same number of buckets.
        shared_embedding_collection_name: name of the table; None joins the columns' names, as TensorFlow does.
    """
    columns = list(categorical_columns)
    if not columns:
        raise ValueError("`categorical_columns` must hold at least one column, got none")
    for column in columns:
        check_categorical(column, "categorical_columns")
    sizes = {column.name: column.num_buckets for column in columns}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"`categorical_columns` must have one number of buckets to share a table, got {sizes}: make them equal"
        )
    name = shared_embedding_collection_name
    if name is None:
        name = "_".join(sorted(column.name for column in columns)) + "_shared_embedding"
    table = EmbeddingTable(name, dimension, initializer, ckpt_to_load_from, tensor_name_in_ckpt, max_norm, trainable)
    return [EmbeddingColumn(column, table, combiner, do_fusion, shared=True) for column in columns]


@dataclass(frozen=True, eq=False)
class EmbeddingTable:
    """What an embedding column says of its table. Columns share a table by sharing this object."""

    name: str
    dimension: int
    initializer: Callable[..., Any] | float | Any = None
    ckpt_to_load_from: str | None = None
    tensor_name_in_ckpt: str | None = None
    max_norm: float | None = None
    trainable: bool = True

    def __post_init__(self) -> None:
        check_size("dimension", self.dimension)
        check_max_norm(self.max_norm)
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"`shared_embedding_collection_name` must be a non-empty string or None, got {self.name!r}"
            )
        if (self.ckpt_to_load_from is None) != (self.tensor_name_in_ckpt is None):
            raise ValueError(
                "`ckpt_to_load_from` and `tensor_name_in_ckpt` must be given together, got "
                f"{self.ckpt_to_load_from!r} and {self.tensor_name_in_ckpt!r}"
            )
        if self.ckpt_to_load_from is not None and self.initializer is not None:
            raise ValueError("`initializer` must be None with `ckpt_to_load_from`, which gives the values: drop one")
        if not isinstance(self.trainable, bool):
            raise ValueError(f"`trainable` must be True or False, got {self.trainable!r}")


@dataclass(frozen=True, eq=False)
class EmbeddingColumn(DenseColumn):
    """See `embedding_column` and `shared_embedding_columns`."""

    categorical_column: CategoricalColumn
    table: EmbeddingTable
    combiner: str = "mean"
    do_fusion: bool = True
    shared: bool = False

    def __post_init__(self) -> None:
        check_categorical(self.categorical_column)
        check_combiner("combiner", self.combiner)
        if not isinstance(self.do_fusion, bool):
            raise ValueError(f"`do_fusion` must be True or False, got {self.do_fusion!r}")

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_{'shared_embedding' if self.shared else 'embedding'}"

    @property
    def width(self) -> int:
        return self.table.dimension


def check_combiner(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is one of TensorFlow's three."""
    if value not in COMBINERS:
        raise ValueError(f"`{name}` must be one of {', '.join(COMBINERS)}, got {value!r}")
