"""Arguments of memory layers, checked once, where a layer is made or called."""

from typing import Any

import torch
from torch import Tensor


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be an int of at least {least}, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_rate(name: str, value: Any) -> None:
    """Raises unless `value` is a rate of dropout."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"`{name}` must be in [0, 1), got {value!r}")


def check_keys(num_keys: Any, dim_key: Any, heads: Any, topk: Any) -> None:
    """Raises unless these make product keys."""
    for name, value in (("num_keys", num_keys), ("dim_key", dim_key), ("heads", heads), ("topk", topk)):
        check_count(name, value)
    if dim_key % 2:
        raise ValueError(
            f"`dim_key` must be even, since each half of a query has keys of its own, got {dim_key}: use {dim_key + 1}"
        )
    if topk > num_keys:
        raise ValueError(
            f"`topk` must be at most `num_keys`, the number of keys of each half, {num_keys}, got {topk}: use more "
            "keys or fewer neighbours"
        )


def check_input(x: Tensor, dim: int, mask: Tensor | None) -> None:
    """Raises unless `x` is `[..., dim]` and `mask` says of each vector whether it is real."""
    if x.dim() < 1 or x.shape[-1] != dim:
        raise ValueError(
            f"`x` must be [..., {dim}], the `dim` of the layer in its last dimension, got shape {tuple(x.shape)}"
        )
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"`mask` must be bool, True where `x` is real, got {mask.dtype}: use `ids != padding_id`")
    if mask.shape != x.shape[:-1]:
        raise ValueError(
            f"`mask` must have one entry a vector of `x`, shape {tuple(x.shape[:-1])}, got {tuple(mask.shape)}"
        )
