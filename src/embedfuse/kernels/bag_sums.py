"""Sums over bags: of one bag, many of its rows in flight; or of several side by side, one row of each in flight."""

from .._triton import tl, triton
from .descriptors import (
    feature_column,
    feature_power,
    id_counts,
    id_is_bad,
    moment_of,
    report_bad_bags,
    scale_of,
)
from .max_norm import cut_factor


@triton.jit
def weighted_rows(
    p_table, p_weights, at, ids, inside, rows, flags, stride, o_table, longest_row, column, m_column,
    HAS_WEIGHTS: tl.constexpr, CLIPPED: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The rows of `LANES` ids, times their weights; the weights; which ids count."""
    weights = tl.full([LANES], 1.0, tl.float32)
    if HAS_WEIGHTS:
        weights = tl.load(p_weights + at, mask=inside, other=0.0)
    counts = id_counts(ids, weights, rows, flags, inside)
    o_row = tl.multiple_of((o_table + ids * stride)[:, None], [ALIGN, ALIGN])
    row = tl.load(p_table + o_row + column[None, :], mask=counts[:, None] & m_column[None, :], other=0.0)
    row = row.to(tl.float32)
    if CLIPPED:
        row = row * cut_factor(tl.sum(row * row, axis=1), longest_row)[:, None]
    if HAS_WEIGHTS:
        row = row * tl.where(counts, weights, 0.0)[:, None]
    return row, weights, counts


@triton.jit
def sum_one_bag(
    p_table, p_ids, p_weights, start, end, next_ids, wrong, rows, flags, stride, o_table, moment, longest_row,
    column, m_column,
    HAS_WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr, CHECK: tl.constexpr, CLIPPED: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sum over one bag and its moment, `ROWS` rows in flight; ids are read one round ahead, the first before.

    What was `wrong` still is, and every lane that had a bad id.
    """
    lane = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    position = start
    while position < end:
        at = position + lane
        inside = at < end
        ids = next_ids.to(tl.int64)
        next_ids = tl.load(p_ids + at + ROWS, mask=at + ROWS < end, other=0)
        row, weights, counts = weighted_rows(
            p_table, p_weights, at, ids, inside, rows, flags, stride, o_table, longest_row, column, m_column,
            HAS_WEIGHTS, CLIPPED, ALIGN, ROWS,
        )  # fmt: skip
        if CHECK:
            wrong = wrong | id_is_bad(ids, rows, flags, inside).to(tl.int32)
        acc += tl.sum(row, axis=0)[None, :]
        if NORMALISED:
            total += tl.where(counts, moment_of(weights, moment), 0.0)
        position += ROWS
    return tl.sum(acc, axis=0), tl.sum(total, axis=0), wrong


@triton.jit
def look_up_bags(
    p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, first_bag, group, lane, m_bag, start, end,
    bags, width, feature, rows, dim, flags, stride, o_table, moment, longest_row, block, column, m_column,
    HAS_WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr, CHECK: tl.constexpr, CLIPPED: tl.constexpr,
    ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, BAGS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`BAGS` bags side by side: of a feature whose first is `first_bag`, those numbered `lane`, from `group` on."""
    longest = tl.max(end - start, axis=0)
    longest = tl.where(block * BLOCK_D < dim, longest, 0)
    total = tl.zeros([BAGS], tl.float32)
    acc = tl.zeros([BAGS, BLOCK_D], tl.float32)
    wrong = tl.zeros([BAGS], tl.int32)
    j = 0
    while j < longest:
        at = start + j
        inside = at < end
        ids = tl.load(p_ids + at, mask=inside, other=0).to(tl.int64)
        row, weights, counts = weighted_rows(
            p_table, p_weights, at, ids, inside, rows, flags, stride, o_table, longest_row, column, m_column,
            HAS_WEIGHTS, CLIPPED, ALIGN, BAGS,
        )  # fmt: skip
        if CHECK:
            wrong = wrong | id_is_bad(ids, rows, flags, inside).to(tl.int32)
        acc += row
        if NORMALISED:
            total += tl.where(counts, moment_of(weights, moment), 0.0)
        j += 1
    if CHECK:
        if tl.max(wrong, axis=0) > 0:
            report_bad_bags(p_bad, p_features, p_ids, p_offsets, feature, first_bag, group, BAGS, bags)
    if NORMALISED:
        scale = scale_of(total, feature_power(p_features, feature))
        acc = acc * scale[:, None]
        # only the first column block writes
        tl.store(p_scale + first_bag + lane, scale, mask=lane < tl.where(block == 0, bags, 0))
    o_out = lane.to(tl.int64) * width + feature_column(p_features, feature)
    o_out = tl.multiple_of(o_out[:, None], [OUT_ALIGN, OUT_ALIGN])
    # frequent rows stay in the cache, results need not
    tl.store(
        p_out + o_out + column[None, :], acc.to(p_out.dtype.element_ty),
        mask=m_bag[:, None] & m_column[None, :], eviction_policy="evict_first",
    )  # fmt: skip
