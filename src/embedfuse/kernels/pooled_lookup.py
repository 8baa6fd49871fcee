"""Rows times coefficients, summed bag by bag: `out[b, columns] = scale * Σ w row(id)`, `scale = (Σ w**p) ** (-q/2)`.

Each row is read once: N * D elements in, B * D elements of each feature out. What hides the latency of memory differs:
for long bags, many rows of one bag in flight; for short bags, one row each of many bags. Where bags are of middling
length on average, features of one id may stand beside features of a hundred, which the host does not know, so
`pooled_long_kernel` looks for itself at how long the bags around its own are.
"""

from .._triton import tl, triton
from .bag_sums import look_up_bags, sum_one_bag
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
    report_bad_bags,
    scale_of,
)

SIZES = ["bags", "width"]
UNALIGNED = ["p_features", "p_ids", "p_offsets", "p_weights", "p_scale", "p_bad"]


@triton.jit
def look_up_in_turns(
    p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, first_bag, number, start, end, group,
    members, exists, starts, ends, alone, bags, width, feature, rows, dim, flags, stride, o_table, moment, longest_row,
    block,
    HAS_WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr, CHECK: tl.constexpr, CLIPPED: tl.constexpr,
    ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The bags of one program, see `pooled_long_kernel`; `number` is the first, `members` are those of its group."""
    lane = tl.arange(0, ROWS)
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)
    m_column = column // ALIGN * ALIGN < dim
    if alone:
        # a narrow table leaves the column blocks of the wide ones empty
        end = tl.where(block * BLOCK_D < dim, end, start)
        ids = tl.load(p_ids + start + lane, mask=start + lane < end, other=0)
        wrong = tl.zeros([ROWS], tl.int32)
        for turn in tl.static_range(TURNS):
            if turn + 1 < TURNS:
                # the first ids of the next bag, before this one's rows are waited for
                next_end = tl.load(p_offsets + first_bag + tl.minimum(number + turn + 2, bags))
                next_end = tl.where(block * BLOCK_D < dim, next_end, end)
                next_ids = tl.load(p_ids + end + lane, mask=end + lane < next_end, other=0)
            result, total, wrong = sum_one_bag(
                p_table, p_ids, p_weights, start, end, ids, wrong, rows, flags, stride, o_table, moment, longest_row,
                column, m_column, HAS_WEIGHTS, NORMALISED, CHECK, CLIPPED, ALIGN, ROWS, BLOCK_D,
            )  # fmt: skip
            bag = number + turn
            if NORMALISED:
                scale = scale_of(total, feature_power(p_features, feature))
                result = result * scale
                tl.store(p_scale + first_bag + bag, scale, mask=(block == 0) & (bag < bags))
            o_out = tl.multiple_of(bag.to(tl.int64) * width + feature_column(p_features, feature), OUT_ALIGN)
            # the last program of a feature may have turns left over
            m_out = column // ALIGN * ALIGN < tl.where(bag < bags, dim, 0) if TURNS > 1 else m_column
            tl.store(
                p_out + o_out + column, result.to(p_out.dtype.element_ty), mask=m_out, eviction_policy="evict_first"
            )
            if turn + 1 < TURNS:
                start, end, ids = end, next_end, next_ids
        if CHECK:
            if tl.max(wrong, axis=0) > 0:
                report_bad_bags(p_bad, p_features, p_ids, p_offsets, feature, first_bag, number, TURNS, bags)
    elif TURNS > 1:
        # not after what bags alone need, which would take up registers beside those of the group
        if group == number:
            look_up_bags(
                p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, first_bag, group, members,
                exists, starts, ends, bags, width, feature, rows, dim, flags, stride, o_table, moment, longest_row,
                block, column, m_column, HAS_WEIGHTS, NORMALISED, CHECK, CLIPPED, ALIGN, OUT_ALIGN, GROUP, BLOCK_D,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def pooled_long_kernel(
    p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, bags, width,
    HAS_WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr, CHECK: tl.constexpr, CLIPPED: tl.constexpr,
    ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, GROUP: tl.constexpr,
    SHORT: tl.constexpr, NARROW: tl.constexpr, NARROW_LANES: tl.constexpr, NARROW_ALIGN: tl.constexpr,
    NARROW_OUT_ALIGN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: `TURNS` bags of one feature, one after the other, `BLOCK_D` columns.

    With more than one turn, `GROUP` bags of at most `SHORT` ids on average are looked up by the first of their
    programs, side by side, and the others have nothing to do. With NARROW more than 1, tables of at most that part of
    `BLOCK_D` columns have tiles of NARROW_LANES rows, and alignments of their own.
    """
    # division is cheap in 32 bits, which hold the number of programs
    turns = (bags + TURNS - 1) // TURNS
    feature = tl.program_id(0) // turns
    number = (tl.program_id(0) - feature * turns) * TURNS
    first_bag = feature.to(tl.int64) * bags
    block = tl.program_id(1)
    rows = feature_rows(p_features, feature)
    dim = feature_dim(p_features, feature)
    flags = feature_flags(p_features, feature)
    stride = feature_stride(p_features, feature)
    o_table = feature_offset(p_features, feature)
    moment = feature_moment(p_features, feature)
    longest_row = 0.0
    if CLIPPED:
        # one block of columns holds whole rows
        longest_row = feature_max_norm(p_features, feature)
    # all that either way needs is asked for at once
    start = tl.load(p_offsets + first_bag + number)
    end = tl.load(p_offsets + first_bag + number + 1)
    group = number // GROUP * GROUP
    members = group + tl.arange(0, GROUP)
    exists = members < bags
    starts = start
    ends = end
    alone = True
    if TURNS > 1:
        starts = tl.load(p_offsets + first_bag + members, mask=exists, other=0)
        ends = tl.load(p_offsets + first_bag + members + 1, mask=exists, other=0)
        ids_of_group = tl.load(p_offsets + first_bag + tl.minimum(group + GROUP, bags))
        ids_of_group -= tl.load(p_offsets + first_bag + group)
        alone = ids_of_group > SHORT * GROUP
    wide = True
    if NARROW > 1:
        wide = dim > BLOCK_D // NARROW
        if (wide == 0) & (block == 0):
            look_up_in_turns(
                p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, first_bag, number, start, end,
                group, members, exists, starts, ends, alone, bags, width, feature, rows, dim, flags, stride, o_table,
                moment, longest_row, block, HAS_WEIGHTS, NORMALISED, CHECK, CLIPPED, NARROW_ALIGN, NARROW_OUT_ALIGN,
                NARROW_LANES, TURNS, GROUP, BLOCK_D // NARROW,
            )  # fmt: skip
    if wide:
        look_up_in_turns(
            p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, first_bag, number, start, end,
            group, members, exists, starts, ends, alone, bags, width, feature, rows, dim, flags, stride, o_table,
            moment, longest_row, block, HAS_WEIGHTS, NORMALISED, CHECK, CLIPPED, ALIGN, OUT_ALIGN, ROWS, TURNS, GROUP,
            BLOCK_D,
        )  # fmt: skip


@triton.jit
def look_up_group(
    p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, first_bag, group, bags, width, feature,
    rows, dim, flags, stride, o_table, moment, longest_row, block,
    HAS_WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr, CHECK: tl.constexpr, CLIPPED: tl.constexpr,
    ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, BAGS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`BAGS` bags of one feature, from `group` on, side by side."""
    lane = group + tl.arange(0, BAGS)
    m_bag = lane < bags
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)
    m_column = column // ALIGN * ALIGN < dim
    start = tl.load(p_offsets + first_bag + lane, mask=m_bag, other=0)
    end = tl.load(p_offsets + first_bag + lane + 1, mask=m_bag, other=0)
    look_up_bags(
        p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, first_bag, group, lane, m_bag, start,
        end, bags, width, feature, rows, dim, flags, stride, o_table, moment, longest_row, block, column, m_column,
        HAS_WEIGHTS, NORMALISED, CHECK, CLIPPED, ALIGN, OUT_ALIGN, BAGS, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def pooled_short_kernel(
    p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, bags, width,
    HAS_WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr, CHECK: tl.constexpr, CLIPPED: tl.constexpr,
    ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr, BAGS: tl.constexpr, NARROW: tl.constexpr,
    NARROW_LANES: tl.constexpr, NARROW_ALIGN: tl.constexpr, NARROW_OUT_ALIGN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: `BAGS` bags of one feature, `BLOCK_D` columns, the j-th row of each bag in flight.

    With NARROW more than 1, programs of tables of at most that part of `BLOCK_D` columns have NARROW_LANES bags each,
    until all are done, and alignments of their own.
    """
    groups = (bags + BAGS - 1) // BAGS
    program = tl.program_id(0)
    block = tl.program_id(1)
    feature = program // groups
    rows = feature_rows(p_features, feature)
    dim = feature_dim(p_features, feature)
    flags = feature_flags(p_features, feature)
    stride = feature_stride(p_features, feature)
    o_table = feature_offset(p_features, feature)
    moment = feature_moment(p_features, feature)
    longest_row = 0.0
    if CLIPPED:
        # one block of columns holds whole rows
        longest_row = feature_max_norm(p_features, feature)
    group = (program - feature * groups) * BAGS
    first_bag = feature.to(tl.int64) * bags
    wide = True
    if NARROW > 1:
        wide = dim > BLOCK_D // NARROW
        ahead = NARROW_LANES // BAGS
        if (wide == 0) & (block == 0) & (group * ahead < bags):
            look_up_group(
                p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, first_bag, group * ahead,
                bags, width, feature, rows, dim, flags, stride, o_table, moment, longest_row, block, HAS_WEIGHTS,
                NORMALISED, CHECK, CLIPPED, NARROW_ALIGN, NARROW_OUT_ALIGN, NARROW_LANES, BLOCK_D // NARROW,
            )  # fmt: skip
    if wide:
        look_up_group(
            p_table, p_features, p_ids, p_offsets, p_weights, p_out, p_scale, p_bad, first_bag, group, bags, width,
            feature, rows, dim, flags, stride, o_table, moment, longest_row, block, HAS_WEIGHTS, NORMALISED, CHECK,
            CLIPPED, ALIGN, OUT_ALIGN, BAGS, BLOCK_D,
        )  # fmt: skip
