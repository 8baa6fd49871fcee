"""`sparse=True` where ops are traced: a lookup in one table whose gradient is sparse and of a size known beforehand.

A graph cannot hold a gradient of as many rows as there are distinct ids. So this one has a row for each id: first the
distinct rows with their whole sums, then zeros for one of them; it is not coalesced. `sparse_grad.py` serves untraced
calls.
"""

from typing import Any

import torch
from torch import Tensor

from ..plan import ROWS
from .backends import Csr, Policy, accumulation_dtype, select
from .compiling import EVERY_TIME

_lib: Any = torch.library.Library("embedfuse", "FRAGMENT")
_BATCH = "Tensor features, Tensor ids, Tensor offsets, Tensor? weights"
_lib.define(
    f"lookup_with_sparse_grad(Tensor table, {_BATCH}, SymInt bags, bool normalised, str policy) -> (Tensor, Tensor)",
    tags=EVERY_TIME,
)
_lib.define(
    f"padded_row_grad(SymInt rows, {_BATCH}, Tensor scale, Tensor grad, SymInt bags) -> (Tensor, Tensor)",
    tags=EVERY_TIME,
)


def _lookup(
    table: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int, normalised: bool,
    policy: Policy,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    flat, csr = table.detach().reshape(-1), Csr(ids, offsets, weights, bags)
    backend = select(table.device, table.dtype)
    return backend.pooled_lookup(flat, features, csr, table.shape[1], normalised, policy)


def _padded_row_grad(
    rows: int, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, scale: Tensor, grad: Tensor,
    bags: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inside = (ids >= 0) & (ids < rows)
    distinct, place = torch.unique(torch.where(inside, ids, -1), return_inverse=True)
    first = int((distinct < 0).sum())
    count, dim = distinct.shape[0] - first, grad.shape[1]
    small = features.clone()
    small[0, ROWS] = count
    values = grad.new_zeros((ids.shape[0], dim))
    csr = Csr(place - first, offsets, weights, bags)
    select(grad.device, grad.dtype).row_grad(values.view(-1)[: count * dim], small, csr, scale, grad)
    # zeros go to a row that is there anyway: to some optimizers a gradient of zero is not the same as none
    names = torch.full((ids.shape[0],), int(distinct[-1]) if count else 0, dtype=torch.int64, device=ids.device)
    names[:count] = distinct[first:]
    return names, values


_lib.impl("lookup_with_sparse_grad", _lookup, "CompositeExplicitAutograd")
_lib.impl("padded_row_grad", _padded_row_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("embedfuse::lookup_with_sparse_grad", lib=_lib)  # type: ignore[untyped-decorator]
def _(table: Any, features: Any, ids: Any, offsets: Any, weights: Any, bags: Any, normalised: Any, policy: Any) -> Any:
    scale = table.new_empty(bags if normalised else 0, dtype=accumulation_dtype(table.dtype))
    return table.new_empty((bags, table.shape[1])), scale


@torch.library.register_fake("embedfuse::padded_row_grad", lib=_lib)  # type: ignore[untyped-decorator]
def _(rows: Any, features: Any, ids: Any, offsets: Any, weights: Any, scale: Any, grad: Any, bags: Any) -> Any:
    return ids.new_empty(ids.shape, dtype=torch.int64), grad.new_empty((ids.shape[0], grad.shape[1]))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    table, features, ids, offsets, weights, bags, _, _ = inputs
    ctx.shape, ctx.bags = table.shape, bags
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(table if ctx.needs_input_grad[4] else None, features, ids, offsets, weights, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Any, _scale_grad: Any) -> Any:
    table, features, ids, offsets, weights, scale = ctx.saved_tensors
    table_grad = weights_grad = None
    if grad is not None and ctx.needs_input_grad[0]:
        names, values = torch.ops.embedfuse.padded_row_grad(
            ctx.shape[0], features, ids, offsets, weights, scale, grad, ctx.bags
        )
        table_grad = torch.sparse_coo_tensor(names[None], values, ctx.shape, check_invariants=False)
    if grad is not None and ctx.needs_input_grad[4]:
        weights_grad = torch.ops.embedfuse.coefficient_grad(
            [table], [0], ctx.shape.numel(), features, ids, offsets, weights, scale, grad, ctx.bags, None
        )
    return table_grad, None, None, None, weights_grad, None, None, None


torch.library.register_autograd("embedfuse::lookup_with_sparse_grad", _backward, setup_context=_save, lib=_lib)
