"""The arguments of `embedding_bag`, in all their forms → ids, offsets and weights of one lookup."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .bag_checks import ID_TYPES, check_jagged, check_same_lengths
from .compiling import EVERY_TIME

_lib: Any = torch.library.Library("embedfuse", "FRAGMENT")
_lib.define("checked_offsets(Tensor offsets, SymInt count, bool includes_end) -> Tensor", tags=EVERY_TIME)

FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class BagArguments(NamedTuple):
    """One batch. Bag `b` owns positions `offsets[b] .. offsets[b + 1]` of `ids` and `weights`."""

    ids: Tensor  # int32 or int64 [N]
    offsets: Tensor  # int64 [B + 1], from 0 to N
    weights: Tensor | None  # of the caller's dtype [N]
    shape: tuple[int, ...]  # of the output, without D
    tail: Tensor | None  # bool [N]: positions of no bag; None if there are none


def read(
    input: Tensor, offsets: Tensor | None, weights: Tensor | None, includes_end: bool, readable: bool
) -> BagArguments:
    """Brings 1-D ids with offsets and N-D ids `[..., K]` to one form.

    `readable` says that tensors on the CPU hold numbers and may be looked at, which they do not while being traced.

    Raises:
        TypeError: ids or offsets that are no integers, weights that are no floats.
        ValueError: shapes or devices that do not fit; on the CPU also offsets that break the rules.
    """
    if weights is not None and weights.shape != input.shape:
        raise ValueError(
            f"`per_sample_weights` must have the shape of `input`, {tuple(input.shape)}, got {tuple(weights.shape)}"
        )
    if weights is not None:
        _check_weights(weights, input)
    ids = _integers("input", input)
    if input.dim() == 1:
        return _flat(ids.contiguous(), offsets, weights, includes_end, readable)
    if input.dim() == 0:
        raise ValueError("`input` must have at least one dimension, got a scalar: use input[None] for a bag of one id")
    if offsets is not None:
        raise ValueError(
            f"`offsets` must be None for `input` of shape {tuple(input.shape)}, whose last dimension is the bag, got "
            f"{type(offsets).__name__}"
        )
    shape = tuple(input.shape[:-1])
    bags = 1
    for size in shape:
        bags *= size
    offsets = torch.arange(bags + 1, device=ids.device) * input.shape[-1]
    return BagArguments(ids.reshape(-1), offsets, None if weights is None else weights.reshape(-1), shape, None)


def _flat(
    ids: Tensor, offsets: Tensor | None, weights: Tensor | None, includes_end: bool, readable: bool
) -> BagArguments:
    if offsets is None:
        raise ValueError("`offsets` must be given for 1-D `input`: the position where each bag starts, e.g. [0, 2, 5]")
    offsets = _integers("offsets", offsets)
    if offsets.dim() != 1:
        raise ValueError(f"`offsets` must have one dimension, got shape {tuple(offsets.shape)}")
    if offsets.device != ids.device:
        raise ValueError(f"`offsets` must be on the device of `input`, {ids.device}, got {offsets.device}")
    count, bags = ids.shape[0], offsets.shape[0] - int(includes_end)
    if bags < 0:
        raise ValueError("`offsets` must hold at least one entry with `include_last_offset`, the end of the last bag")
    if bags == 0:
        if count and not includes_end:
            raise ValueError(f"`offsets` must not be empty: `input` holds {count} ids, which belong to no bag")
        nothing = None if weights is None else weights[:0]
        return BagArguments(ids[:0], torch.zeros(1, dtype=torch.int64, device=ids.device), nothing, (0,), None)
    on_cpu = ids.device.type == "cpu"
    if on_cpu and readable:
        offsets, end = check_offsets(offsets, count, includes_end)
        if end != count:
            ids, weights = ids[:end], None if weights is None else weights[:end]
        return BagArguments(ids, offsets, weights, (bags,), None)
    if on_cpu:
        offsets = torch.ops.embedfuse.checked_offsets(offsets, count, includes_end)
    end_of_ids = torch.full((1,), count, dtype=torch.int64, device=ids.device)
    if not includes_end:
        return BagArguments(ids, torch.cat([offsets.long(), end_of_ids]), weights, (bags,), None)
    # reading the end here would wait for the device: the last bag runs to the end of `ids`, and what is too much in it
    # is marked as absent
    tail = torch.arange(count, device=ids.device) >= offsets[-1:]
    return BagArguments(ids, torch.cat([offsets[:-1].long(), end_of_ids]), weights, (bags,), tail)


def check_offsets(offsets: Tensor, count: int, includes_end: bool) -> tuple[Tensor, int]:
    """Offsets on the CPU as int64 `[B + 1]`, and their last entry.

    Raises:
        ValueError: they do not start at 0, decrease, or leave the `count` ids.
    """
    values = offsets.numpy()
    if not includes_end:
        # one more, so that the comparison below also finds a last bag that starts beyond the ids
        values = np.empty(offsets.shape[0] + 1, np.int64)
        values[:-1], values[-1] = offsets.numpy(), count
    last = int(values[-1])
    if values[0] != 0 or last > count or np.count_nonzero(values[1:] < values[:-1]):
        raise ValueError(_broken_rule(offsets.tolist(), count))
    return (offsets.to(torch.int64).contiguous() if includes_end else torch.from_numpy(values)), last


def _broken_rule(values: list[int], count: int) -> str:
    if values[0] != 0:
        return f"`offsets` must start at 0, got {values[0]}"
    for at in range(1, len(values)):
        if values[at] < values[at - 1]:
            return f"`offsets` must not decrease, got {values[at - 1]} before {values[at]} at position {at}"
    return f"`offsets` must not exceed the number of ids, {count}, got {values[-1]}"


def _checked_offsets(offsets: Tensor, count: int, includes_end: bool) -> Tensor:
    check_offsets(offsets, count, includes_end)
    return offsets.clone()


_lib.impl("checked_offsets", _checked_offsets, "CompositeExplicitAutograd")


@torch.library.register_fake("embedfuse::checked_offsets", lib=_lib)  # type: ignore[untyped-decorator]
def _(offsets: Tensor, count: int, includes_end: bool) -> Tensor:
    return torch.empty_like(offsets)


def without(ids: Tensor, absent: Tensor, rows: int) -> Tensor:
    """Ids with -1, which is dropped, where `absent`; other negative ids become `rows`, which is reported."""
    if ids.dtype == torch.int32 and rows > torch.iinfo(torch.int32).max:
        ids = ids.long()
    return torch.where(absent, -1, torch.where(ids < 0, rows, ids))


def read_nested(input: Any, offsets: Tensor | None, weights: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Brings jagged ids `[B, *]`, and weights likewise, to 1-D ids, offsets that include the end, and weights."""
    if offsets is not None:
        raise ValueError("`offsets` must be None for nested `input`, which has its own")
    check_jagged("input", input)
    if weights is None:
        return input.values(), input.offsets(), None
    if not weights.is_nested:
        raise ValueError("`per_sample_weights` must be nested like `input`, got a dense tensor")
    check_jagged("per_sample_weights", weights)
    check_same_lengths("per_sample_weights", weights, input)
    return input.values(), input.offsets(), weights.values()


def _integers(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype in ID_TYPES:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold integers, got {tensor.dtype}: convert with `.long()`")
    return tensor.long()


def _check_weights(weights: Tensor, input: Tensor) -> None:
    if not weights.dtype.is_floating_point:
        raise TypeError(f"`per_sample_weights` must be a floating-point tensor, got {weights.dtype}")
    if weights.device != input.device:
        raise ValueError(f"`per_sample_weights` must be on the device of `input`, {input.device}, got {weights.device}")
