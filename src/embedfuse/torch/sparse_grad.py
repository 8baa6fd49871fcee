"""`grad="sparse"`: the tables' gradients as coalesced rows, for torch optimizers that take them.

The distinct rows of a batch are counted on the host, so this waits for the device; dense gradients do not.
"""

from typing import Any

import torch
from torch import Tensor

from . import ops
from .backends import Csr, select
from .backends.eager_sums import tables_of
from .functions import CoefficientGrad, Layout, PooledLookup
from .once import differentiable_once


class SparseGradLookup(torch.autograd.Function):
    """`PooledLookup` whose table gradients are `torch.sparse_coo` tensors, coalesced, one row per distinct id."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, layout: Layout,
        *tables: Tensor,
    ) -> Tensor:  # fmt: skip
        out, scale = PooledLookup.forward(weights, features, ids, offsets, layout, *tables)
        ctx.layout, ctx.shapes, ctx.dtype = layout, [table.shape for table in tables], tables[0].dtype
        kept = tables if ctx.needs_input_grad[0] or layout.cut is not None else ()
        ctx.save_for_backward(weights, features, ids, offsets, scale, *kept)
        return out

    @staticmethod
    @differentiable_once(
        'sparse gradients cannot be differentiated again: use `grad="dense"` (`sparse=False` of an EmbeddingBag)'
    )
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, features, ids, offsets, scale, *tables = ctx.saved_tensors
        layout = ctx.layout
        weights_grad = None
        if ctx.needs_input_grad[0]:
            weights_grad = CoefficientGrad.forward(grad, weights, features, ids, offsets, scale, layout, *tables)
        described, source = layout.cut, torch.empty(0, dtype=ctx.dtype, device=grad.device)
        if described is None:
            described = tables_of(features)
        else:
            source = ops.base_of(tables, layout.starts, layout.size)
        csr = Csr(ids, offsets, weights, layout.bags)
        found = select(grad.device, ctx.dtype).sparse_row_grad(features, described, source, csr, scale, grad)
        grads: list[Tensor | None] = [None] * len(ctx.shapes)
        for number, (rows, sums) in enumerate(found):
            if rows.shape[0] == 0:
                # what comes next to this gradient is put into its memory, which nobody else may own
                rows, sums = rows.clone(), sums.new_empty(0, *ctx.shapes[number][1:])
            grads[number] = torch.sparse_coo_tensor(
                rows[None], sums.to(ctx.dtype), ctx.shapes[number], is_coalesced=True, check_invariants=False
            )
        return weights_grad, None, None, None, None, *grads
