"""Lookups as `torch.autograd.Function`s: the ops of `ops.py` and `max_pool.py` for untraced calls.

An op with gradients costs about 140 µs of Python in torch's dispatcher, a Function an eighth of that (torch 2.13, one
CPU core); and `torch.func` knows Functions but not the gradients of ops. What is computed is the same, by the same
backends. Like the ops, `PooledLookup`, `RowGrad` and `CoefficientGrad` close under differentiation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from . import max_pool, ops
from .backends import Csr, Policy, select
from .zero_pages import zero_pages

_PLAIN = (Tensor, torch.nn.Parameter)
# asked in every call, of which nothing may be in the CPU's caches
_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_is_tracing: Any = torch._C._is_tracing
_are_transforms_active: Any = torch._C._are_functorch_transforms_active


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether ops must be left to torch's dispatcher: something traces them, or overrides tensors."""
    if torch.compiler.is_compiling() or _dispatch_modes():
        return True
    if _is_tracing():
        raise NotImplementedError(
            "torch.jit.trace would take the number of ids and bags for constants: use torch.export or torch.compile"
        )
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_meta):
            return True
    return False


def is_transformed() -> bool:
    """Whether tensors may be wrapped by `torch.func` or carry tangents: Functions must see them, the host must not."""
    return _are_transforms_active() or forward_ad._current_level >= 0


def call(function: Any, *arguments: Any) -> Any:
    """`function.apply`, or its body alone where no gradient can be asked for."""
    if is_transformed():
        return function.apply(*unwrap_dead_wrappers(arguments))
    arguments = unwrap_dead_wrappers(arguments)
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


# no tuple, which `torch.func` would take apart; not frozen, since that takes the host longer to make
@dataclass(slots=True)
class Layout:
    """How the tables of a lookup lie, and what it does; all that is no tensor."""

    starts: Sequence[int]  # element of a flat buffer where each table starts
    size: int  # of that buffer
    bags: int
    width: int
    normalised: bool
    policy: Policy
    owner: int = 0  # see `ledger.py`
    cut: Tensor | None = None  # int64 [T, TABLE_WIDTH], if rows of any table are cut to a length


@looped
class PooledLookup(torch.autograd.Function):
    """`(weights [N] or None, …, *tables) → out [B, width], scale`; see `Backend.pooled_lookup`."""

    @staticmethod
    def forward(
        weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, layout: Layout, *tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        base = ops.base_of(tables, layout.starts, layout.size)
        return ops.look_up(
            base, features, ids, offsets, weights, layout.bags, layout.width, layout.normalised, layout.policy,
            layout.owner,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weights, features, ids, offsets, layout, *tables = inputs
        ctx.layout, ctx.shapes = layout, [table.shape for table in tables]
        ctx.mark_non_differentiable(output[1])
        # tables may be written before backward runs, so they are kept only where their values are needed
        kept = tables if ctx.needs_input_grad[0] or layout.cut is not None else []
        ctx.save_for_backward(weights, features, ids, offsets, output[1], *kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _scale_grad: Any) -> Any:
        weights, features, ids, offsets, scale, *tables = ctx.saved_tensors
        weights_grad: Tensor | None = None
        table_grads: Sequence[Tensor | None] = [None] * len(ctx.shapes)
        if grad is not None and ctx.needs_input_grad[0]:
            weights_grad = coefficient_grad(grad, weights, features, ids, offsets, scale, ctx.layout, tables)
        if grad is not None and any(ctx.needs_input_grad[5:]):
            flat = row_grad(grad, weights, features, ids, offsets, scale, ctx.layout, tables)
            table_grads = ops.views_of(flat, ctx.shapes, ctx.layout.starts)
        return weights_grad, None, None, None, None, *table_grads


@looped
class RowGrad(torch.autograd.Function):
    """`(grad [B, width], weights, …, scale, layout, *tables) → gradient of all tables, flat [size]`.

    See `Backend.row_grad`; the tables matter, and need be given, where rows are cut.
    """

    @staticmethod
    def forward(
        grad: Tensor, weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor,
        layout: Layout, *tables: Tensor,
    ) -> Tensor:  # fmt: skip
        out = zero_pages((layout.size,), grad)
        csr = Csr(ids, offsets, weights, layout.bags)
        rows = ops.rows_to_cut(tables, layout.starts, layout.size, layout.cut)
        select(grad.device, grad.dtype).row_grad(out, features, csr, scale, grad, rows)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layout, ctx.count = inputs[6], len(inputs)
        ctx.save_for_backward(*inputs[:6])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        grad, weights, features, ids, offsets, scale = ctx.saved_tensors
        ops.refuse_second_cut(ctx.layout.cut)
        flat = replace(ctx.layout, starts=(0,), policy="drop")
        grad_grad = weights_grad = None
        if ctx.needs_input_grad[0]:
            grad_grad, _ = call(PooledLookup, weights, features, ids, offsets, flat, upstream)
        if ctx.needs_input_grad[1]:
            ops.refuse_second_derivative(scale.shape[0] != 0)
            weights_grad = coefficient_grad(grad, weights, features, ids, offsets, scale, flat, [upstream])
        return grad_grad, weights_grad, *[None] * (ctx.count - 2)


@looped
class CoefficientGrad(torch.autograd.Function):
    """`(grad [B, width], weights, …, *tables) → gradient of the weights [N]`; see `Backend.coefficient_grad`."""

    @staticmethod
    def forward(
        grad: Tensor, weights: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor, layout: Layout,
        *tables: Tensor,
    ) -> Tensor:  # fmt: skip
        base = ops.base_of(tables, layout.starts, layout.size)
        csr = Csr(ids, offsets, weights, layout.bags)
        return select(base.device, base.dtype).coefficient_grad(base, features, csr, scale, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, _, features, ids, offsets, scale, layout, *tables = inputs
        ctx.layout, ctx.shapes = layout, [table.shape for table in tables]
        ctx.save_for_backward(grad, features, ids, offsets, scale, *tables)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        grad, features, ids, offsets, scale, *tables = ctx.saved_tensors
        ops.refuse_second_derivative(scale.shape[0] != 0)
        upstream = upstream.contiguous()
        grad_grad: Tensor | None = None
        table_grads: Sequence[Tensor | None] = [None] * len(tables)
        if ctx.needs_input_grad[0]:
            layout = replace(ctx.layout, normalised=False, policy="drop")
            grad_grad, _ = call(PooledLookup, upstream, features, ids, offsets, layout, *tables)
        if any(ctx.needs_input_grad[7:]):
            flat = row_grad(grad, upstream, features, ids, offsets, scale, ctx.layout, tables)
            table_grads = ops.views_of(flat, ctx.shapes, ctx.layout.starts)
        return grad_grad, None, None, None, None, None, None, *table_grads


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
    grad: Tensor, weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor,
    layout: Layout, tables: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """The gradient of all tables, flat; `tables` matter where rows are cut."""
    if layout.cut is None:
        tables = ()
    if not is_watched(grad):
        made: Tensor = call(RowGrad, grad, weights, features, ids, offsets, scale, layout, *tables)
        return made
    made = torch.ops.embedfuse.row_grad(
        grad, layout.size, features, ids, offsets, weights, scale, grad, layout.bags, layout.cut, list(tables),
        list(layout.starts),
    )  # fmt: skip
    return made


def coefficient_grad(
    grad: Tensor, weights: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor, layout: Layout,
    tables: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """The gradient of the weights, `[N]`."""
    if not is_watched(grad):
        made: Tensor = call(CoefficientGrad, grad, weights, features, ids, offsets, scale, layout, *tables)
        return made
    made = torch.ops.embedfuse.coefficient_grad(
        list(tables), layout.starts, layout.size, features, ids, offsets, weights, scale, grad, layout.bags, layout.cut
    )
    return made
