"""What the tensors of a batch must be like, and what is said if they are not."""

from typing import Any

import torch
from torch import Tensor

from .compiling import EVERY_TIME

ID_TYPES = (torch.int32, torch.int64)


def check_ids(name: str, ids: Tensor) -> None:
    """Raises TypeError unless `ids` is an int32 or int64 tensor."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(ids).__name__}: use Bags.from_lists for lists")
    if ids.dtype not in ID_TYPES:
        raise TypeError(f"`{name}` must be int32 or int64, got {ids.dtype}: convert with `.long()`")


def check_sparse_values(values: Tensor) -> None:
    """Raises TypeError unless `values`, those of a `SparseIds`, are ids."""
    if isinstance(values, Tensor) and values.dtype.is_floating_point:
        raise TypeError(
            f"`values` must be int32 or int64, got {values.dtype}: SparseIds holds ids; weights go in a plain tensor, "
            "one for each id, or in a torch.sparse_coo_tensor. Convert with `.long()` only ids"
        )
    check_ids("values", values)


def check_weights(weights: Tensor, ids: Tensor) -> None:
    """Raises unless `weights` are floats, of the shape of the ids and where these are."""
    if not isinstance(weights, Tensor) or not weights.dtype.is_floating_point:
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"`weights` must be a floating-point tensor, got {kind}")
    if weights.shape != ids.shape:
        raise ValueError(f"`weights` must have the shape of the ids, {tuple(ids.shape)}, got {tuple(weights.shape)}")
    if weights.device != ids.device:
        raise ValueError(f"`weights` must be on the device of `ids`, {ids.device}, got {weights.device}")


_lib: Any = torch.library.Library("embedfuse", "FRAGMENT")
_lib.define("checked_bags(Tensor offsets, SymInt count) -> Tensor", tags=EVERY_TIME)


def _checked_bags(offsets: Tensor, count: int) -> Tensor:
    check_offsets(offsets, count)
    return offsets.clone()


_lib.impl("checked_bags", _checked_bags, "CompositeExplicitAutograd")


@torch.library.register_fake("embedfuse::checked_bags", lib=_lib)  # type: ignore[untyped-decorator]
def _(offsets: Tensor, count: int) -> Tensor:
    return torch.empty_like(offsets)


def check_offsets(offsets: Tensor, count: int) -> None:
    """Raises ValueError unless offsets on the CPU go from 0 to `count` without decreasing."""
    values = offsets.numpy()
    if values[0] != 0 or values[-1] != count:
        raise ValueError(
            f"`offsets` must start at 0 and end at len(ids)={count}, got first value {values[0]} and last value "
            f"{values[-1]}: append len(ids) to offsets that lack it"
        )
    fall = values[1:] < values[:-1]
    if fall.any():
        at = int(fall.argmax())
        raise ValueError(f"`offsets` must not decrease, got {values[at]} before {values[at + 1]} at position {at + 1}")


def check_jagged(name: str, tensor: Any) -> None:
    """Raises unless `tensor` is jagged, `[B, *]`, and without holes between its rows."""
    if not isinstance(tensor, Tensor) or not tensor.is_nested:
        raise TypeError(
            f"`{name}` must be a nested tensor of layout torch.jagged, got {type(tensor).__name__}: use "
            "Bags.from_lists for lists"
        )
    if tensor.layout is not torch.jagged or tensor.dim() != 2:
        found = f"{tensor.dim()} dimensions and {tensor.layout}"
    # lengths() is a method of nested tensors alone
    elif tensor.lengths() is not None:  # type: ignore[attr-defined]
        found = "holes, as torch.nested.narrow makes them"
    else:
        return
    raise ValueError(
        f"nested `{name}` must be [B, *], of layout torch.jagged and without holes, got {found}: use "
        "torch.nested.nested_tensor(list of 1-D tensors, layout=torch.jagged)"
    )


def check_same_lengths(name: str, tensor: Any, ids: Any) -> None:
    """Raises ValueError unless jagged tensors have rows of the same lengths; on a GPU, as many items in all."""
    if tensor.values().shape != ids.values().shape:
        raise ValueError(f"`{name}` must have one entry an id, {ids.values().shape[0]}, got {tensor.values().shape[0]}")
    mine, theirs = tensor.offsets(), ids.offsets()
    if mine is theirs or mine.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if not torch.equal(mine, theirs):
        raise ValueError(
            f"`{name}` must have rows of the lengths of the ids, {theirs.diff().tolist()}, got {mine.diff().tolist()}"
        )


def flattened(name: str, lists: Any) -> tuple[list[Any], list[int]]:
    """The items of a list of lists, and the lengths of these."""
    try:
        rows = [one.tolist() if hasattr(one, "tolist") else one for one in lists]
        return [item for row in rows for item in row], [len(row) for row in rows]
    except TypeError as error:
        raise TypeError(
            f"`{name}` must be a list of lists, one a bag, got {_shown(lists)}: a single bag is [[1, 2]]"
        ) from error


def ids_of(values: list[Any], dtype: torch.dtype, device: Any = None) -> Tensor:
    """Whole numbers of Python as ids."""
    for kind in set(map(type, values)):
        if kind is bool or not hasattr(kind, "__index__"):
            value = next(value for value in values if type(value) is kind)
            raise TypeError(f"`bags` must hold whole numbers, got {_shown(value)}: convert the ids with int()")
    limits = torch.iinfo(dtype)
    for value in (min(values, default=0), max(values, default=0)):
        if not limits.min <= value <= limits.max:
            raise ValueError(f"`bags` must hold ids that fit {dtype}, got {value}: use dtype=torch.int64")
    return torch.tensor(values, dtype=dtype, device=device)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}…"
