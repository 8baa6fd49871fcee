"""Sums of rows as lists, made by `row_grad` in a small table that holds the rows of the batch only.

For backends on devices, where the number of distinct rows must be asked for.
"""

import torch
from torch import Tensor

from ...plan import (
    DROP_NONPOSITIVE_WEIGHTS,
    FLAGS,
    MAX_NORM,
    NO_MAX_NORM,
    OFFSET,
    ROW_BASE,
    ROWS,
    T_DIM,
    T_MAX_NORM,
    T_ROW_BASE,
    T_ROWS,
    T_SOURCE,
    number_of,
)
from . import Backend, Csr, accumulation_dtype
from .eager_sums import cut_gradient, view_of_table


def compact_row_grad(
    backend: Backend, features: Tensor, tables: Tensor, source: Tensor, csr: Csr, scale: Tensor, grad: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """`Backend.sparse_row_grad` by `backend.row_grad`."""
    described = tables.tolist()
    lengths = (csr.offsets[1:] - csr.offsets[:-1]).view(features.shape[0], csr.bags).sum(1)
    feature = torch.repeat_interleave(torch.arange(features.shape[0], device=csr.ids.device), lengths)
    present = (csr.ids >= 0) & (csr.ids < features[feature, ROWS])
    if csr.weights is not None:
        present &= (features[feature, FLAGS] & DROP_NONPOSITIVE_WEIGHTS == 0) | (csr.weights > 0)
    keys = torch.where(present, features[feature, ROW_BASE] + csr.ids, -1)
    distinct, inverse = torch.unique(keys, return_inverse=True)
    distinct, local = distinct[(distinct[:1] < 0).sum() :], inverse - (distinct[:1] < 0).sum()
    spans = [[table[T_ROW_BASE], table[T_ROW_BASE] + table[T_ROWS]] for table in described]
    bases = torch.tensor(spans, device=distinct.device)
    edges = torch.searchsorted(distinct, bases).tolist()
    compact, start, starts = features.clone(), 0, []
    compact[:, MAX_NORM] = NO_MAX_NORM
    for table, (first, last) in zip(described, edges, strict=True):
        mine = (features[:, ROW_BASE] == table[T_ROW_BASE]) & (features[:, ROWS] > 0)
        for column, value in ((OFFSET, start), (ROWS, last - first)):
            compact[:, column] = torch.where(mine, value, compact[:, column])
        starts.append(start)
        start += (last - first) * table[T_DIM]
    # counted within the table
    firsts = torch.searchsorted(distinct, features[:, ROW_BASE].contiguous())
    small = csr._replace(ids=torch.where(present, local - firsts[feature], -1))
    flat = source.new_zeros(start, dtype=accumulation_dtype(source.dtype))
    backend.row_grad(flat, compact, small, scale, grad)
    found = []
    for table, (first, last), at in zip(described, edges, starts, strict=True):
        rows = distinct[first:last] - table[T_ROW_BASE]
        sums = flat[at : at + len(rows) * table[T_DIM]].view(len(rows), table[T_DIM])
        if table[T_MAX_NORM] != NO_MAX_NORM:
            looked_up = view_of_table(source, table, T_SOURCE, "element").index_select(0, rows).to(flat.dtype)
            sums = cut_gradient(sums, looked_up, number_of(table[T_MAX_NORM]))
        found.append((rows, sums))
    return found
