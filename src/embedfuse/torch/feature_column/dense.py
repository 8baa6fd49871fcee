"""Dense columns: numbers, numbers cut into buckets, and ids as counts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bags import Bags
from .column import CategoricalColumn, DenseColumn, Features, check_categorical, check_key, check_size
from .sequence_column import check_not_sequence
from .strings import Strings


def numeric_column(
    key: str, shape: int | Sequence[int] = (1,), default_value: Any = None, dtype: Any = "float32",
    normalizer_fn: Callable[[Tensor], Tensor] | None = None,
) -> "NumericColumn":  # fmt: skip
    """Numbers, as float32.

    Args:
        key: the feature, dense.
        shape: of one example.
        default_value: fills what is missing: None in lists, nulls in pyarrow arrays. A number, or one for each place
            of `shape`. If None, missing numbers are an error.
        dtype: a number type; what comes is converted to it, before `normalizer_fn`.
        normalizer_fn: applied to the tensor `[B, *shape]`.
    """
    return NumericColumn(key, (shape,) if isinstance(shape, int) else tuple(shape), default_value, dtype, normalizer_fn)


def bucketized_column(source_column: "NumericColumn", boundaries: Sequence[float]) -> "BucketizedColumn":
    """Numbers as the bucket they fall in: `boundaries=[0, 10]` makes (-∞, 0), [0, 10) and [10, ∞).

    As it stands a dense column of `shape * buckets` zeros and ones; inside of embedding_column or crossed_column a
    categorical one, in which each place of `shape` has buckets of its own.

    Args:
        source_column: a numeric_column.
        boundaries: increasing.
    """
    return BucketizedColumn(source_column, tuple(boundaries))


def indicator_column(categorical_column: CategoricalColumn) -> "IndicatorColumn":
    """Ids as `num_buckets` counts, or sums of their weights."""
    return IndicatorColumn(categorical_column)


@dataclass(frozen=True)
class NumericColumn(DenseColumn):
    """See `numeric_column`."""

    key: str
    shape: tuple[int, ...] = (1,)
    default_value: Any = None
    dtype: Any = "float32"
    normalizer_fn: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_key(self.key)
        for size in self.shape:
            check_size("shape", size)
        _number_type(self.dtype)
        if self.default_value is not None:
            try:
                count = torch.as_tensor(self.default_value, dtype=torch.float32).numel()
            except (TypeError, ValueError) as error:
                raise ValueError(f"`default_value` must be numbers, got {self.default_value!r}") from error
            if count not in (1, self.width):
                raise ValueError(f"`default_value` must be one number or {self.width}, got {self.default_value!r}")
        if self.normalizer_fn is not None and not callable(self.normalizer_fn):
            raise TypeError(f"`normalizer_fn` must be a function of a tensor, got {self.normalizer_fn!r}")

    @property
    def name(self) -> str:
        return self.key

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def dense(self, features: Features) -> Tensor:
        values = features.get(self.key, self.name)
        if isinstance(values.items, Strings):
            raise TypeError(f"feature {self.key!r} must hold numbers for numeric_column, got strings: convert them")
        count = values.offsets.shape[0] - 1
        if values.items.shape[0] != count * self.width or not self._is_whole(values.offsets):
            raise ValueError(
                f"feature {self.key!r} must hold {self.width} numbers for each example, as `shape={self.shape}` says, "
                f"got {_example(values.shape, values.items.shape[0], count)}: give a dense tensor [B, {self.width}]"
            )
        numbers = self._filled(values.items.reshape(count, self.width), values.missing)
        numbers = numbers.to(_number_type(self.dtype))
        if self.normalizer_fn is not None:
            made = self.normalizer_fn(numbers.reshape(count, *self.shape))
            if not isinstance(made, Tensor) or made.numel() != numbers.numel():
                raise ValueError(
                    f"`normalizer_fn` of column {self.name!r} must return a tensor of its argument's shape, "
                    f"[{count}, {', '.join(map(str, self.shape))}], got "
                    f"{list(made.shape) if isinstance(made, Tensor) else type(made).__name__}"
                )
            numbers = made.reshape(count, self.width)
        return numbers.float()

    def _is_whole(self, offsets: Tensor) -> bool:
        if offsets.is_cuda or torch.compiler.is_compiling():
            return True
        return bool((offsets.diff() == self.width).all())

    def _filled(self, numbers: Tensor, missing: Tensor | None) -> Tensor:
        """Missing numbers, which lists and arrow arrays may have, replaced by the default."""
        if missing is None:
            return numbers
        if self.default_value is None:
            raise ValueError(
                f"feature {self.key!r} must have a number for every example, got {int(missing.sum())} missing: give "
                "numeric_column a `default_value`"
            )
        default = torch.from_numpy(np.array(self.default_value).reshape(-1))
        if default.is_floating_point():
            default = default.to(torch.promote_types(numbers.dtype, torch.float32))
        return torch.where(missing.reshape(numbers.shape), default.to(numbers.device), numbers)


@dataclass(frozen=True)
class BucketizedColumn(CategoricalColumn, DenseColumn):
    """See `bucketized_column`."""

    source_column: NumericColumn
    boundaries: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.source_column, NumericColumn):
            kind = type(self.source_column).__name__
            raise TypeError(f"`source_column` must be a numeric_column, got {kind}")
        if not all(isinstance(edge, Real) and edge == edge for edge in self.boundaries):
            raise ValueError(f"`boundaries` must be numbers, got {list(self.boundaries)}: convert them with float()")
        if not self.boundaries or not all(a < b for a, b in pairwise(self.boundaries)):
            raise ValueError(f"`boundaries` must be numbers that increase, got {list(self.boundaries)}: sort them")

    @property
    def name(self) -> str:
        return f"{self.source_column.name}_bucketized"

    @property
    def num_buckets(self) -> int:
        return self.width

    @property
    def width(self) -> int:
        return (len(self.boundaries) + 1) * self.source_column.width

    def _buckets(self, features: Features) -> Tensor:
        """`[B, width of the source]`, those of each place following the last one's."""
        numbers = self.source_column.dense(features)
        make = _edges if torch.compiler.is_compiling() else _kept_edges
        edges = make(self.boundaries, numbers.device)
        place = torch.arange(self.source_column.width, device=numbers.device)
        return torch.bucketize(numbers, edges, right=True) + place * (len(self.boundaries) + 1)

    def ids(self, features: Features) -> Bags:
        return Bags.from_padded(self._buckets(features), padding_id=None)

    def dense(self, features: Features) -> Tensor:
        buckets = self._buckets(features)
        return buckets.new_zeros((buckets.shape[0], self.width), dtype=torch.float32).scatter_(1, buckets, 1.0)


@dataclass(frozen=True)
class IndicatorColumn(DenseColumn):
    """See `indicator_column`."""

    categorical_column: CategoricalColumn

    def __post_init__(self) -> None:
        check_categorical(self.categorical_column)

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_indicator"

    @property
    def width(self) -> int:
        return self.categorical_column.num_buckets

    def dense(self, features: Features) -> Tensor:
        check_not_sequence(self.categorical_column, "indicator_column")
        bags = self.categorical_column.ids(features)
        count = bags.offsets.shape[0] - 1
        rows = torch.arange(count, device=bags.device)
        row = torch.repeat_interleave(rows, bags.lengths(), output_size=bags.ids.shape[0])
        here = (bags.ids >= 0) & (bags.ids < self.width)
        weights = torch.ones_like(bags.ids, dtype=torch.float32) if bags.weights is None else bags.weights.float()
        # absent ids add nothing to the first place
        place = row * self.width + bags.ids.masked_fill(~here, 0)
        counts = weights.new_zeros(count * self.width)
        return counts.index_add(0, place, weights.masked_fill(~here, 0.0)).reshape(count, self.width)


def _number_type(given: Any) -> torch.dtype:
    """PyTorch's type for a number type of TensorFlow, PyTorch, NumPy, or its name."""
    # Python's integers have no end
    name = "int64" if given is int else getattr(given, "__name__", None) or getattr(given, "name", None) or str(given)
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or found.is_complex or found is torch.bool:
        raise ValueError(f'`dtype` must be a number type such as "float32", got {given!r}')
    return found


def _edges(boundaries: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(boundaries, dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def _kept_edges(boundaries: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept, since each copy to a GPU waits for it."""
    # a tensor made in inference mode could not be used outside of it
    with torch.inference_mode(False):
        return _edges(boundaries, device)


def _example(shape: tuple[int, ...] | None, total: int, count: int) -> str:
    return f"an example of shape {shape}" if shape is not None else f"{total} numbers for {count} examples"
