"""The three primitives with all their derivatives: backward, forward mode and batching, each written with the others.

`gather_sum`, `gather_dot` and `scatter_sum` here choose between ops, where something traces, and
`torch.autograd.Function`s elsewhere, as `functions.py` does and for its reasons.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from ..asked_for import is_asked_for, may_come_again
from ..backends import Policy
from ..functions import call, is_transformed, is_watched
from . import bodies
from .batching import bags_of_all, tables_of_all, together


class Sink(Protocol):
    """What becomes of a table's gradient, where that is no dense tensor."""

    def take(
        self, grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor | None:
        """Given what `scatter_sum` would be given: the gradient for autograd, or None if it is taken care of."""
        ...

    def leave(self) -> None:
        """There will be no gradient of the table: others were asked for."""
        ...


# --- the primitives, differentiable to any order --------------------------------------------------------------------


def gather_sum(
    table: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, policy: Policy, sink: Sink | None = None
) -> Tensor:
    """`bodies.gather_sum`; `sink` gets the table's gradient."""
    if _is_traced(table, weights, ids) and sink is None:
        made: Tensor = torch.ops.embedfuse.gather_sum(table, weights, ids, offsets, policy)
        return made
    _refuse_nested_forward_mode()
    made = call(GatherSum, table, weights, ids, offsets, policy, sink)
    return made


def gather_dot(
    table: Tensor, x: Tensor, ids: Tensor, offsets: Tensor, policy: Policy, sink: Sink | None = None
) -> Tensor:
    """`bodies.gather_dot`; `sink` gets the table's gradient."""
    if _is_traced(table, x, ids) and sink is None:
        made: Tensor = torch.ops.embedfuse.gather_dot(table, x, ids, offsets, policy)
        return made
    _refuse_nested_forward_mode()
    made = call(GatherDot, table, x, ids, offsets, policy, sink)
    return made


def scatter_sum(
    grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, rows: int, dtype: torch.dtype, policy: Policy
) -> Tensor:
    """`bodies.scatter_sum`."""
    if _is_traced(grad, weights, ids):
        made: Tensor = torch.ops.embedfuse.scatter_sum(grad, weights, ids, offsets, rows, dtype, policy)
        return made
    _refuse_nested_forward_mode()
    made = call(ScatterSum, grad, weights, ids, offsets, rows, dtype, policy)
    return made


def scatter_and_dot(
    table: Tensor, grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, policy: Policy
) -> tuple[Tensor, Tensor]:
    """`bodies.scatter_and_dot`: in one pass where no derivative can be asked for, else by the primitives."""
    if torch.is_grad_enabled() or is_transformed():
        dots = gather_dot(table, grad, ids, offsets, policy)
        return scatter_sum(grad, weights, ids, offsets, table.shape[0], table.dtype, policy), dots
    if is_watched(table, grad, weights, ids):
        made: tuple[Tensor, Tensor] = torch.ops.embedfuse.scatter_and_dot(table, grad, weights, ids, offsets, policy)
        return made
    return bodies.scatter_and_dot(table, grad, weights, ids, offsets, policy)


def _is_traced(*tensors: Tensor | None) -> bool:
    """Whether ops are needed. They have no forward mode, and torch takes that for a tangent of zero."""
    if not is_watched(*tensors):
        return False
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        raise NotImplementedError(
            "forward mode cannot be traced here: call jvp, not linearize, and leave make_fx out, or use reverse mode"
        )
    return True


def _refuse_nested_forward_mode() -> None:
    """Torch loses the mixed terms of forward mode inside of forward mode in every Function, and says nothing."""
    if is_transformed():
        functorch = torch._C._functorch
        stack = functorch.get_interpreter_stack() or []
        if sum(level.key() == functorch.TransformType.Jvp for level in stack) > 1:
            raise NotImplementedError(
                "forward mode inside of forward mode would lose terms: use jacfwd of jacrev, or jacrev of jacfwd"
            )


# --- gradients, shared by ops and Functions -------------------------------------------------------------------------
# what is not needed is not made; ids were checked by the forward


def _gather_sum_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    grad, table, weights, ids, offsets = _alive(grad, *ctx.saved_tensors)
    if ctx.needs_input_grad[0] and ctx.needs_input_grad[1] and ctx.sink is None:
        return scatter_and_dot(table, grad, weights, ids, offsets, "drop")
    # the weights first, since a sink may change the table
    weights_grad = gather_dot(table, grad, ids, offsets, "drop") if ctx.needs_input_grad[1] else None
    return _table_grad(ctx, grad, weights, ids, offsets), weights_grad


def _gather_dot_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    grad, table, x, ids, offsets = _alive(grad, *ctx.saved_tensors)
    grad, x_grad = grad.contiguous(), None
    if ctx.needs_input_grad[1]:
        x_grad = gather_sum(table, grad, ids, offsets, "drop").to(ctx.other_dtype)
    return _table_grad(ctx, x, grad, ids, offsets), x_grad


def _table_grad(ctx: Any, grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[0]:
        return None
    if ctx.sink is not None:
        if not is_asked_for(ctx):
            if not may_come_again():
                ctx.sink.leave()
            return None
        taken: Tensor | None = ctx.sink.take(grad, weights, ids, offsets, ctx.shape, ctx.dtype)
        return taken
    return scatter_sum(grad, weights, ids, offsets, ctx.shape[0], ctx.dtype, "drop")


def _scatter_sum_grads(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    upstream, grad, weights, ids, offsets = _alive(upstream, *ctx.saved_tensors)
    grad_grad = weights_grad = None
    if ctx.needs_input_grad[0]:
        grad_grad = gather_sum(upstream, weights, ids, offsets, "drop").to(ctx.other_dtype)
    if ctx.needs_input_grad[1]:
        weights_grad = gather_dot(upstream, grad, ids, offsets, "drop")
    return grad_grad, weights_grad


def _alive(*tensors: Any) -> Any:
    """Tensors without what a transform wrapped them in that is over, as `torch.func.vjp`'s is when backward runs."""
    return tensors if torch.compiler.is_compiling() else unwrap_dead_wrappers(tensors)


def _save(ctx: Any, inputs: Sequence[Any], keep_first: bool, keep_second: bool) -> None:
    first, second, ids, offsets = inputs[:4]
    # forward mode reads all, and at once; otherwise what is not needed may be freed, or written
    forward_mode = is_transformed()
    kept = (first if keep_first or forward_mode else None, second if keep_second or forward_mode else None)
    ctx.save_for_backward(*kept, ids, offsets)
    if forward_mode:
        ctx.save_for_forward(*kept, ids, offsets)


def _save_gather_sum(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape, ctx.dtype, ctx.sink = inputs[0].shape, inputs[0].dtype, inputs[5] if len(inputs) > 5 else None
    _save(ctx, inputs, ctx.needs_input_grad[1], True)


def _save_gather_dot(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape, ctx.dtype, ctx.sink = inputs[0].shape, inputs[0].dtype, inputs[5] if len(inputs) > 5 else None
    ctx.other_dtype = inputs[1].dtype
    _save(ctx, inputs, ctx.needs_input_grad[1], ctx.needs_input_grad[0])


def _save_scatter_sum(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.rows, ctx.dtype, ctx.other_dtype = inputs[4], inputs[5], inputs[0].dtype
    _save(ctx, inputs, ctx.needs_input_grad[1], True)


def _total(*terms: Tensor | None) -> Tensor | None:
    some = [term for term in terms if term is not None]
    return some[0] + some[1] if len(some) == 2 else some[0] if some else None


# --- the Functions --------------------------------------------------------------------------------------------------


class GatherSum(torch.autograd.Function):
    """`(table, weights, ids, offsets, policy, sink) → [B, D]`."""

    @staticmethod
    def forward(
        table: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, policy: Policy, sink: Sink | None
    ) -> Tensor:
        return bodies.gather_sum(table, weights, ids, offsets, policy)

    setup_context = staticmethod(_save_gather_sum)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_gather_sum_grads(ctx, grad), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, table_t: Tensor | None, weights_t: Tensor | None, *_: Any) -> Any:
        table, weights, ids, offsets = ctx.saved_tensors
        return _total(
            None if table_t is None else gather_sum(table_t, weights, ids, offsets, "drop"),
            None if weights_t is None else gather_sum(table, weights_t, ids, offsets, "drop"),
        )

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        table, rows = tables_of_all(info, inputs[0], dims[0])
        weights = together(info.batch_size, inputs[1], dims[1])
        out = gather_sum(table, weights, *bags_of_all(info, inputs, dims, rows), *inputs[4:])
        return out.view(info.batch_size, out.shape[0] // info.batch_size, out.shape[1]), 0


class GatherDot(torch.autograd.Function):
    """`(table, x, ids, offsets, policy, sink) → [N]`."""

    @staticmethod
    def forward(table: Tensor, x: Tensor, ids: Tensor, offsets: Tensor, policy: Policy, sink: Sink | None) -> Tensor:
        return bodies.gather_dot(table, x, ids, offsets, policy)

    setup_context = staticmethod(_save_gather_dot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_gather_dot_grads(ctx, grad), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, table_t: Tensor | None, x_t: Tensor | None, *_: Any) -> Any:
        table, x, ids, offsets = ctx.saved_tensors
        return _total(
            None if table_t is None else gather_dot(table_t, x, ids, offsets, "drop"),
            None if x_t is None else gather_dot(table, x_t, ids, offsets, "drop"),
        )

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        table, rows = tables_of_all(info, inputs[0], dims[0])
        x = together(info.batch_size, inputs[1], dims[1])
        assert x is not None
        out = gather_dot(table, x, *bags_of_all(info, inputs, dims, rows), *inputs[4:])
        return out.view(info.batch_size, out.shape[0] // info.batch_size), 0


class ScatterSum(torch.autograd.Function):
    """`(grad, weights, ids, offsets, rows, dtype, policy) → [rows, D]`."""

    @staticmethod
    def forward(
        grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, rows: int, dtype: torch.dtype,
        policy: Policy,
    ) -> Tensor:  # fmt: skip
        return bodies.scatter_sum(grad, weights, ids, offsets, rows, dtype, policy)

    setup_context = staticmethod(_save_scatter_sum)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return *_scatter_sum_grads(ctx, upstream), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, grad_t: Tensor | None, weights_t: Tensor | None, *_: Any) -> Any:
        grad, weights, ids, offsets = ctx.saved_tensors
        shape = ids, offsets, ctx.rows, ctx.dtype
        return _total(
            None if grad_t is None else scatter_sum(grad_t, weights, *shape, policy="drop"),
            None if weights_t is None else scatter_sum(grad, weights_t, *shape, policy="drop"),
        )

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        size, rows = info.batch_size, inputs[4]
        grad, weights = (together(size, inputs[at], dims[at]) for at in (0, 1))
        assert grad is not None
        out = scatter_sum(grad, weights, *bags_of_all(info, inputs, dims, rows), size * rows, *inputs[5:])
        return out.view(size, rows, grad.shape[1]), 0


# --- gradients of the ops -------------------------------------------------------------------------------------------


def _register(name: str, save: Any, grads: Any, inputs: int) -> None:
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (*grads(ctx, grad), *(None,) * (inputs - 2))

    torch.library.register_autograd(f"embedfuse::{name}", backward, setup_context=save, lib=bodies._lib)


_register("gather_sum", _save_gather_sum, _gather_sum_grads, 5)
_register("gather_dot", _save_gather_dot, _gather_dot_grads, 5)
_register("scatter_sum", _save_scatter_sum, _scatter_sum_grads, 7)
