"""The gradients of rows that many ids of the batch name: long segments, each in a tile of many of its gradient rows.

What `row_update.py` leaves: segments of more ids than are summed side by side, listed by `segment_kernel`.
"""

from .._triton import tl, triton
from .descriptors import table_dim, table_rule
from .row_gradients import as_looked_up, load_gradients, load_sources
from .row_step import SIZES, UNALIGNED, finish, load_rows


@triton.jit
def load_long(p_starts, p_tags, p_rows, p_long, turn, count):
    """What `runs.py` wrote of one long segment: start, end, tag, the next segment's tag, row."""
    exists = turn < count
    at = tl.load(p_long + turn, mask=exists, other=0)
    start = tl.load(p_starts + at, mask=exists, other=0)
    end = tl.load(p_starts + at + 1, mask=exists, other=0)
    tag = tl.load(p_tags + at, mask=exists, other=0)
    next_tag = tl.load(p_tags + at + 1, mask=exists, other=0)
    return start, end, tag, next_tag, tl.load(p_rows + at, mask=exists, other=0)


@triton.jit
def step_long(
    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_grad, p_winners, p_order, p_dots, p_sources,
    p_coefficients, p_partials, p_source, grad_column, stride, rule_number,
    table, dim, start, end, tag, next_tag, local,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, AT_RANDOM: tl.constexpr,
    SEVERAL_RULES: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_COEFFICIENTS: tl.constexpr, HAS_WINNERS: tl.constexpr,
    HAS_DOTS: tl.constexpr, CLIPPED: tl.constexpr, ALIGN: tl.constexpr, SOURCE_ALIGN: tl.constexpr,
    SLOT_ALIGN: tl.constexpr, GRAD_ALIGN: tl.constexpr, DIM_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    TERMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One long segment of a table of `dim` columns, at most `BLOCK_D`."""
    lane = tl.arange(0, TERMS)
    column = tl.arange(0, BLOCK_D)
    # as in `step_segments`
    column_64 = column.to(tl.int64)
    row = tl.zeros([1], tl.int64) + local
    m_column = column // DIM_ALIGN * DIM_ALIGN < dim
    last = end
    if SEVERAL_RULES:
        # nothing is read or written for another rule's rows
        last = tl.where(table_rule(p_tables, table) == rule_number, end, start)
    source, coefficient = load_sources(p_sources, p_coefficients, start + lane, start + lane < last, HAS_COEFFICIENTS)
    whole = tl.where((tag % 2 == 1) & (next_tag % 2 == 1), last, start)
    live = row * 0 + start < whole
    mask = live[:, None] & m_column[None, :]
    reads = live
    if HAS_DOTS:
        reads = row * 0 + start < last
    w, s0, s1 = load_rows(
        p_table, p_slots, p_tables, p_source, table, row, dim, column, reads, reads[:, None] & m_column[None, :],
        MODE, SLOT0, SLOT1, HAS_DOTS, ALIGN, SOURCE_ALIGN, SLOT_ALIGN,
    )  # fmt: skip
    looked_up = as_looked_up(p_tables, table, w, HAS_DOTS, CLIPPED)
    acc = tl.zeros([TERMS, BLOCK_D], tl.float32)
    position = start
    while position < last:
        j = position + lane
        inside = j < last
        # asked for one round ahead
        next_source, next_coefficient = load_sources(
            p_sources, p_coefficients, j + TERMS, j + TERMS < last, HAS_COEFFICIENTS
        )
        acc += load_gradients(
            p_grad, p_winners, p_order, p_dots, looked_up, j, source, coefficient, inside, column_64, m_column,
            grad_column, HAS_COEFFICIENTS, HAS_WINNERS, HAS_DOTS, GRAD_ALIGN,
        )  # fmt: skip
        source, coefficient = next_source, next_coefficient
        position += TERMS
    g = tl.sum(acc, axis=0)[None, :]
    line = tl.where(tag % 2 == 1, end // CHUNK * 2 + 1, start // CHUNK * 2).to(tl.int64)
    o_partial = tl.multiple_of((line * stride + row * 0)[:, None], [4, 4])
    m_partial = (row * 0 + whole < last)[:, None] & (column // 4 * 4 < stride)[None, :]
    tl.store(p_partials + o_partial + column[None, :], g, mask=m_partial)
    finish(
        p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_source, table, row, dim, column,
        row * 0 + start, live, mask, g, w, s0, s1,
        RULE, MODE, SLOT0, SLOT1, AT_RANDOM, HAS_GRAD_SCALE, HAS_DOTS, CLIPPED, ALIGN, SOURCE_ALIGN,
        SLOT_ALIGN,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def long_kernel(
    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_skip, p_grad, p_winners, p_order, p_dots,
    p_sources, p_coefficients, p_starts, p_tags, p_rows, p_list_counts, p_long, p_partials, p_source,
    grad_column, stride, rule_number,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, AT_RANDOM: tl.constexpr,
    SEVERAL_RULES: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_COEFFICIENTS: tl.constexpr, HAS_WINNERS: tl.constexpr,
    HAS_DOTS: tl.constexpr, CLIPPED: tl.constexpr, ALIGN: tl.constexpr, SOURCE_ALIGN: tl.constexpr,
    SLOT_ALIGN: tl.constexpr, GRAD_ALIGN: tl.constexpr, DIM_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr,
    WIDE_SLOT_ALIGN: tl.constexpr, WIDE_GRAD_ALIGN: tl.constexpr, WIDE_DIM_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    TERMS: tl.constexpr, NARROW: tl.constexpr, NARROW_TERMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: every so many of the long segments, `TERMS` gradients of one at a time.

    NARROW: see `segments_kernel`.
    """
    turn = tl.program_id(0)
    count = tl.load(p_list_counts)
    if HAS_SKIP:
        count = tl.where(tl.load(p_skip) != 0, 0, count)
    start, end, tag, next_tag, local = load_long(p_starts, p_tags, p_rows, p_long, turn, count)
    while turn < count:
        turn += tl.num_programs(0)
        start_1, end_1, tag_1, next_tag_1, local_1 = load_long(p_starts, p_tags, p_rows, p_long, turn, count)
        table = tag // 4
        dim = table_dim(p_tables, table)
        wide = True
        if NARROW > 1:
            wide = dim > BLOCK_D // NARROW
            if wide == 0:
                step_long(
                    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_grad, p_winners, p_order, p_dots,
                    p_sources, p_coefficients, p_partials, p_source, grad_column, stride, rule_number, table, dim,
                    start, end, tag, next_tag, local, RULE, MODE, SLOT0, SLOT1, AT_RANDOM, SEVERAL_RULES,
                    HAS_GRAD_SCALE, HAS_COEFFICIENTS, HAS_WINNERS, HAS_DOTS, CLIPPED, ALIGN, SOURCE_ALIGN, SLOT_ALIGN,
                    GRAD_ALIGN, DIM_ALIGN, CHUNK, NARROW_TERMS, BLOCK_D // NARROW,
                )  # fmt: skip
        if wide:
            step_long(
                p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_grad, p_winners, p_order, p_dots,
                p_sources, p_coefficients, p_partials, p_source, grad_column, stride, rule_number, table, dim, start,
                end, tag, next_tag, local, RULE, MODE, SLOT0, SLOT1, AT_RANDOM, SEVERAL_RULES, HAS_GRAD_SCALE,
                HAS_COEFFICIENTS, HAS_WINNERS, HAS_DOTS, CLIPPED, WIDE_ALIGN, SOURCE_ALIGN, WIDE_SLOT_ALIGN,
                WIDE_GRAD_ALIGN, WIDE_DIM_ALIGN, CHUNK, TERMS, BLOCK_D,
            )  # fmt: skip
        start, end, tag, next_tag, local = start_1, end_1, tag_1, next_tag_1, local_1
