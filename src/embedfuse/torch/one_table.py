"""Lookups in one table: what `embedding_bag` is made of.

An op with gradients costs about 140 µs of Python in torch's dispatcher (torch 2.13, one CPU core). So where nothing
watches ops (no compiler, no transform, no dispatch mode), its backend is called straight from a
`torch.autograd.Function` here, for an eighth of that; what is computed is the same. `torch.func.grad` knows such functions, and
not the gradients of ops.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..combiners import COMBINERS
from . import max_pool, sparse_op  # noqa: F401  (declares its ops)
from .backends import Csr, Policy, select
from .sparse_grad import sparse_lookup

_PLAIN = (Tensor, torch.nn.Parameter)


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether ops must be left to torch's dispatcher: something traces them, or overrides tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return any(type(tensor) not in _PLAIN or tensor.is_meta for tensor in tensors if tensor is not None)


def is_transformed() -> bool:
    """Whether tensors may be wrapped by `torch.func` or carry tangents: a Function must see them, the host must not."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _learns(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return is_transformed()
    return any(tensor is not None and tensor.requires_grad for tensor in tensors) or is_transformed()


# --- descriptors ---------------------------------------------------------------------------------------------------


def _describe(rows: int, dim: int, combiner: str, flags: int, device: torch.device) -> Tensor:
    # the columns of `plan.py`: one table that starts at element 0 and at column 0
    kind = COMBINERS[combiner]
    return torch.tensor([[0, 0, rows, dim, 0, 0, kind.moment, kind.power, flags]], device=device)


@cache
def _remembered(rows: int, dim: int, combiner: str, flags: int, device: torch.device) -> Tensor:
    # a tensor made in inference mode could never be saved for a backward
    with torch.inference_mode(False):
        return _describe(rows, dim, combiner, flags, device)


# a constant of the graph: copying it to the device in every call would keep CUDA graphs from being captured
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant(rows: int, dim: int, combiner: str, flags: int, device: torch.device) -> Tensor:
    return _remembered(rows, dim, combiner, flags, device)


def descriptor(weight: Tensor, combiner: str, flags: int, watched: bool) -> Tensor:
    """The descriptors of a launch with `weight` as its only table, int64 `[1, FEATURE_WIDTH]` on its device."""
    rows, dim = weight.shape
    if not watched:
        return _remembered(rows, dim, combiner, flags, weight.device)
    if torch.compiler.is_dynamo_compiling():
        made: Tensor = _constant(rows, dim, combiner, flags, weight.device)
        return made
    return _describe(rows, dim, combiner, flags, weight.device)


# --- lookups -------------------------------------------------------------------------------------------------------


def pooled(
    weight: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, normalised: bool,
    policy: Policy, watched: bool,
) -> Tensor:  # fmt: skip
    """`torch.ops.embedfuse.pooled_lookup` of one table: `[B, D]`."""
    bags = offsets.shape[0] - 1
    if watched:
        out, _ = torch.ops.embedfuse.pooled_lookup(
            [weight], [0], weight.numel(), features, ids, offsets, weights, bags, weight.shape[1], normalised, policy, 0
        )
    elif _learns(weight, weights):
        out, _ = _Pooled.apply(weight, weights, features, ids, offsets, bags, normalised, policy)
    else:
        out, _ = _Pooled.forward(weight, weights, features, ids, offsets, bags, normalised, policy)
    result: Tensor = out
    return result


def pooled_sparse(
    weight: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, normalised: bool,
    policy: Policy, watched: bool,
) -> Tensor:  # fmt: skip
    """`pooled` with a sparse gradient of `weight`, coalesced unless a compiler watches."""
    bags = offsets.shape[0] - 1
    if watched:
        out, _ = torch.ops.embedfuse.lookup_with_sparse_grad(
            weight, features, ids, offsets, weights, bags, normalised, policy
        )
        result: Tensor = out
        return result
    dim = weight.shape[1]
    return sparse_lookup(
        [weight], [0], weight.numel(), features, ids, offsets, weights, bags, dim, normalised, policy, 0
    )


def largest(
    weight: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, policy: Policy, watched: bool
) -> Tensor:
    """`torch.ops.embedfuse.max_lookup` without the winners: `[B, D]`."""
    arguments = (weight, features, ids, offsets, offsets.shape[0] - 1, weight.shape[1], policy)
    if watched:
        out, _ = torch.ops.embedfuse.max_lookup(*arguments)
    elif _learns(weight):
        out, _ = _Max.apply(*arguments)
    else:
        out, _ = max_pool.max_lookup(*arguments)
    result: Tensor = out
    return result


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        weight: Tensor, weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, bags: int,
        normalised: bool, policy: Policy,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        flat = weight.detach().reshape(-1)
        if weights is not None:
            weights = weights.detach()
        backend = select(weight.device, weight.dtype)
        return backend.pooled_lookup(
            flat, features, Csr(ids, offsets, weights, bags), weight.shape[1], normalised, policy
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, weights, features, ids, offsets, bags, _, _ = inputs
        ctx.shape, ctx.bags = weight.shape, bags
        ctx.mark_non_differentiable(output[1])
        # the table may be written before backward runs (`max_norm`), so it is kept only where its values are needed
        ctx.save_for_backward(
            weight if ctx.needs_input_grad[1] else None, weights, features, ids, offsets, output[1]
        )
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _scale_grad: Any) -> Any:  # type: ignore[override]
        weight, weights, features, ids, offsets, scale = ctx.saved_tensors
        size = ctx.shape.numel()
        weight_grad = weights_grad = None
        if grad is not None and ctx.needs_input_grad[0]:
            flat = torch.ops.embedfuse.row_grad(grad, size, features, ids, offsets, weights, scale, grad, ctx.bags)
            weight_grad = flat.view(ctx.shape)
        if grad is not None and ctx.needs_input_grad[1]:
            weights_grad = torch.ops.embedfuse.coefficient_grad(
                [weight], [0], size, features, ids, offsets, weights, scale, grad, ctx.bags
            )
        return weight_grad, weights_grad, None, None, None, None, None, None


class _Max(torch.autograd.Function):
    forward = staticmethod(max_pool.max_lookup)
    setup_context = staticmethod(max_pool.save_max_lookup)
    backward = staticmethod(max_pool.max_lookup_backward)


# --- gradients by frequency ----------------------------------------------------------------------------------------


class DivideByFrequency(torch.autograd.Function):
    """`weight` itself, but the gradient of each row is divided by how often the row stands in `ids`."""

    @staticmethod
    def forward(weight: Tensor, ids: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        rows = grad.shape[0]
        inside = (ids >= 0) & (ids < rows)
        # 16-bit floats hold no counts beyond 256 or 2048
        dtype = torch.promote_types(grad.dtype, torch.float32)
        if grad.is_sparse:
            # both list the distinct ids in ascending order
            counts = torch.unique(ids[inside], return_counts=True)[1]
            values = (grad.values().to(dtype) / counts[:, None]).to(grad.dtype)
            divided = torch.sparse_coo_tensor(
                grad.indices(), values, grad.shape, is_coalesced=True, check_invariants=False
            )
            return divided, None
        counts = torch.zeros(rows + 1, dtype=torch.int64, device=ids.device)
        counts = counts.scatter_add(0, torch.where(inside, ids.long(), rows), torch.ones_like(ids, dtype=torch.int64))
        return (grad.to(dtype) / counts[:rows, None].clamp(min=1)).to(grad.dtype), None
