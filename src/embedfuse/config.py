"""What a user declares: tables, and the features that read them. Plain, immutable, checked on construction."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .combiners import COMBINERS
from .optim import Optimizer, resolve

DTYPES = ("float32", "float16", "bfloat16", "float64")
_TORCH_DTYPES = {f"torch.{name}": name for name in DTYPES}


def _count(name: str, value: Any, least: int) -> int:
    """`value` as Python's int, if it is a whole number of any library."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"`{name}` must be an int of at least {least}, got {value!r}")
    return int(value)


def check_max_norm(value: Any) -> None:
    """Raises ValueError unless `value` is None or a length to cut rows to."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
        raise ValueError(
            f"`max_norm` must be a number of at least 0, or None to take rows as long as they are, got {value!r}"
        )


def check_default_id(value: Any, rows: int) -> None:
    """Raises unless `value` is None or a row of a table of that many."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"`default_id` must be an int, or None to give zeros for an empty bag, got {type(value).__name__}"
        )
    if not 0 <= int(value) < rows:
        raise ValueError(f"`default_id` must be a row of the table, 0 to {rows - 1}, got {value}")


def _check_combiner(value: Any) -> None:
    if value not in COMBINERS:
        raise ValueError(f"`combiner` must be one of {', '.join(COMBINERS)}, got {value!r}")


@dataclass(frozen=True, eq=False)
class TableConfig:
    """One embedding table. Two features share a table by sharing this object; equal fields do not make equal tables.

    Args:
        vocabulary_size: number of rows; ids run from 0 to `vocabulary_size - 1`.
        dim: width of a row, from 1 up.
        initializer: None for a normal of standard deviation 1/√dim cut at two deviations; a number to fill with;
            an array of shape `[vocabulary_size, dim]` to copy; or a function that is given the table and fills it, as
            those of `torch.nn.init` do (what it returns, if not the table, is copied).
        optimizer: the table's own optimizer; None leaves it to the collection.
        combiner: how the rows of a bag become one, for features that do not say: "mean", "sum", "sqrtn", ….
        name: name in `state_dict()` and messages; `table_0`, `table_1`, … if None.
        dtype: storage type, "float32", "float16", "bfloat16" or "float64", or torch's of that name, which becomes the
            word. Sums are made in float32 at least.
        stochastic_rounding: updates of a 16-bit table round up or down at random, so that steps smaller than the
            spacing of its numbers count on average; the same seed gives the same bits.
        max_norm: a row that is longer (Euclidean norm) is cut to this length whenever it is looked up, before weights
            and pooling, as TensorFlow's `max_norm` does; the table itself keeps it. Gradients are those of the cut.

    Raises:
        ValueError: a size below 1, an unknown combiner, optimizer or dtype, a negative `max_norm`.
    """

    vocabulary_size: int
    dim: int
    initializer: Callable[..., Any] | float | Any = None
    optimizer: Optimizer | str | None = None
    combiner: str = "mean"
    name: str | None = None
    dtype: str | Any = "float32"
    stochastic_rounding: bool = False
    max_norm: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocabulary_size", _count("vocabulary_size", self.vocabulary_size, 1))
        object.__setattr__(self, "dim", _count("dim", self.dim, 1))
        _check_combiner(self.combiner)
        if isinstance(self.initializer, str):
            raise ValueError(
                f"`initializer` must be None, a number, an array or a function, got the string {self.initializer!r}"
            )
        if self.name is not None and (not isinstance(self.name, str) or not self.name or "." in self.name):
            raise ValueError(f"`name` must be a non-empty string without dots, got {self.name!r}")
        # by what it prints: torch is not imported here
        object.__setattr__(self, "dtype", _TORCH_DTYPES.get(str(self.dtype), self.dtype))
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.stochastic_rounding and self.dtype not in ("float16", "bfloat16"):
            raise ValueError(
                f"`stochastic_rounding` must be False for {self.dtype} tables, whose steps are exact: use 16 bits"
            )
        check_max_norm(self.max_norm)
        object.__setattr__(self, "optimizer", resolve(self.optimizer))


@dataclass(frozen=True, eq=False)
class FeatureConfig:
    """One input of the model, looked up in one table.

    Args:
        table: the table, possibly shared with other features.
        max_sequence_length: 0 pools each bag into one row, `[B, dim]`; L > 0 keeps the first L rows of each bag apart,
            `[B, L, dim]`, with zeros after the bag's end.
        validate_weights_and_indices: drop negative ids, and, for combiners that divide, ids whose weight is not
            positive (TensorFlow's safe lookup). If False a negative id is out of range.
        output_shape: shape of the output without `dim`; its product is the number of bags.
        name: name in messages; the key under which the feature is given if None.
        combiner: overrides the table's.
        default_id: the row, at weight 1, that a bag gives in which no id is left; None gives zeros.

    Raises:
        ValueError: a value of the wrong kind or range.
        TypeError: `table` is not a `TableConfig`, or `default_id` not an int.
    """

    table: TableConfig
    max_sequence_length: int = 0
    validate_weights_and_indices: bool = True
    output_shape: tuple[int, ...] | None = None
    name: str | None = None
    combiner: str | None = None
    default_id: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.table, TableConfig):
            raise TypeError(f"`table` must be a TableConfig, got {type(self.table).__name__}")
        length = _count("max_sequence_length", self.max_sequence_length, 0)
        object.__setattr__(self, "max_sequence_length", length)
        if not isinstance(self.validate_weights_and_indices, bool):
            raise ValueError(
                f"`validate_weights_and_indices` must be True or False, got {self.validate_weights_and_indices!r}"
            )
        if self.output_shape is not None:
            sizes = tuple(_count("output_shape", size, 1) for size in self.output_shape)
            object.__setattr__(self, "output_shape", sizes)
        if self.combiner is not None:
            _check_combiner(self.combiner)
        check_default_id(self.default_id, self.table.vocabulary_size)
        if self.default_id is not None and self.max_sequence_length:
            raise ValueError(
                f"`default_id` must be None for a sequence feature, whose empty places are zeros, got {self.default_id}"
            )

    @property
    def effective_combiner(self) -> str:
        """The feature's combiner, or else its table's."""
        return self.combiner or self.table.combiner
