"""The gradient of each row in the batch: `g[row] = Σ coefficient * grad[bag, columns]` over its ids, in fixed order.

`segments_kernel` sums the short segments of `runs.py` side by side, several rows to a tile; the long ones, each in a
tile of many of its gradients, are left to `long_segments.py`. Rows of one segment end there, see `row_step.py`. The
pieces of a run that was cut leave partial sums, see `cut_runs.py`.

With HAS_DOTS the gradient of each id's weight is made beside: `dots[position] = <row(id), grad[bag, columns]>`.

Bytes: each gradient row once, each row and its slots once in, once out; cut rows their partial sums besides. Dots read
the row once for each segment of it.
"""

from .._triton import tl, triton
from .descriptors import NARROW_BLOCK, table_dim, table_rule
from .row_gradients import as_looked_up, load_coefficients, load_gradients, load_sources
from .row_step import SIZES, UNALIGNED, finish, load_rows


@triton.jit
def load_segments(p_starts, p_tags, p_rows, p_first_sources, first, cursor, stop, lane):
    """What `runs.py` wrote of segments: tag of the first, start, end, tag, the next one's, row, first gradient row."""
    at = first + cursor + lane
    mask = cursor + lane < stop
    tag_of_first = tl.load(p_tags + first + cursor, mask=cursor < stop, other=0)
    start = tl.load(p_starts + at, mask=mask, other=0)
    end = tl.load(p_starts + at + 1, mask=mask, other=0)
    tag = tl.load(p_tags + at, mask=mask, other=0)
    next_tag = tl.load(p_tags + at + 1, mask=mask, other=0)
    row = tl.load(p_rows + at, mask=mask, other=0)
    source = tl.load(p_first_sources + at, mask=mask, other=0)
    return tag_of_first, start, end, tag, next_tag, row, source


@triton.jit
def step_segments(
    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_grad, p_winners, p_order, p_dots,
    p_sources, p_coefficients, p_starts, p_tags, p_rows, p_first_sources, p_partials, p_source,
    grad_column, stride, rule_number, first, part, count,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, AT_RANDOM: tl.constexpr,
    SEVERAL_RULES: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_COEFFICIENTS: tl.constexpr, HAS_WINNERS: tl.constexpr,
    HAS_DOTS: tl.constexpr, CLIPPED: tl.constexpr, ALIGN: tl.constexpr, SOURCE_ALIGN: tl.constexpr,
    SLOT_ALIGN: tl.constexpr, GRAD_ALIGN: tl.constexpr, DIM_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, SEGMENTS: tl.constexpr, MIXED: tl.constexpr, ABOVE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The share `part` of `count` segments from place `first` on, those of tables of `ABOVE` to `BLOCK_D` columns."""
    share = (count + PARTS * SEGMENTS - 1) // (PARTS * SEGMENTS) * SEGMENTS
    cursor = part * share
    stop = tl.minimum(cursor + share, count)
    lane = tl.arange(0, SEGMENTS)
    column = tl.arange(0, BLOCK_D)
    # a gradient may be transposed, with wide steps from column to column
    column_64 = column.to(tl.int64)
    tag_of_first, start, end, tag, next_tag, local, source = load_segments(
        p_starts, p_tags, p_rows, p_first_sources, first, cursor, stop, lane
    )
    while cursor < stop:
        # sorted keys: those of the first one's table come first, the rest have their turn in the next tile
        table = tag_of_first // 4
        here = (cursor + lane < stop) & (tag // 4 == table)
        cursor += tl.sum(here.to(tl.int32), axis=0)
        tag_of_next, start_1, end_1, tag_1, next_tag_1, local_1, source_1 = load_segments(
            p_starts, p_tags, p_rows, p_first_sources, first, cursor, stop, lane
        )
        dim = table_dim(p_tables, table)
        # long ones are passed by, and the rows of other rules, and of tables that have another tile
        here = here & (tag // 2 % 2 == 0)
        if MIXED:
            here = here & (lane < tl.where((dim > ABOVE) & (dim <= BLOCK_D), SEGMENTS, 0))
        if SEVERAL_RULES:
            here = here & (lane < tl.where(table_rule(p_tables, table) == rule_number, SEGMENTS, 0))
        whole = here & (tag % 2 == 1) & (next_tag % 2 == 1)
        row = local.to(tl.int64)
        m_column = column // DIM_ALIGN * DIM_ALIGN < dim
        m_whole = whole[:, None] & m_column[None, :]
        reads = whole
        if HAS_DOTS:
            # ids of a piece of a run have dots, too
            reads = here
        w, s0, s1 = load_rows(
            p_table, p_slots, p_tables, p_source, table, row, dim, column, reads, reads[:, None] & m_column[None, :],
            MODE, SLOT0, SLOT1, HAS_DOTS, ALIGN, SOURCE_ALIGN, SLOT_ALIGN,
        )  # fmt: skip
        looked_up = as_looked_up(p_tables, table, w, HAS_DOTS, CLIPPED)
        coefficient = load_coefficients(p_coefficients, start, here, HAS_COEFFICIENTS)
        g = load_gradients(
            p_grad, p_winners, p_order, p_dots, looked_up, start, source, coefficient, here, column_64, m_column,
            grad_column, HAS_COEFFICIENTS, HAS_WINNERS, HAS_DOTS, GRAD_ALIGN,
        )  # fmt: skip
        longest = tl.max(tl.where(here, end - start, 0), axis=0)
        # where a gradient is, is asked for one round ahead
        next_source, next_coefficient = load_sources(
            p_sources, p_coefficients, start + 1, here & (start + 1 < end), HAS_COEFFICIENTS
        )
        k = longest * 0 + 1
        while k < longest:
            j = start + k
            inside = here & (j < end)
            source, coefficient = next_source, next_coefficient
            next_source, next_coefficient = load_sources(
                p_sources, p_coefficients, j + 1, here & (j + 1 < end), HAS_COEFFICIENTS
            )
            g += load_gradients(
                p_grad, p_winners, p_order, p_dots, looked_up, j, source, coefficient, inside, column_64, m_column,
                grad_column, HAS_COEFFICIENTS, HAS_WINNERS, HAS_DOTS, GRAD_ALIGN,
            )  # fmt: skip
            k += 1
        line = tl.where(tag % 2 == 1, end // CHUNK * 2 + 1, start // CHUNK * 2).to(tl.int64)
        o_partial = tl.multiple_of((line * stride)[:, None], [4, 4])
        m_partial = (here & (whole == 0))[:, None] & (column // 4 * 4 < stride)[None, :]
        tl.store(p_partials + o_partial + column[None, :], g, mask=m_partial)
        finish(
            p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_source, table, row, dim, column, start,
            whole, m_whole, g, w, s0, s1,
            RULE, MODE, SLOT0, SLOT1, AT_RANDOM, HAS_GRAD_SCALE, HAS_DOTS, CLIPPED, ALIGN, SOURCE_ALIGN,
            SLOT_ALIGN,
        )  # fmt: skip
        tag_of_first, start, end, tag = tag_of_next, start_1, end_1, tag_1
        next_tag, local, source = next_tag_1, local_1, source_1


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def segments_kernel(
    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_skip, p_grad, p_winners, p_order, p_dots,
    p_sources, p_coefficients, p_starts, p_tags, p_rows, p_first_sources, p_counts, p_partials, p_source,
    grad_column, stride, rule_number,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, AT_RANDOM: tl.constexpr,
    SEVERAL_RULES: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_COEFFICIENTS: tl.constexpr, HAS_WINNERS: tl.constexpr,
    HAS_DOTS: tl.constexpr, CLIPPED: tl.constexpr, ALIGN: tl.constexpr, SOURCE_ALIGN: tl.constexpr,
    SLOT_ALIGN: tl.constexpr, GRAD_ALIGN: tl.constexpr, DIM_ALIGN: tl.constexpr, WIDE_ALIGN: tl.constexpr,
    WIDE_SLOT_ALIGN: tl.constexpr, WIDE_GRAD_ALIGN: tl.constexpr, WIDE_DIM_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SEGMENTS: tl.constexpr, NARROW: tl.constexpr,
    NARROW_SEGMENTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one of `PARTS` shares of the segments of a block, `SEGMENTS` at a time, all of one table.

    With NARROW more than 1, tables of at most that part of `BLOCK_D` columns are taken in tiles of NARROW_SEGMENTS, and
    the others have alignments of their own; a block that has both is gone through twice.

    Most runs are of one id, so the first gradients are read beside rows and slots, and before the loop over what
    follows. More gradients or tiles in flight are slower: registers, hence fewer programs at once.
    """
    block = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    count = tl.load(p_counts + block)
    if HAS_SKIP:
        count = tl.where(tl.load(p_skip) != 0, 0, count)
    first = block * (BLOCK + 1)
    wide = True
    if NARROW > 1:
        # see `segment_kernel`
        kind = count // NARROW_BLOCK
        count = count % NARROW_BLOCK
        wide = kind != 1
        if kind != 0:
            step_segments(
                p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_grad, p_winners, p_order, p_dots,
                p_sources, p_coefficients, p_starts, p_tags, p_rows, p_first_sources, p_partials, p_source,
                grad_column, stride, rule_number, first, part, count,
                RULE, MODE, SLOT0, SLOT1, AT_RANDOM, SEVERAL_RULES, HAS_GRAD_SCALE, HAS_COEFFICIENTS, HAS_WINNERS,
                HAS_DOTS, CLIPPED, ALIGN, SOURCE_ALIGN, SLOT_ALIGN, GRAD_ALIGN, DIM_ALIGN, CHUNK, PARTS,
                NARROW_SEGMENTS, True, 0, BLOCK_D // NARROW,
            )  # fmt: skip
    if wide:
        step_segments(
            p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_grad, p_winners, p_order, p_dots,
            p_sources, p_coefficients, p_starts, p_tags, p_rows, p_first_sources, p_partials, p_source,
            grad_column, stride, rule_number, first, part, count,
            RULE, MODE, SLOT0, SLOT1, AT_RANDOM, SEVERAL_RULES, HAS_GRAD_SCALE, HAS_COEFFICIENTS, HAS_WINNERS,
            HAS_DOTS, CLIPPED, WIDE_ALIGN, SOURCE_ALIGN, WIDE_SLOT_ALIGN, WIDE_GRAD_ALIGN, WIDE_DIM_ALIGN, CHUNK,
            PARTS, SEGMENTS, NARROW > 1, BLOCK_D // NARROW if NARROW > 1 else 0, BLOCK_D,
        )  # fmt: skip
