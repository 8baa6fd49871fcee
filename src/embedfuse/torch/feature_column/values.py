"""One feature of a batch as columns see it, read from whatever the user has it in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bag_checks import check_jagged
from ..bags import Bags, SparseIds
from . import strings
from .strings import Strings

MISSING_ID = -1
_WAYS = "give a tensor, Bags, SparseIds, a list, a NumPy or pyarrow array, or a pandas Series"


@dataclass(frozen=True)
class Values:
    """What bag `b` of a feature holds: `items[offsets[b]:offsets[b + 1]]`.

    Attributes:
        padded: whether it came dense, as a tensor, array or list. Of dense categories, "" and -1 stand for none.
        shape: of one example, if it came as a tensor or NumPy array.
        missing: bool, which numbers were missing: None, null, or NaN where that says it. None if none are. Of integers
            there is `MISSING_ID`, of floats NaN, in their places.
    """

    items: Tensor | Strings
    offsets: Tensor  # int64 [B + 1]
    weights: Tensor | None = None
    padded: bool = False
    shape: tuple[int, ...] | None = None
    bags: Bags | None = None  # the same, if it came as these
    missing: Tensor | None = None

    @property
    def kind(self) -> str:
        """What the items are: "string", "integer" or "float"."""
        if isinstance(self.items, Strings):
            return "string"
        return "float" if self.items.is_floating_point() else "integer"

    def __len__(self) -> int:
        return int(self.offsets.shape[0]) - 1

    def present(self) -> Tensor | None:
        """Which items stand for something, or None for all. On a GPU all: there -1 is left to the lookup."""
        if not self.padded:
            return None
        if isinstance(self.items, Strings):
            here = torch.from_numpy(self.items.lengths > 0)
        elif self.items.is_cuda or self.kind == "float":
            return None
        else:
            here = self.items != MISSING_ID
        return None if bool(here.all()) else here

    def only(self, here: Tensor | None) -> "Values":
        """Those items alone for which `here` is true; None means all."""
        if here is None:
            return self
        items = self.items[here.numpy()] if isinstance(self.items, Strings) else self.items[here]
        before = torch.cat([here.new_zeros(1, dtype=torch.int64), here.cumsum(0)])
        weights = None if self.weights is None else self.weights[here]
        # what is left is no padding
        return Values(items, before[self.offsets], weights)

    def on_host(self) -> "Values":
        """The same in memory of the CPU."""
        if self.offsets.device.type == "cpu":
            return self
        items = self.items if isinstance(self.items, Strings) else self.items.cpu()
        weights = None if self.weights is None else self.weights.cpu()
        # what came from lists and arrays is here already, and with it what is missing
        return Values(items, self.offsets.cpu(), weights, self.padded, self.shape)


def read(key: str, value: Any) -> Values:
    """Reads a feature; `key` is for messages.

    Raises:
        TypeError: a value of an unknown kind.
        ValueError: a shape or nesting that is no batch.
    """
    if isinstance(value, Bags):
        return Values(value.ids, value.offsets, value.weights, bags=value)
    if isinstance(value, SparseIds):
        return _of_sparse(key, value.indices, value.values, value.dense_shape)
    if isinstance(value, Tensor):
        return _of_tensor(key, value)
    if isinstance(value, np.ndarray):
        return _of_numpy(key, value)
    if type(value).__module__.partition(".")[0] == "pyarrow":
        return _of_arrow(key, value)
    if isinstance(value, (list, tuple)):
        return _of_list(key, value)
    if hasattr(value, "to_numpy"):
        return _of_series(key, value)
    raise TypeError(f"feature {key!r} must be a batch of values, got {type(value).__name__}: {_WAYS}")


def _of_sparse(key: str, indices: Tensor, values: Tensor, shape: Sequence[int]) -> Values:
    if len(shape) != 2:
        raise ValueError(
            f"feature {key!r} must have a `dense_shape` of two sizes, [batch, places], got {tuple(shape)}: join the "
            "others into one"
        )
    # in the order of their places, which sequences and crosses go by
    row, order = indices[:, 0], torch.argsort(indices[:, 0] * shape[1] + indices[:, 1], stable=True)
    edges = torch.arange(shape[0] + 1, device=values.device)
    return Values(values[order], torch.searchsorted(row[order], edges))


def _of_tensor(key: str, tensor: Tensor) -> Values:
    if tensor.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"feature {key!r} must hold integers or floats, got {tensor.dtype}: convert with `.long()`")
    if tensor.is_nested:
        if tensor.layout is not torch.jagged:
            raise TypeError(f"feature {key!r} must have the layout torch.jagged, got {tensor.layout}: make it jagged")
        check_jagged(f"feature {key}", tensor)
        # offsets() is a method of nested tensors alone
        return Values(tensor.values(), tensor.offsets().long())  # type: ignore[attr-defined]
    if tensor.is_sparse:
        return _of_sparse(key, tensor._indices().t(), tensor._values(), tuple(tensor.shape))
    if tensor.dim() == 0:
        raise ValueError(f"feature {key!r} must have a batch dimension, got a single number: use [[value]]")
    shape = tuple(tensor.shape[1:])
    offsets = torch.arange(tensor.shape[0] + 1, device=tensor.device) * _product(shape)
    if not tensor.is_floating_point() and tensor.dtype not in (torch.int32, torch.int64):
        tensor = tensor.long()
    return Values(tensor.reshape(-1), offsets, padded=True, shape=shape)


def _of_numpy(key: str, array: np.ndarray[Any, Any]) -> Values:
    if array.dtype.kind in "iuf":
        kind = np.int64 if array.dtype.kind != "f" and array.dtype.name not in ("int32", "int64") else None
        # a copy: arrays of other libraries may be read-only
        return _of_tensor(key, torch.from_numpy(np.array(array, kind)))
    if array.dtype.kind == "O" and array.ndim == 1:
        return _of_list(key, array.tolist())
    if array.dtype.kind in "USO" and array.ndim:
        shape = array.shape[1:]
        offsets = torch.arange(array.shape[0] + 1, device="cpu") * _product(shape)
        if array.dtype.kind == "O":
            items, missing = _items_of_list(key, array.reshape(-1).tolist())
            return Values(items, offsets, padded=True, shape=shape, missing=missing)
        return Values(strings.of_array(array.reshape(-1)), offsets, padded=True, shape=shape)
    raise TypeError(
        f"feature {key!r} must be an array of numbers or strings with a batch dimension, got {array.dtype} of shape "
        f"{array.shape}"
    )


def _of_series(key: str, series: Any) -> Values:
    """Of a data frame's column, or of its columns side by side."""
    array = np.asarray(series.to_numpy())
    if array.dtype.kind == "O" and hasattr(series, "isna"):
        array = array.copy()
        array[series.isna().to_numpy()] = None
    values = _of_numpy(key, array)
    if isinstance(values.items, Tensor) and values.kind == "float":
        # data frames have no other word for it
        return replace(values, missing=_if_any(values.items.isnan()))
    return values


def _of_list(key: str, rows: Sequence[Any]) -> Values:
    nested = next((isinstance(row, (list, tuple, np.ndarray)) for row in rows if row is not None), False)
    if nested:
        rows = [() if row is None else row for row in rows]
        try:
            lengths = [len(row) for row in rows]
        except TypeError as error:
            raise ValueError(
                f"feature {key!r} must be all lists or all values, got a mixture: nest them all"
            ) from error
        offsets = torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0)
        flat = list(chain.from_iterable(rows))
    else:
        flat, offsets = list(rows), torch.arange(len(rows) + 1, device="cpu")
    items, missing = _items_of_list(key, flat)
    return Values(items, offsets, padded=True, missing=missing)


def _items_of_list(key: str, flat: list[Any]) -> tuple[Tensor | Strings, Tensor | None]:
    first = next((item for item in flat if item is not None), None)
    if isinstance(first, (str, bytes)):
        try:
            return strings.of_sequence(flat), None
        except TypeError:
            empty = "" if isinstance(first, str) else b""
            flat = [empty if item is None else item for item in flat]
        try:
            return strings.of_sequence(flat), None
        except TypeError as error:
            raise TypeError(f"feature {key!r} must hold strings alone, got a mixture: convert it with str()") from error
    if isinstance(first, (list, tuple, np.ndarray)):
        raise ValueError(f"feature {key!r} must be a list of values or of lists, got a deeper one: flatten it")
    missing = torch.tensor([item is None for item in flat], device="cpu")
    if bool(missing.any()):
        whole = all(isinstance(item, (int, np.integer)) for item in flat if item is not None)
        flat = [(MISSING_ID if whole else np.nan) if item is None else item for item in flat]
    array = np.asarray(flat) if flat else np.empty(0, np.int64)
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"feature {key!r} must hold integers, floats or strings, got {type(first).__name__}: convert it"
        )
    if array.dtype.kind == "f":
        missing = torch.from_numpy(np.isnan(array))
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64)), _if_any(missing)


def _of_arrow(key: str, column: Any) -> Values:
    import pyarrow as pa  # type: ignore[import-untyped]

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        # a null list is an empty one, whose values flatten() leaves out
        lengths = np.asarray(column.value_lengths().fill_null(0), np.int64)
        flat = column.flatten()
        if flat.null_count:
            raise ValueError(f"feature {key!r} must hold no nulls inside of lists, got {flat.null_count}: drop them")
        items, _ = _items_of_arrow(key, flat)
        return Values(items, torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])))
    items, missing = _items_of_arrow(key, column)
    return Values(items, torch.arange(len(column) + 1, device="cpu"), padded=True, missing=missing)


def _items_of_arrow(key: str, column: Any) -> tuple[Tensor | Strings, Tensor | None]:
    import pyarrow as pa

    if pa.types.is_null(column.type) and len(column) == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu"), None
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_integer(kind):
        numbers = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        missing = _if_any(torch.from_numpy(np.array(numbers.is_null(), bool)))
        return torch.from_numpy(np.array(numbers.cast(pa.int64()).fill_null(MISSING_ID), np.int64)), missing
    if pa.types.is_floating(kind):
        floats = torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False), np.float32))
        return floats, _if_any(floats.isnan())
    if any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
                                     pa.types.is_large_binary, pa.types.is_string_view)):  # fmt: skip
        return strings.of_arrow(column), None
    raise TypeError(f"feature {key!r} must be integers, floats, strings or lists of them, got {column.type}: cast it")


def _if_any(mask: Tensor) -> Tensor | None:
    return mask if bool(mask.any()) else None


def _product(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
