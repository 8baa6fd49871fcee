"""`grad="sparse"`: the tables' gradients as coalesced rows, for torch optimizers that take them.

The distinct rows of a batch are counted on the host, so this waits for the device; dense gradients do not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan import DIM, OFFSET, ROW_BASE, ROWS, TABLE


def sparse_lookup(tables: Sequence[Tensor], *rest: Any) -> Tensor:
    """`pooled_lookup` whose table gradients are `torch.sparse_coo` tensors, coalesced, one row per distinct id."""
    out: Tensor = _SparseLookup.apply(rest[5], rest, *tables)
    return out


class _SparseLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor | None, rest: tuple[Any, ...], *tables: Tensor) -> Tensor:
        starts, size, features, ids, offsets, _, bags, *others = rest
        out, scale = torch.ops.embedfuse.pooled_lookup(
            list(tables), starts, size, features, ids, offsets, weights, bags, *others
        )
        ctx.save_for_backward(features, ids, offsets, weights, scale, *tables)
        ctx.bags, ctx.starts, ctx.size = bags, starts, size
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        features, ids, offsets, weights, scale, *tables = ctx.saved_tensors
        weights_grad = None
        if ctx.needs_input_grad[0]:
            weights_grad = torch.ops.embedfuse.coefficient_grad(
                list(tables), ctx.starts, ctx.size, features, ids, offsets, weights, scale, grad, ctx.bags
            )
        compact, local, rows = _compact(features, ids, offsets, ctx.bags, len(tables))
        total = sum(len(row) * table.shape[1] for row, table in zip(rows, tables, strict=True))
        flat = torch.ops.embedfuse.row_grad(
            tables[0], total, compact, local, offsets, weights, scale, grad, ctx.bags
        )
        grads, start = [], 0
        for row, table in zip(rows, tables, strict=True):
            values = flat[start : start + len(row) * table.shape[1]].view(len(row), table.shape[1])
            start += values.numel()
            grads.append(
                torch.sparse_coo_tensor(row[None], values, table.shape, is_coalesced=True, check_invariants=False)
            )
        return weights_grad, None, *grads


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
