"""The largest row of each bag, column by column: `out[b, c] = max w row(id)[c]`, and the position of its id.

The first position wins ties, and the first NaN over all numbers. A bag without ids gives 0 and the position -1. The
gradient is that of `row_update.py`, of the winners alone.
"""

from .._triton import tl, triton
from .bag_sums import weighted_rows
from .descriptors import (
    feature_column,
    feature_dim,
    feature_flags,
    feature_max_norm,
    feature_offset,
    feature_rows,
    feature_stride,
    id_is_bad,
    report_bad_bags,
)
from .pooled_lookup import SIZES, UNALIGNED


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def max_kernel(
    p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_winners, p_bad, bags, width,
    HAS_WEIGHTS: tl.constexpr, CHECK: tl.constexpr, CLIPPED: tl.constexpr, ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr,
    BAGS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: `BAGS` bags of one feature, `BLOCK_D` columns, the j-th row of each bag in flight."""
    groups = (bags + BAGS - 1) // BAGS
    program = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    feature = program // groups
    rows = feature_rows(p_features, feature)
    dim = feature_dim(p_features, feature)
    flags = feature_flags(p_features, feature)
    stride = feature_stride(p_features, feature)
    o_table = feature_offset(p_features, feature)
    longest_row = 0.0
    if CLIPPED:
        # one block of columns holds whole rows
        longest_row = feature_max_norm(p_features, feature)
    group = (program - feature * groups) * BAGS
    lane = group + tl.arange(0, BAGS)
    m_bag = lane < bags
    bag = feature * bags + lane
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)
    m_column = column // ALIGN * ALIGN < dim
    start = tl.load(p_offsets + bag, mask=m_bag, other=0)
    end = tl.load(p_offsets + bag + 1, mask=m_bag, other=0)
    longest = tl.max(end - start, axis=0)
    longest = tl.where(block * BLOCK_D < dim, longest, 0)
    best = tl.zeros([BAGS, BLOCK_D], tl.float32)
    winner = tl.full([BAGS, BLOCK_D], -1, tl.int64)
    wrong = tl.zeros([BAGS], tl.int32)
    j = 0
    while j < longest:
        at = start + j
        inside = at < end
        ids = tl.load(p_ids + at, mask=inside, other=0).to(tl.int64)
        row, _, counts = weighted_rows(
            p_table, p_weights, at, ids, inside, rows, flags, stride, o_table, longest_row, column, m_column,
            HAS_WEIGHTS, CLIPPED, ALIGN, BAGS,
        )  # fmt: skip
        if CHECK:
            wrong = wrong | id_is_bad(ids, rows, flags, inside).to(tl.int32)
        first_nan = (row != row) & (best == best)
        takes = counts[:, None] & ((row > best) | (winner < 0) | first_nan)
        best = tl.where(takes, row, best)
        winner = tl.where(takes, at[:, None], winner)
        j += 1
    if CHECK:
        if tl.max(wrong, axis=0) > 0:
            report_bad_bags(p_bad, p_features, p_ids, p_offsets, feature, feature * bags, group, BAGS, bags)
    o_out = lane * width + feature_column(p_features, feature)
    o_out = tl.multiple_of(o_out[:, None], [OUT_ALIGN, OUT_ALIGN])
    m_out = m_bag[:, None] & m_column[None, :]
    tl.store(p_out + o_out + column[None, :], best.to(p_out.dtype.element_ty), mask=m_out)
    tl.store(p_winners + o_out + column[None, :], winner, mask=m_out)
