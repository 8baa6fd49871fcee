"""Weights of product-key memories of other projects, as ours.

What is called what, with H heads (1 if they share keys), n keys a half, and halves of width d:

ours                              shape             XLM and Meta                  lucidrains
query.project.weight              [H * 2 * d, dim]  query_proj.query_mlps.0.*     to_queries.weight, halves before heads
query.project.bias                [H * 2 * d]       (XLM's notebook: no           none, zeros
query.norm.* (batch)              [H * 2 * d]       query_mlps in the names)      norm.fn.*
                                                    query_proj.query_mlps.1.*
query.norm.* (layer)              [H, 2, d]                                       norm.* [d], for all heads
keys.keys                         [H, 2, n, d]      keys, also [2 * H * n, d],    keys [H, n, 2, d]
                                                    and [n, d] for all
values.collection.tables.weight   [n ** 2, width]   values.weight                 values.weight
gate.*                            [width, dim]      swilu_projection.*
out.*                             [dim, width]      value_proj.*
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from .checks import check_choice
from .norms import HalfNorm, MaskedBatchNorm
from .product_key import ProductKeyMemory

Source = Literal["xlm", "meta", "lucidrains"]
SOURCES = ("xlm", "meta", "lucidrains")
VALUES = "values.collection.tables.weight"
_STATISTICS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def load_memory(
    memory: ProductKeyMemory, state: Mapping[str, Tensor], source: Source, prefix: str = ""
) -> ProductKeyMemory:
    """Loads the weights that another project's layer has in `state` under `prefix`; returns `memory`.

    Args:
        memory: made with that layer's sizes and options.
        state: a state dict.
        source: "xlm" (also its notebook), "meta" or "lucidrains".
        prefix: of the layer's names in `state`, such as "layers.4.feed_forward.".

    Raises:
        ValueError: weights that are missing, left over, or of another shape; a Meta layer that shares another layer's
            values may lack them, and then those of `memory` stay.
    """
    check_choice("source", source, SOURCES)
    left = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    if not left:
        raise ValueError(f"`prefix` must begin the names of a layer in `state`, got {prefix!r}, which begins none")
    found = _of_lucidrains(memory, left) if source == "lucidrains" else _of_xlm(memory, left)
    if left:
        raise ValueError(
            f"`state` holds {', '.join(sorted(left))}, which `memory` has no place for: make it with the options of "
            "that layer (query_norm, gating, ...); a gate of one number, and lucidrains' concatenated values, have none"
        )
    wanted = memory.state_dict()
    if source == "meta" and VALUES not in found:
        found[VALUES] = wanted[VALUES]
    for name, tensor in wanted.items():
        if name not in found:
            raise ValueError(f"`state` lacks what `memory` has as `{name}`: make `memory` with the layer's options")
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"`{name}` must have shape {tuple(tensor.shape)} by the sizes of `memory`, got "
                f"{tuple(found[name].shape)}"
            )
    memory.load_state_dict(found)
    return memory


def _of_xlm(memory: ProductKeyMemory, left: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {"values.weight": VALUES}
    for name in ("weight", "bias"):
        renamed |= {f"swilu_projection.{name}": f"gate.{name}", f"value_proj.{name}": f"out.{name}"}
    for place in ("query_proj.query_mlps", "query_proj"):
        renamed |= {f"{place}.0.{name}": f"query.project.{name}" for name in ("weight", "bias")}
        if isinstance(memory.query.norm, MaskedBatchNorm):
            renamed |= {f"{place}.1.{name}": f"query.norm.{name}" for name in _STATISTICS}
    found = {ours: left.pop(theirs) for theirs, ours in renamed.items() if theirs in left}
    keys = left.pop("keys", None)
    if keys is not None:
        found["keys.keys"] = _keys_of_xlm(memory, keys)
    return found


def _keys_of_xlm(memory: ProductKeyMemory, keys: Tensor) -> Tensor:
    heads, _, number, half = memory.keys.keys.shape
    if keys.dim() == 2 and keys.shape == (number, half):
        return keys.expand(heads, 2, number, half)
    if keys.dim() == 2 and keys.numel() == memory.keys.keys.numel():
        return keys.reshape(heads, 2, number, half)
    return keys


def _of_lucidrains(memory: ProductKeyMemory, left: dict[str, Tensor]) -> dict[str, Tensor]:
    heads, half = memory.keys.heads, memory.query.half_width
    found = {}

    def by_head(tensor: Tensor) -> Tensor:
        """From halves of heads to heads of halves."""
        if tensor.dim() == 0 or tensor.shape[0] != 2 * heads * half:
            return tensor
        made: Tensor = tensor.unflatten(0, (2, heads, half)).transpose(0, 1).flatten(0, 2)
        return made

    if "to_queries.weight" in left:
        found["query.project.weight"] = by_head(left.pop("to_queries.weight"))
        bias = memory.query.project.bias
        if bias is not None:
            found["query.project.bias"] = torch.zeros_like(bias)
    norm = memory.query.norm
    for name in _STATISTICS:
        if isinstance(norm, HalfNorm) and f"norm.{name}" in left:
            found[f"query.norm.{name}"] = left.pop(f"norm.{name}").expand(heads, 2, half)
        if isinstance(norm, MaskedBatchNorm) and f"norm.fn.{name}" in left:
            found[f"query.norm.{name}"] = by_head(left.pop(f"norm.fn.{name}"))
    if "keys" in left:
        found["keys.keys"] = left.pop("keys").transpose(1, 2)
    if "values.weight" in left:
        found[VALUES] = left.pop("values.weight")
    return found
