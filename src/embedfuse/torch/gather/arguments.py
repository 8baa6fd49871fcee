"""The arguments of the gather functions, of any number of dimensions → ids, offsets, weights and vectors."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends import BadId, accumulation_dtype
from ..bag_arguments import FLOAT_TYPES
from ..bag_checks import ID_TYPES
from ..collection import POLICIES
from ..functions import is_transformed

GRADS = ("dense", "sparse")


def ids_of(name: str, indices: Tensor) -> Tensor:
    """The indices as backends take them, int32 or int64, of the shape that was given."""
    if not isinstance(indices, Tensor) or indices.dtype.is_floating_point or indices.dtype.is_complex:
        what = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"`{name}` must be a tensor of integers, got {what}: convert with `.long()`")
    if indices.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold integers, got torch.bool: use `mask.nonzero()` for a mask's positions")
    if indices.dim() == 0:
        raise ValueError(f"`{name}` must have at least one dimension, the last being K, got a scalar")
    return indices if indices.dtype in ID_TYPES else indices.long()


def read_indices(name: str, indices: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
    """Flat ids `[N]`, where each bag of K starts and the last ends `[B + 1]`, and the shape that was given."""
    ids = ids_of(name, indices)
    bags = math.prod(indices.shape[:-1])
    offsets = torch.arange(bags + 1, device=indices.device) * indices.shape[-1]
    return ids.reshape(-1), offsets, indices.shape


def read_weights(
    name: str, weights: Tensor | None, indices: Tensor, like: Tensor, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Flat weights of the type that sums of `dtype`, or that of `like`, are made in; their gradient has their own."""
    if weights is None:
        return None
    check_each(name, weights, indices)
    check_floats(name, weights, like.device)
    return weights.reshape(-1).to(accumulation_dtype(dtype or like.dtype)).contiguous()


def check_each(name: str, given: Tensor, indices: Tensor) -> None:
    """Raises unless `given` is a tensor with an element for each index."""
    check_tensor(name, given)
    if given.shape != indices.shape:
        raise ValueError(f"`{name}` must have the shape of `indices`, {tuple(indices.shape)}, got {tuple(given.shape)}")


def read_vectors(name: str, x: Tensor, indices: Tensor, dim: int | None) -> Tensor:
    """`[..., D]` as `[B, D]`, a view if it can be one."""
    check_tensor(name, x)
    if x.dim() != indices.dim() or x.shape[:-1] != indices.shape[:-1]:
        raise ValueError(
            f"`{name}` must have the dimensions of `indices` but for the last, {[*indices.shape[:-1], 'D']}, got shape "
            f"{tuple(x.shape)}"
        )
    if dim is not None and x.shape[-1] != dim:
        raise ValueError(f"`{name}` must have the width of the table, {dim}, in its last dimension, got {x.shape[-1]}")
    check_floats(name, x, indices.device)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check_tensor(name: str, given: Any) -> None:
    """Raises unless it is a tensor."""
    if not isinstance(given, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(given).__name__}: convert with torch.tensor")


def check_floats(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raises unless `tensor` is one of floats on that device."""
    check_tensor(name, tensor)
    if tensor.dtype not in FLOAT_TYPES:
        raise TypeError(f"`{name}` must be float32, float16, bfloat16 or float64, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"`{name}` must be on the device of the others, {device}, got {tensor.device}")


def check_choices(grad: str, out_of_range: str) -> None:
    if grad not in GRADS:
        raise ValueError(f"`grad` must be one of {', '.join(GRADS)}, got {grad!r}")
    if out_of_range not in POLICIES:
        raise ValueError(f"`out_of_range` must be one of {', '.join(POLICIES)}, got {out_of_range!r}")


def check_table(name: str, table: Tensor, device: torch.device) -> None:
    """Raises unless `table` is `[V, D]` of a float dtype on the device."""
    check_tensor(name, table)
    if table.dim() != 2:
        raise ValueError(f"`{name}` must be [V, D], got shape {tuple(table.shape)}")
    check_floats(name, table, device)


def checked(
    run: Callable[[], Tensor], indices: Tensor, rows: int, place_of: Callable[[int], int] = int
) -> Tensor:  # fmt: skip
    """`run()`, with a bad id named by its place in `indices`: `place_of` its position, where ids are not in order."""
    try:
        return run()
    except BadId as error:
        flat = indices.numel() if is_transformed() else place_of(error.position)
        if flat >= indices.numel():
            place, value = "", ""
        else:
            at = [int(number) for number in torch.unravel_index(torch.tensor(flat, device="cpu"), indices.shape)]
            place, value = f" at indices{at}", f"{int(indices[tuple(at)])}"
        raise IndexError(
            f"`indices` must lie in [0, {rows}), the rows of the table, got {value or 'another'}{place}: clean them, "
            'enlarge the table, or choose out_of_range="drop"'
        ) from None
