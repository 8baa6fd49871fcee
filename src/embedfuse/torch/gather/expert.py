"""`expert_lookup`: the layer of single-neuron experts of PEER, without the experts' rows ever being in memory."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..backends import Policy, accumulation_dtype, select
from ..collection import EmbeddingCollection
from ..functions import is_transformed, is_watched
from . import functions as gather_functions
from .arguments import (
    check_choices,
    check_each,
    check_floats,
    check_table,
    checked,
    ids_of,
    read_vectors,
    read_weights,
)
from .bodies import refuse_bad_ids
from .primitives import gather_dot, gather_reduce_sum

Activation = Literal["relu", "gelu", "silu", "identity"]
ACTIVATIONS = ("relu", "gelu", "silu", "identity")


def expert_lookup(
    x: Tensor,
    down: Tensor | EmbeddingCollection,
    up: Tensor | EmbeddingCollection,
    indices: Tensor,
    scores: Tensor,
    activation: Activation = "gelu",
    gate: Tensor | EmbeddingCollection | None = None,
    *,
    row_mask: Tensor | None = None,
    out_of_range: Policy = "raise",
) -> Tensor:
    """Expert `i` is one neuron: it reads `x` with row `i` of `down` and writes row `i` of `up`.

    Equivalent to

        hidden = activation(torch.einsum("...d,...kd->...k", x, down[indices]))
        torch.einsum("...k,...kd->...d", hidden * scores, up[indices])

    and, with a gate, to `activation(x · gate[indices]) * (x · down[indices])` for `hidden`. Nothing of the size of the
    gathered rows is stored, neither forward nor backward.

    Args:
        x: `[..., D]` of any float dtype.
        down: `[V, D]`, or a collection; see `gather_reduce_sum`.
        up: `[V, E]`, or a collection.
        indices: integers `[..., K]`.
        scores: `[..., K]` of any float dtype.
        activation: "relu", "gelu" (by the error function), "silu" or "identity".
        gate: `[V, D]`, or a collection; for gated experts.
        row_mask: bool `[V]`: experts where it is False learn nothing, as rows of `gather_reduce_sum`.
        out_of_range: as in `gather_reduce_sum`.

    Returns:
        `[..., E]` of the dtype of `up`.

    Raises:
        IndexError, ValueError, TypeError, NotImplementedError: as `gather_reduce_sum`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    check_choices("dense", out_of_range)
    ids_of("indices", indices)
    check_each("scores", scores, indices)
    for name, given in (("x", x), ("scores", scores)):
        check_floats(name, given, indices.device)
    tables = [table for table in (down, up, gate) if table is not None]
    if not any(isinstance(table, EmbeddingCollection) for table in tables):
        _check_tables(x, down, up, gate, indices)
        if row_mask is None and _is_fused(x, indices, scores, *tables):
            return _fused(x, down, up, indices, scores, activation, gate, out_of_range)
    options: Any = {"out_of_range": out_of_range, "row_mask": row_mask}
    kind = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(kind)
    if wide.dtype != x.dtype:
        # the dot products are not rounded to 16 bits in between
        x = wide
    dots = gather_dot(down, x, indices, **options)
    gates = None if gate is None else gather_dot(gate, x, indices, **options)
    return gather_reduce_sum(up, indices, hidden(dots, gates, activation) * scores, **options)


def hidden(dots: Tensor, gates: Tensor | None, activation: str) -> Tensor:
    """What a neuron makes of the dot product of its input, and of the gate's."""
    return activated(dots, activation) if gates is None else activated(gates, activation) * dots


def activated(x: Tensor, activation: str) -> Tensor:
    """The activation by name."""
    if activation == "relu":
        return torch.relu(x)
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    return torch.nn.functional.silu(x) if activation == "silu" else x


def slope(x: Tensor, activation: str) -> Tensor:
    """The derivative of the activation, itself differentiable."""
    if activation == "relu":
        return (x > 0).to(x.dtype)
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if activation == "silu":
        share = torch.sigmoid(x)
        return share * (1 + x * (1 - share))
    return torch.ones_like(x)


def _check_tables(x: Tensor, down: Any, up: Any, gate: Any, indices: Tensor) -> None:
    named = [("down", down), ("up", up), *([("gate", gate)] if gate is not None else [])]
    for name, table in named:
        check_table(name, table, indices.device)
        if table.shape[0] != down.shape[0]:
            raise ValueError(
                f"`{name}` must have one row an expert, {down.shape[0]} as `down` has, got {table.shape[0]}"
            )
    if gate is not None and gate.shape != down.shape:
        raise ValueError(f"`gate` must have the shape of `down`, {tuple(down.shape)}, got {tuple(gate.shape)}")


# --- one pass, where the backend has it ------------------------------------------------------------------------------


def _is_fused(x: Tensor, indices: Tensor, scores: Tensor, *tables: Any) -> bool:
    if is_watched(x, indices, scores, *tables) or is_transformed():
        return False
    kinds = {table.dtype for table in tables}
    if len(kinds) != 1 or x.dtype == torch.float64:
        return False
    whole = all(tensor.numel() for tensor in (x, indices, *tables))
    return whole and select(x.device, tables[0].dtype).name == "triton"


def _fused(
    x: Tensor, down: Any, up: Any, indices: Tensor, scores: Tensor, activation: str, gate: Any, policy: Policy
) -> Tensor:
    shape = indices.shape
    ids = ids_of("indices", indices).reshape(-1, shape[-1])
    vectors = read_vectors("x", x, indices, down.shape[1])
    weights = read_weights("scores", scores, indices, up)
    assert weights is not None

    def run() -> Tensor:
        arguments = vectors, down, up, weights.view(ids.shape), gate, ids, activation, policy
        made: Tensor = _ExpertLookup.apply(*arguments)  # type: ignore[no-untyped-call]
        return made

    return checked(run, indices, down.shape[0]).view(*shape[:-1], up.shape[1])


class _ExpertLookup(torch.autograd.Function):
    """`(x [B, D], down, up, scores [B, K], gate, ids [B, K], activation, policy) → [B, E]`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, scores: Tensor, gate: Tensor | None, ids: Tensor,
        activation: str, policy: Policy,
    ) -> Tensor:  # fmt: skip
        from ..backends import triton_memory

        refuse_bad_ids(ids.reshape(-1), down.shape[0], policy)
        out, dots, gates = triton_memory.expert_lookup(x, down, gate, up, ids, scores, activation)
        ctx.activation = activation
        ctx.save_for_backward(x, down, up, scores, gate, ids, dots, gates)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, down, up, scores, gate, ids, dots, gates = ctx.saved_tensors
        bags, places = ids.shape
        flat = ids.reshape(-1)
        offsets = torch.arange(bags + 1, device=ids.device) * places

        def dot(table: Tensor, vectors: Tensor) -> Tensor:
            return gather_functions.gather_dot(table, vectors, flat, offsets, "drop").view(bags, places)

        def rows(weights: Tensor, vectors: Tensor, table: Tensor) -> Tensor:
            coefficients = weights.reshape(-1).to(accumulation_dtype(table.dtype)).contiguous()
            return gather_functions.scatter_sum(
                vectors, coefficients, flat, offsets, table.shape[0], table.dtype, "drop"
            )

        def pulled(table: Tensor, weights: Tensor) -> Tensor:
            return gather_functions.gather_sum(table, weights.reshape(-1).contiguous(), flat, offsets, "drop")

        if torch.is_grad_enabled():
            # those that were kept know nothing of `x` and the tables, which a second derivative must see
            dots, gates = dot(down, x), None if gate is None else dot(gate, x)
        needs = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * 8
        neurons = hidden(dots, gates, ctx.activation)
        others = any(needs[at] for at in (0, 1, 3, 4))
        if needs[2] and others:
            coefficients = (neurons * scores).reshape(-1).to(accumulation_dtype(up.dtype))
            grads[2], agreement = gather_functions.scatter_and_dot(up, grad, coefficients, flat, offsets, "drop")
            agreement = agreement.view(bags, places)
        elif needs[2]:
            grads[2] = rows(neurons * scores, grad, up)
        elif others:
            agreement = dot(up, grad)
        if not others:
            return tuple(grads)
        if needs[3]:
            grads[3] = agreement * neurons
        # of the neurons, then of the dot products
        upstream = agreement * scores
        if gates is None:
            of_dots, of_gates = upstream * slope(dots, ctx.activation), None
        else:
            of_dots = upstream * activated(gates, ctx.activation)
            of_gates = upstream * dots * slope(gates, ctx.activation)
        if needs[0]:
            x_grad = pulled(down, of_dots)
            grads[0] = (x_grad if of_gates is None else x_grad + pulled(gate, of_gates)).to(x.dtype)
        if needs[1]:
            grads[1] = rows(of_dots, x, down)
        if needs[4] and of_gates is not None:
            grads[4] = rows(of_gates, x, gate)
        return tuple(grads)
