"""`grad="sparse"`: the tables' gradients as coalesced rows, for torch optimizers that take them.

The distinct rows of a batch are counted on the host, so this waits for the device; dense gradients do not.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..plan import DIM, OFFSET, ROW_BASE, ROWS, T_MAX_NORM, TABLE, number_of
from .backends.eager_sums import cut_gradient
from .functions import CoefficientGrad, Layout, PooledLookup, RowGrad


class SparseGradLookup(torch.autograd.Function):
    """`PooledLookup` whose table gradients are `torch.sparse_coo` tensors, coalesced, one row per distinct id."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, layout: Layout,
        *tables: Tensor,
    ) -> Tensor:  # fmt: skip
        out, scale = PooledLookup.forward(weights, features, ids, offsets, layout, *tables)
        ctx.layout, ctx.shapes = layout, [table.shape for table in tables]
        kept = tables if ctx.needs_input_grad[0] or layout.cut is not None else ()
        ctx.save_for_backward(weights, features, ids, offsets, scale, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, features, ids, offsets, scale, *tables = ctx.saved_tensors
        layout, bags = ctx.layout, ctx.layout.bags
        weights_grad = None
        if ctx.needs_input_grad[0]:
            weights_grad = CoefficientGrad.forward(grad, weights, features, ids, offsets, scale, layout, *tables)
        compact, local, rows = _compact(features, ids, offsets, bags, len(ctx.shapes))
        total = sum(len(row) * shape[1] for row, shape in zip(rows, ctx.shapes, strict=True))
        flat = RowGrad.forward(grad, weights, compact, local, offsets, scale, replace(layout, size=total, cut=None))
        grads, start = [], 0
        for number, (row, shape) in enumerate(zip(rows, ctx.shapes, strict=True)):
            values = flat[start : start + len(row) * shape[1]].view(len(row), shape[1])
            start += values.numel()
            if layout.cut is not None:
                most = number_of(int(layout.cut[number, T_MAX_NORM]))
                values = cut_gradient(values, tables[number].index_select(0, row), most)
            grads.append(torch.sparse_coo_tensor(row[None], values, shape, is_coalesced=True, check_invariants=False))
        return weights_grad, None, None, None, None, *grads


def _compact(
    features: Tensor, ids: Tensor, offsets: Tensor, bags: int, count: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Descriptors and ids of a small table that holds only the rows of this batch, and those rows for each table."""
    lengths = (offsets[1:] - offsets[:-1]).view(features.shape[0], bags).sum(1)
    feature = torch.repeat_interleave(torch.arange(features.shape[0], device=ids.device), lengths)
    present = (ids >= 0) & (ids < features[feature, ROWS])
    keys = torch.where(present, features[feature, ROW_BASE] + ids, -1)
    distinct, inverse = torch.unique(keys, return_inverse=True)
    absent = int(distinct.shape[0] > 0 and distinct[0] < 0)
    distinct = distinct[absent:]
    compact = features.clone()
    rows, start, first = [], 0, 0
    local = torch.where(present, inverse - absent, -1)
    for table in range(count):
        mine = (features[:, TABLE] == table).nonzero()[:, 0]
        base, size, dim = (int(features[mine[0], column]) for column in (ROW_BASE, ROWS, DIM))
        row = distinct[(distinct >= base) & (distinct < base + size)] - base
        rows.append(row)
        compact[mine, OFFSET], compact[mine, ROWS] = start, len(row)
        of_table = present & (features[feature, TABLE] == table)
        local = torch.where(of_table, local - first, local)
        start += len(row) * dim
        first += len(row)
    return compact, local, rows
