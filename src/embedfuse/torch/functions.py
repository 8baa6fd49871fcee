"""Lookups in one table as `torch.autograd.Function`s: the ops of `ops.py` and `max_pool.py` for untraced calls.

An op with gradients costs about 140 µs of Python in torch's dispatcher, a Function an eighth of that (torch 2.13, one
CPU core); and `torch.func` knows Functions but not the gradients of ops. What is computed is the same, by the same
backends. Like the ops, `PooledLookup`, `RowGrad` and `CoefficientGrad` close under differentiation.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import max_pool
from .backends import Csr, Policy, select

_PLAIN = (Tensor, torch.nn.Parameter)


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether ops must be left to torch's dispatcher: something traces them, or overrides tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    if torch._C._is_tracing():
        raise NotImplementedError(
            "torch.jit.trace would take the number of ids and bags for constants: use torch.export or torch.compile"
        )
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_meta):
            return True
    return False


def is_transformed() -> bool:
    """Whether tensors may be wrapped by `torch.func` or carry tangents: Functions must see them, the host must not."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def call(function: Any, *arguments: Any) -> Any:
    """`function.apply`, or its body alone where no gradient can be asked for."""
    if is_transformed():
        return function.apply(*arguments)
    if torch.is_grad_enabled():
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.requires_grad:
                # past `Function.apply`, which inspects the signature of `forward` in every call, for 30 µs
                return super(torch.autograd.Function, function).apply(*arguments)
    return function.forward(*arguments)


def looped(function: Any) -> Any:
    """Gives a Function its batching rule for `torch.vmap`: one call after the other."""

    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        results = [
            function.apply(
                *(
                    argument if dim is None else argument.select(dim, place)
                    for argument, dim in zip(arguments, in_dims, strict=True)
                )
            )
            for place in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(columns) for columns in zip(*results, strict=True)), (0,) * len(results[0])

    function.vmap = staticmethod(vmap)
    return function


@looped
class PooledLookup(torch.autograd.Function):
    """`(table [V, D], weights [N] or None, …) → out [B, D], scale`; see `Backend.pooled_lookup`."""

    @staticmethod
    def forward(
        table: Tensor, weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, normalised: bool,
        policy: Policy,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        csr = Csr(ids, offsets, weights, offsets.shape[0] - 1)
        backend = select(table.device, table.dtype)
        return backend.pooled_lookup(table.contiguous(), features, csr, table.shape[1], normalised, policy)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        table, weights, features, ids, offsets, _, _ = inputs
        ctx.rows = table.shape[0]
        ctx.mark_non_differentiable(output[1])
        # the table may be written before backward runs (`max_norm`), so it is kept only where its values are needed
        kept = table if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, weights, features, ids, offsets, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _scale_grad: Any) -> Any:
        table, weights, features, ids, offsets, scale = ctx.saved_tensors
        table_grad = weights_grad = None
        if grad is not None and ctx.needs_input_grad[0]:
            table_grad = row_grad(grad, weights, features, ids, offsets, scale, ctx.rows)
        if grad is not None and ctx.needs_input_grad[1]:
            weights_grad = coefficient_grad(table, grad, weights, features, ids, offsets, scale)
        return table_grad, weights_grad, None, None, None, None, None


@looped
class RowGrad(torch.autograd.Function):
    """`(grad [B, D], weights, …, scale, rows) → gradient of the table [V, D]`; see `Backend.row_grad`."""

    @staticmethod
    def forward(
        grad: Tensor, weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor, rows: int
    ) -> Tensor:
        out = grad.new_zeros((rows, grad.shape[1]))
        csr = Csr(ids, offsets, weights, offsets.shape[0] - 1)
        select(grad.device, grad.dtype).row_grad(out.view(-1), features, csr, scale, grad)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:-1])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        grad, weights, features, ids, offsets, scale = ctx.saved_tensors
        normalised = scale.shape[0] != 0
        grad_grad = weights_grad = None
        if ctx.needs_input_grad[0]:
            grad_grad, _ = call(PooledLookup, upstream, weights, features, ids, offsets, normalised, "drop")
        if ctx.needs_input_grad[1]:
            _refuse(normalised)
            weights_grad = coefficient_grad(upstream, grad, weights, features, ids, offsets, scale)
        return grad_grad, weights_grad, None, None, None, None, None


@looped
class CoefficientGrad(torch.autograd.Function):
    """`(table [V, D], grad [B, D], weights, …) → gradient of the weights [N]`; see `Backend.coefficient_grad`."""

    @staticmethod
    def forward(
        table: Tensor, grad: Tensor, weights: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor
    ) -> Tensor:
        csr = Csr(ids, offsets, weights, offsets.shape[0] - 1)
        return select(table.device, table.dtype).coefficient_grad(table.contiguous(), features, csr, scale, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        table, grad, _, features, ids, offsets, scale = ctx.saved_tensors
        _refuse(scale.shape[0] != 0)
        upstream = upstream.contiguous()
        table_grad = grad_grad = None
        if ctx.needs_input_grad[0]:
            table_grad = row_grad(grad, upstream, features, ids, offsets, scale, table.shape[0])
        if ctx.needs_input_grad[1]:
            grad_grad, _ = call(PooledLookup, table, upstream, features, ids, offsets, False, "drop")
        return table_grad, grad_grad, None, None, None, None, None


@looped
class MaxLookup(torch.autograd.Function):
    """`torch.ops.embedfuse.max_lookup`."""

    forward = staticmethod(max_pool.max_lookup)
    setup_context = staticmethod(max_pool.save_max_lookup)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, winners_grad: Any) -> Any:
        plain = grad is not None and not is_watched(grad)
        return max_pool.max_lookup_backward(ctx, grad, winners_grad, _max_grad if plain else None)


@looped
class MaxGrad(torch.autograd.Function):
    """`torch.ops.embedfuse.max_grad`."""

    forward = staticmethod(max_pool.max_grad)
    setup_context = staticmethod(max_pool.save_max_grad)
    backward = staticmethod(max_pool.max_grad_backward)


def _max_grad(*arguments: Any) -> Any:
    return call(MaxGrad, *arguments)


# a backward may be traced although its forward was not


def row_grad(
    grad: Tensor, weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor, rows: int
) -> Tensor:
    """The gradient of the table, `[V, D]`."""
    if not is_watched(grad):
        made: Tensor = call(RowGrad, grad, weights, features, ids, offsets, scale, rows)
        return made
    dim, bags = grad.shape[1], offsets.shape[0] - 1
    flat: Tensor = torch.ops.embedfuse.row_grad(
        grad, rows * dim, features, ids, offsets, weights, scale, grad, bags
    )
    return flat.view(rows, dim)


def coefficient_grad(
    table: Tensor, grad: Tensor, weights: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor
) -> Tensor:
    """The gradient of the weights, `[N]`."""
    if not is_watched(grad):
        made: Tensor = call(CoefficientGrad, table, grad, weights, features, ids, offsets, scale)
        return made
    made = torch.ops.embedfuse.coefficient_grad(
        [table], [0], table.numel(), features, ids, offsets, weights, scale, grad, offsets.shape[0] - 1
    )
    return made


def _refuse(normalised: bool) -> None:
    if normalised:
        raise NotImplementedError(
            "the gradient of a weighted mean cannot be differentiated again through the weights: normalise the weights "
            'yourself and use mode="sum"'
        )
