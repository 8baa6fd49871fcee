"""Rows times coefficients, summed bag by bag: `out[b, columns] = scale * Σ w row(id)`, `scale = (Σ w**p) ** (-q/2)`.

Each row is read once: N * D elements in, B * D elements of each feature out. Two kernels, since what hides the latency
of memory differs: for long bags, many rows of one bag in flight; for short bags, one row each of many bags.
"""

from .._triton import tl, triton
from .descriptors import (
    feature_column,
    feature_dim,
    feature_flags,
    feature_max_norm,
    feature_moment,
    feature_offset,
    feature_power,
    feature_rows,
    feature_stride,
    id_counts,
    id_is_bad,
    moment_of,
    report_bad_ids,
    scale_of,
)
from .max_norm import cut_factor

SIZES = ["bags", "width"]
UNALIGNED = ["p_features", "p_ids", "p_offsets", "p_weights", "p_scale", "p_bad"]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def pooled_long_kernel(
    p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, bags, width,
    HAS_WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr, CHECK: tl.constexpr, CLIPPED: tl.constexpr,
    ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one bag of one feature, `BLOCK_D` columns, `ROWS` rows in flight; ids are read one round ahead."""
    # division is cheap in 32 bits, which hold the number of programs
    feature = tl.program_id(0) // bags
    bag = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    rows = feature_rows(p_features, feature)
    dim = feature_dim(p_features, feature)
    flags = feature_flags(p_features, feature)
    stride = feature_stride(p_features, feature)
    o_table = feature_offset(p_features, feature)
    if CLIPPED:
        # one block of columns holds whole rows
        longest_row = feature_max_norm(p_features, feature)
    lane = tl.arange(0, ROWS)
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)
    m_column = column // ALIGN * ALIGN < dim
    position = tl.load(p_offsets + bag)
    end = tl.load(p_offsets + bag + 1)
    # a narrow table leaves the column blocks of the wide ones empty
    end = tl.where(block * BLOCK_D < dim, end, position)
    moment = feature_moment(p_features, feature)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    wrong = tl.zeros([ROWS], tl.int32)
    start = position
    next_ids = tl.load(p_ids + position + lane, mask=position + lane < end, other=0)
    while position < end:
        at = position + lane
        inside = at < end
        ids = next_ids.to(tl.int64)
        next_ids = tl.load(p_ids + at + ROWS, mask=at + ROWS < end, other=0)
        weights = tl.full([ROWS], 1.0, tl.float32)
        if HAS_WEIGHTS:
            weights = tl.load(p_weights + at, mask=inside, other=0.0)
        counts = id_counts(ids, weights, rows, flags, inside)
        if CHECK:
            wrong = wrong | id_is_bad(ids, rows, flags, inside).to(tl.int32)
        o_row = tl.multiple_of((o_table + ids * stride)[:, None], [ALIGN, ALIGN])
        row = tl.load(p_table + o_row + column[None, :], mask=counts[:, None] & m_column[None, :], other=0.0).to(
            tl.float32
        )
        if CLIPPED:
            row = row * cut_factor(tl.sum(row * row, axis=1), longest_row)[:, None]
        if HAS_WEIGHTS:
            row = row * tl.where(counts, weights, 0.0)[:, None]
        acc += tl.sum(row, axis=0)[None, :]
        if NORMALISED:
            total += tl.where(counts, moment_of(weights, moment), 0.0)
        position += ROWS
    if CHECK:
        if tl.max(wrong, axis=0) > 0:
            report_bad_ids(p_bad, p_ids, start + lane, end, rows, flags, feature, ROWS)
    result = tl.sum(acc, axis=0)
    if NORMALISED:
        scale = scale_of(tl.sum(total, axis=0), feature_power(p_features, feature))
        result = result * scale
        tl.store(p_scale + bag, scale, mask=block == 0)
    row_of = bag - feature * bags
    o_out = tl.multiple_of(row_of * width + feature_column(p_features, feature), OUT_ALIGN)
    # frequent rows stay in the cache, results need not
    tl.store(p_out + o_out + column, result.to(p_out.dtype.element_ty), mask=m_column, eviction_policy="evict_first")


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def pooled_short_kernel(
    p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, bags, width,
    HAS_WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr, CHECK: tl.constexpr, CLIPPED: tl.constexpr,
    ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, BAGS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: `BAGS` bags of one feature, `BLOCK_D` columns, the j-th row of each bag in flight."""
    groups = (bags + BAGS - 1) // BAGS
    program = tl.program_id(0)
    block = tl.program_id(1)
    feature = program // groups
    rows = feature_rows(p_features, feature)
    dim = feature_dim(p_features, feature)
    flags = feature_flags(p_features, feature)
    stride = feature_stride(p_features, feature)
    o_table = feature_offset(p_features, feature)
    if CLIPPED:
        # one block of columns holds whole rows
        longest_row = feature_max_norm(p_features, feature)
    lane = (program - feature * groups) * BAGS + tl.arange(0, BAGS)
    m_bag = lane < bags
    bag = feature.to(tl.int64) * bags + lane
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)
    m_column = column // ALIGN * ALIGN < dim
    start = tl.load(p_offsets + bag, mask=m_bag, other=0)
    end = tl.load(p_offsets + bag + 1, mask=m_bag, other=0)
    longest = tl.max(end - start, axis=0)
    longest = tl.where(block * BLOCK_D < dim, longest, 0)
    moment = feature_moment(p_features, feature)
    total = tl.zeros([BAGS], tl.float32)
    acc = tl.zeros([BAGS, BLOCK_D], tl.float32)
    wrong = tl.zeros([BAGS], tl.int32)
    j = 0
    while j < longest:
        at = start + j
        inside = at < end
        ids = tl.load(p_ids + at, mask=inside, other=0).to(tl.int64)
        weights = tl.full([BAGS], 1.0, tl.float32)
        if HAS_WEIGHTS:
            weights = tl.load(p_weights + at, mask=inside, other=0.0)
        counts = id_counts(ids, weights, rows, flags, inside)
        if CHECK:
            wrong = wrong | id_is_bad(ids, rows, flags, inside).to(tl.int32)
        o_row = tl.multiple_of((o_table + ids * stride)[:, None], [ALIGN, ALIGN])
        row = tl.load(p_table + o_row + column[None, :], mask=counts[:, None] & m_column[None, :], other=0.0).to(
            tl.float32
        )
        if CLIPPED:
            row = row * cut_factor(tl.sum(row * row, axis=1), longest_row)[:, None]
        if HAS_WEIGHTS:
            row = row * tl.where(counts, weights, 0.0)[:, None]
        acc += row
        if NORMALISED:
            total += tl.where(counts, moment_of(weights, moment), 0.0)
        j += 1
    if CHECK:
        if tl.max(wrong, axis=0) > 0:
            report_bad_ids(p_bad, p_ids, start, end, rows, flags, feature, 1)
    if NORMALISED:
        scale = scale_of(total, feature_power(p_features, feature))
        acc = acc * scale[:, None]
        # only the first column block writes
        tl.store(p_scale + bag, scale, mask=lane < tl.where(block == 0, bags, 0))
    o_out = lane.to(tl.int64) * width + feature_column(p_features, feature)
    o_out = tl.multiple_of(o_out[:, None], [OUT_ALIGN, OUT_ALIGN])
    tl.store(
        p_out + o_out + column[None, :], acc.to(p_out.dtype.element_ty),
        mask=m_bag[:, None] & m_column[None, :], eviction_policy="evict_first",
    )  # fmt: skip
