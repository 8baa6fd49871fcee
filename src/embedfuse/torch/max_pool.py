"""Max pooling over one table, which is no combiner: two ops, declared as in `ops.py`.

`max_lookup` also tells which position won each element, so that its gradient reads no table; `max_grad` puts each
element's gradient where the winner came from, and its own gradient is a gather.
"""

from typing import Any

import torch
from torch import Tensor

from .backends import Csr, Policy, select
from .compiling import EVERY_TIME

_lib: Any = torch.library.Library("embedfuse", "FRAGMENT")
_lib.define(
    "max_lookup(Tensor table, Tensor features, Tensor ids, Tensor offsets, SymInt bags, SymInt width, str policy)"
    " -> (Tensor, Tensor)",
    tags=EVERY_TIME,
)
_lib.define(
    "max_grad(Tensor like, SymInt size, Tensor features, Tensor ids, Tensor offsets, Tensor winners, Tensor grad,"
    " SymInt bags) -> Tensor",
    tags=EVERY_TIME,
)


def max_lookup(
    table: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, bags: int, width: int, policy: Policy
) -> tuple[Tensor, Tensor]:
    """The body of the op: `out[b] = table[ids of bag b].amax(0)`, and the positions in `ids` that won, -1 for none."""
    csr = Csr(ids, offsets, None, bags)
    backend = select(table.device, table.dtype)
    out, winners = backend.max_lookup(table.detach().contiguous(), features, csr, width, policy)
    return out, winners


def max_grad(
    like: Tensor, size: int, features: Tensor, ids: Tensor, offsets: Tensor, winners: Tensor, grad: Tensor, bags: int
) -> Tensor:
    """The body of the op: the gradient of the table, flat."""
    out = like.new_zeros(size)
    backend = select(like.device, like.dtype)
    backend.max_grad(out, features, Csr(ids, offsets, None, bags), winners, grad)
    return out


_lib.impl("max_lookup", max_lookup, "CompositeExplicitAutograd")
_lib.impl("max_grad", max_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("embedfuse::max_lookup", lib=_lib)  # type: ignore[untyped-decorator]
def _(table: Any, features: Any, ids: Any, offsets: Any, bags: Any, width: Any, policy: Any) -> Any:
    return table.new_empty((bags, width)), table.new_empty((bags, width), dtype=torch.int64)


@torch.library.register_fake("embedfuse::max_grad", lib=_lib)  # type: ignore[untyped-decorator]
def _(like: Any, size: Any, features: Any, ids: Any, offsets: Any, winners: Any, grad: Any, bags: Any) -> Any:
    return like.new_empty(size)


def save_max_lookup(ctx: Any, inputs: Any, output: Any) -> None:
    """What the gradient of `max_lookup` needs: not the table, which may be written before backward runs."""
    table, features, ids, offsets, bags, _, _ = inputs
    ctx.shape, ctx.bags = table.shape, bags
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(features, ids, offsets, output[1])
    ctx.set_materialize_grads(False)


def max_lookup_backward(ctx: Any, grad: Any, _winners_grad: Any, run: Any = None) -> Any:
    """The gradients of `max_lookup`, one for each argument; `run` stands in for the op `max_grad`."""
    features, ids, offsets, winners = ctx.saved_tensors
    table_grad = None
    if grad is not None and ctx.needs_input_grad[0]:
        run = run or torch.ops.embedfuse.max_grad
        flat = run(grad, ctx.shape.numel(), features, ids, offsets, winners, grad, ctx.bags)
        table_grad = flat.view(ctx.shape)
    return table_grad, None, None, None, None, None, None


torch.library.register_autograd("embedfuse::max_lookup", max_lookup_backward, setup_context=save_max_lookup, lib=_lib)


def save_max_grad(ctx: Any, inputs: Any, output: Any) -> None:
    """What the gradient of `max_grad` needs."""
    _, _, _, ids, _, winners, _, _ = inputs
    ctx.save_for_backward(ids, winners)


def max_grad_backward(ctx: Any, upstream: Any) -> Any:
    """The gradients of `max_grad`: each element of `grad` gets what stands where it went."""
    ids, winners = ctx.saved_tensors
    width = winners.shape[1]
    # the appended row answers for position -1, that is, no winner
    row = torch.cat([ids, ids.new_zeros(1)])[winners].long()
    element = row * width + torch.arange(width, device=row.device)
    grad = torch.where(winners >= 0, torch.cat([upstream, upstream.new_zeros(width)])[element], 0)
    return None, None, None, None, None, None, grad, None


torch.library.register_autograd("embedfuse::max_grad", max_grad_backward, setup_context=save_max_grad, lib=_lib)
