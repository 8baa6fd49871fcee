"""The gradient of each row in the batch, and what becomes of it: a step of the optimizer, a stored gradient, or a norm.

    g[row] = Σ coefficient * grad[bag, columns]        over all ids of the row, in sorted order
    MODE 0: w, slots = rule(w, g, slots)               between clipping g, decaying w, and clipping w
    MODE 1: out[row] = g
    MODE 2: values[place of the row] = ||g||²

`segments_kernel` sums the short segments of `runs.py` side by side, several rows to a tile; `long_kernel` sums the
long ones, each in a tile of many of its gradients. Rows of one segment end there.
The pieces of a run that was cut leave partial sums. For each multiple of CHUNK, an *edge*, there are two lines: line
`2 * edge` for the piece that begins there, `2 * edge + 1` for the first piece of a run whose first cut this is.
`fold_kernel` adds up FOLD pieces that follow each other in one run, and `join_kernel` all pieces of a run, in order.

Bytes: each gradient row once, each row and its slots once in, once out; cut rows their partial sums besides.

A rule is `rule(w, g, s0, s1, p_hyper, step, dim, mask) -> (w, s0, s1)` over a tile of rows of one table: `w`, `g` and
slots per element float32 `[R, BLOCK_D]`, slots per row `[R, 1]`, slots the rule lacks `[R, 1]` zeros; `p_hyper`
points to the table's numbers, `step` and `dim` are scalars, `mask` marks what is no padding. Whole rows are in the
tile, so a rule may reduce over axis 1. SLOT0 and SLOT1 are 0 for no slot, 1 per element, 2 per row.
"""

from .._triton import tl, triton
from .descriptors import (
    table_dim,
    table_max_norm,
    table_offset,
    table_row_base,
    table_rule,
    table_slot0,
    table_slot1,
    table_source,
)
from .max_norm import cut_gradient
from .rounding import rounded_at_random

SIZES = ["number", "absent", "stride", "rule_number"]
UNALIGNED = [
    "p_hyper", "p_steps", "p_tables", "p_grad_scale", "p_skip", "p_keys", "p_sources", "p_coefficients", "p_order",
    "p_starts", "p_tags", "p_rows", "p_first_sources", "p_counts", "p_cuts",
    "p_cut_tables", "p_list_counts", "p_long",
]  # fmt: skip


@triton.jit
def load_slot(p_slots, o_slot, row, dim, column, live, mask, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """One slot of a tile: `[R, BLOCK_D]` per element, `[R, 1]` per row, zeros if there is none; 1 in padding."""
    if KIND == 1:
        o_row = tl.multiple_of((o_slot + row * dim)[:, None], [ALIGN, ALIGN])
        slot = tl.load(p_slots + o_row + column[None, :], mask=mask, other=1.0)
    elif KIND == 2:
        slot = tl.load(p_slots + o_slot + row[:, None], mask=live[:, None], other=1.0)
    else:
        slot = tl.zeros_like(row)[:, None].to(tl.float32)
    return slot


@triton.jit
def store_slot(p_slots, o_slot, row, dim, column, live, mask, slot, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Writes what `load_slot` reads."""
    if KIND == 1:
        o_row = tl.multiple_of((o_slot + row * dim)[:, None], [ALIGN, ALIGN])
        tl.store(p_slots + o_row + column[None, :], slot.to(tl.float32), mask=mask)
    elif KIND == 2:
        tl.store(p_slots + o_slot + row[:, None], slot.to(tl.float32), mask=live[:, None])


@triton.jit
def load_rows(
    p_table, p_slots, p_tables, table, row, dim, column, live, mask,
    MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """Rows and their slots, for an optimizer. Called before the gradient is summed, so that both are under way."""
    if MODE == 0:
        o_row = tl.multiple_of((table_offset(p_tables, table) + row * dim)[:, None], [ALIGN, ALIGN])
        w = tl.load(p_table + o_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        s0 = load_slot(p_slots, table_slot0(p_tables, table), row, dim, column, live, mask, SLOT0, SLOT_ALIGN)
        s1 = load_slot(p_slots, table_slot1(p_tables, table), row, dim, column, live, mask, SLOT1, SLOT_ALIGN)
    else:
        w = tl.zeros_like(row)[:, None].to(tl.float32)
        s0 = w
        s1 = w
    return w, s0, s1


@triton.jit
def step_rows(
    p_table, p_slots, p_tables, p_hyper, p_steps, table, row, dim, column, live, mask, g, w, s0, s1,
    RULE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """One step of rows whose gradient is complete."""
    p_own = p_hyper + table * 16
    low = tl.load(p_own + 1).to(tl.float32)
    high = tl.load(p_own + 2).to(tl.float32)
    g = tl.where(g < low, low, tl.where(g > high, high, g))
    w = w - tl.load(p_own + 3).to(tl.float32) * w
    step = tl.load(p_steps + table)
    w, s0, s1 = RULE(w, g, s0, s1, p_own, step, dim, mask)
    low = tl.load(p_own + 4).to(tl.float32)
    high = tl.load(p_own + 5).to(tl.float32)
    w = tl.where(w < low, low, tl.where(w > high, high, w))
    o_row = tl.multiple_of((table_offset(p_tables, table) + row * dim)[:, None], [ALIGN, ALIGN])
    if p_table.dtype.element_ty != tl.float32:
        # the seed of stochastic rounding, 0 for none (optim/base.py: ROUNDING_SEED)
        seed = tl.load(p_own + 15).to(tl.int64)
        element = (row * dim)[:, None] + column[None, :]
        lost: tl.constexpr = 16 if p_table.dtype.element_ty == tl.bfloat16 else 13
        w = rounded_at_random(w, element, seed, step, lost)
    tl.store(p_table + o_row + column[None, :], w.to(p_table.dtype.element_ty), mask=mask)
    store_slot(p_slots, table_slot0(p_tables, table), row, dim, column, live, mask, s0, SLOT0, SLOT_ALIGN)
    store_slot(p_slots, table_slot1(p_tables, table), row, dim, column, live, mask, s1, SLOT1, SLOT_ALIGN)


@triton.jit
def uncut(
    p_source, p_tables, table, row, dim, column, mask, g, w,
    MODE: tl.constexpr, SOURCE_ALIGN: tl.constexpr,
):  # fmt: skip
    """Complete gradients of the rows as they are stored, from those of the rows cut to MAX_NORM.

    The rows are `w` where there is an optimizer; else they are read: where a norm is asked for from the tables
    themselves, where gradients are stored from T_SOURCE on.
    """
    if MODE == 0:
        e = w
    elif MODE == 1:
        o_row = tl.multiple_of((table_source(p_tables, table) + row * dim)[:, None], [SOURCE_ALIGN, SOURCE_ALIGN])
        e = tl.load(p_source + o_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        o_row = tl.multiple_of((table_offset(p_tables, table) + row * dim)[:, None], [SOURCE_ALIGN, SOURCE_ALIGN])
        e = tl.load(p_source + o_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return cut_gradient(g, e, table_max_norm(p_tables, table))


@triton.jit
def finish(
    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_source, table, row, dim, column, place, live, mask,
    g, w, s0, s1,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, HAS_GRAD_SCALE: tl.constexpr,
    CLIPPED: tl.constexpr, ALIGN: tl.constexpr, SOURCE_ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """What becomes of complete gradients; `place` is where the mode of norms puts each."""
    if CLIPPED:
        g = uncut(p_source, p_tables, table, row, dim, column, mask, g, w, MODE, SOURCE_ALIGN)
    if HAS_GRAD_SCALE:
        g = g * tl.load(p_grad_scale)
    if MODE == 0:
        step_rows(
            p_table, p_slots, p_tables, p_hyper, p_steps, table, row, dim, column, live, mask, g, w, s0, s1,
            RULE, SLOT0, SLOT1, ALIGN, SLOT_ALIGN,
        )  # fmt: skip
    elif MODE == 1:
        o_row = tl.multiple_of((table_offset(p_tables, table) + row * dim)[:, None], [ALIGN, ALIGN])
        tl.store(p_table + o_row + column[None, :], g.to(p_table.dtype.element_ty), mask=mask)
    else:
        tl.store(p_table + place, tl.sum(g * g, axis=1), mask=live)


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
def load_gradients(
    p_grad, p_winners, p_order, p_coefficients, j, source, inside, column, m_column, grad_column,
    HAS_COEFFICIENTS: tl.constexpr, HAS_WINNERS: tl.constexpr, GRAD_ALIGN: tl.constexpr,
):  # fmt: skip
    """Gradient rows that start at `source`, times their coefficients; `j` numbers their ids in sorted order."""
    o_grad = tl.multiple_of(source.to(tl.int64)[:, None], [GRAD_ALIGN, GRAD_ALIGN]) + column[None, :] * grad_column
    mask = inside[:, None] & m_column[None, :]
    if HAS_WINNERS:
        order = tl.load(p_order + j, mask=inside, other=0)
        mask = mask & (tl.load(p_winners + o_grad, mask=mask, other=-1) == order[:, None])
    value = tl.load(p_grad + o_grad, mask=mask, other=0.0).to(tl.float32)
    if HAS_COEFFICIENTS:
        value = value * tl.load(p_coefficients + j, mask=inside, other=0.0)[:, None]
    return value


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def segments_kernel(
    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_skip, p_grad, p_winners, p_order, p_sources,
    p_coefficients, p_starts, p_tags, p_rows, p_first_sources, p_counts, p_partials, p_source,
    grad_column, stride, rule_number,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, SEVERAL_RULES: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_COEFFICIENTS: tl.constexpr, HAS_WINNERS: tl.constexpr,
    CLIPPED: tl.constexpr, ALIGN: tl.constexpr, SOURCE_ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr,
    GRAD_ALIGN: tl.constexpr, DIM_ALIGN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one of `PARTS` shares of the segments of a block, `SEGMENTS` at a time, all of one table.

    Most runs are of one id, so the first gradients are read beside rows and slots, and before the loop over what
    follows. More gradients or tiles in flight are slower: registers, hence fewer programs at once.
    """
    block = tl.program_id(0).to(tl.int64) // PARTS
    part = tl.program_id(0) % PARTS
    count = tl.load(p_counts + block)
    if HAS_SKIP:
        count = tl.where(tl.load(p_skip) != 0, 0, count)
    share = (count + PARTS * SEGMENTS - 1) // (PARTS * SEGMENTS) * SEGMENTS
    cursor = part * share
    stop = tl.minimum(cursor + share, count)
    first = block * (BLOCK + 1)
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
        # long ones are passed by, and the rows of other rules
        here = here & (tag // 2 % 2 == 0)
        if SEVERAL_RULES:
            here = here & (lane < tl.where(table_rule(p_tables, table) == rule_number, SEGMENTS, 0))
        whole = here & (tag % 2 == 1) & (next_tag % 2 == 1)
        row = local.to(tl.int64)
        dim = table_dim(p_tables, table)
        m_column = column // DIM_ALIGN * DIM_ALIGN < dim
        m_whole = whole[:, None] & m_column[None, :]
        w, s0, s1 = load_rows(
            p_table, p_slots, p_tables, table, row, dim, column, whole, m_whole, MODE, SLOT0, SLOT1, ALIGN, SLOT_ALIGN
        )
        g = load_gradients(
            p_grad, p_winners, p_order, p_coefficients, start, source, here, column_64, m_column, grad_column,
            HAS_COEFFICIENTS, HAS_WINNERS, GRAD_ALIGN,
        )  # fmt: skip
        longest = tl.max(tl.where(here, end - start, 0), axis=0)
        # where a gradient is, is asked for one round ahead
        next_source = tl.load(p_sources + start + 1, mask=here & (start + 1 < end), other=0)
        k = longest * 0 + 1
        while k < longest:
            j = start + k
            inside = here & (j < end)
            source = next_source
            next_source = tl.load(p_sources + j + 1, mask=here & (j + 1 < end), other=0)
            g += load_gradients(
                p_grad, p_winners, p_order, p_coefficients, j, source, inside, column_64, m_column, grad_column,
                HAS_COEFFICIENTS, HAS_WINNERS, GRAD_ALIGN,
            )  # fmt: skip
            k += 1
        line = tl.where(tag % 2 == 1, end // CHUNK * 2 + 1, start // CHUNK * 2).to(tl.int64)
        o_partial = tl.multiple_of((line * stride)[:, None], [4, 4])
        m_partial = (here & (whole == 0))[:, None] & (column // 4 * 4 < stride)[None, :]
        tl.store(p_partials + o_partial + column[None, :], g, mask=m_partial)
        finish(
            p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_source, table, row, dim, column, start,
            whole, m_whole, g, w, s0, s1,
            RULE, MODE, SLOT0, SLOT1, HAS_GRAD_SCALE, CLIPPED, ALIGN, SOURCE_ALIGN, SLOT_ALIGN,
        )  # fmt: skip
        tag_of_first, start, end, tag = tag_of_next, start_1, end_1, tag_1
        next_tag, local, source = next_tag_1, local_1, source_1


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


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def long_kernel(
    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_skip, p_grad, p_winners, p_order, p_sources,
    p_coefficients, p_starts, p_tags, p_rows, p_list_counts, p_long, p_partials, p_source,
    grad_column, stride, rule_number,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, SEVERAL_RULES: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_COEFFICIENTS: tl.constexpr, HAS_WINNERS: tl.constexpr,
    CLIPPED: tl.constexpr, ALIGN: tl.constexpr, SOURCE_ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr,
    GRAD_ALIGN: tl.constexpr, DIM_ALIGN: tl.constexpr, CHUNK: tl.constexpr, TERMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: every so many of the long segments, `TERMS` gradients of one at a time."""
    turn = tl.program_id(0)
    count = tl.load(p_list_counts)
    if HAS_SKIP:
        count = tl.where(tl.load(p_skip) != 0, 0, count)
    lane = tl.arange(0, TERMS)
    column = tl.arange(0, BLOCK_D)
    # as in `segments_kernel`
    column_64 = column.to(tl.int64)
    start, end, tag, next_tag, local = load_long(p_starts, p_tags, p_rows, p_long, turn, count)
    while turn < count:
        turn += tl.num_programs(0)
        start_1, end_1, tag_1, next_tag_1, local_1 = load_long(p_starts, p_tags, p_rows, p_long, turn, count)
        row = tl.zeros([1], tl.int64) + local
        table = tag // 4
        dim = table_dim(p_tables, table)
        m_column = column // DIM_ALIGN * DIM_ALIGN < dim
        last = end
        if SEVERAL_RULES:
            # nothing is read or written for another rule's rows
            last = tl.where(table_rule(p_tables, table) == rule_number, end, start)
        source = tl.load(p_sources + start + lane, mask=start + lane < last, other=0)
        whole = tl.where((tag % 2 == 1) & (next_tag % 2 == 1), last, start)
        live = row * 0 + start < whole
        mask = live[:, None] & m_column[None, :]
        w, s0, s1 = load_rows(
            p_table, p_slots, p_tables, table, row, dim, column, live, mask, MODE, SLOT0, SLOT1, ALIGN, SLOT_ALIGN
        )
        acc = tl.zeros([TERMS, BLOCK_D], tl.float32)
        position = start
        while position < last:
            j = position + lane
            inside = j < last
            next_source = tl.load(p_sources + j + TERMS, mask=j + TERMS < last, other=0)
            acc += load_gradients(
                p_grad, p_winners, p_order, p_coefficients, j, source, inside, column_64, m_column, grad_column,
                HAS_COEFFICIENTS, HAS_WINNERS, GRAD_ALIGN,
            )  # fmt: skip
            source = next_source
            position += TERMS
        g = tl.sum(acc, axis=0)[None, :]
        line = tl.where(tag % 2 == 1, end // CHUNK * 2 + 1, start // CHUNK * 2).to(tl.int64)
        o_partial = tl.multiple_of((line * stride + row * 0)[:, None], [4, 4])
        m_partial = (row * 0 + whole < last)[:, None] & (column // 4 * 4 < stride)[None, :]
        tl.store(p_partials + o_partial + column[None, :], g, mask=m_partial)
        finish(
            p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_source, table, row, dim, column,
            row * 0 + start, live, mask, g, w, s0, s1,
            RULE, MODE, SLOT0, SLOT1, HAS_GRAD_SCALE, CLIPPED, ALIGN, SOURCE_ALIGN, SLOT_ALIGN,
        )  # fmt: skip
        start, end, tag, next_tag, local = start_1, end_1, tag_1, next_tag_1, local_1


@triton.jit
def add_partials(
    p_partials, p_keys, acc, key, number, stride, unit, limit, column,
    SPAN: tl.constexpr, LAST: tl.constexpr, LINES: tl.constexpr, CHUNK: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """Adds partial sums from `unit` on, as long as the run of `key` is cut there; returns the sum and where it ended.

    Unit `u` counts if the run is cut at position `u * SPAN + LAST`; its sum is in line `u * LINES`.
    """
    lane = tl.arange(0, JOIN)
    while unit < limit:
        at = unit + lane
        # what precedes is of the run already
        position = at * SPAN + LAST + CHUNK // 2
        exists = (at < limit) & (position < number)
        mine = exists & (tl.load(p_keys + position, mask=exists, other=-1) == key)
        # read before it is known whose they are, so that memory is waited for once; some were never written
        o_line = tl.multiple_of((at * (stride * LINES))[:, None], [4, 4])
        mask = exists[:, None] & (column // 4 * 4 < stride)[None, :]
        line = tl.load(p_partials + o_line + column[None, :], mask=mask, other=0.0)
        acc += tl.where(mine[:, None], line, 0.0)
        took = tl.sum(mine.to(tl.int32), axis=0)
        unit += took
        limit = tl.where(took == JOIN, limit, unit)
    return acc, unit


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def fold_kernel(
    p_keys, p_partials, p_folds, number, absent, stride,
    CHUNK: tl.constexpr, FOLD: tl.constexpr, JOIN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: `FOLD` edges. Adds up their pieces if one run is cut at all of them."""
    fold = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, JOIN)
    first = fold * (FOLD * CHUNK)
    last = first + (FOLD - 1) * CHUNK + CHUNK // 2
    exists = (fold > 0) & (last < number)
    key = tl.load(p_keys + first, mask=exists, other=absent)
    before = tl.load(p_keys + first - CHUNK // 2, mask=exists, other=-1)
    after = tl.load(p_keys + last, mask=exists, other=-1)
    pieces = tl.where((key < absent) & (key == before) & (key == after), FOLD, 0)
    m_column = column // 4 * 4 < stride
    acc = tl.zeros([JOIN, BLOCK_D], tl.float32)
    for start in range(0, pieces, 4 * JOIN):
        # four reads under way at once
        for turn in tl.static_range(4):
            piece = start + turn * JOIN + lane
            o_line = tl.multiple_of(((fold * FOLD + piece) * (stride * 2))[:, None], [4, 4])
            mask = (piece < pieces)[:, None] & m_column[None, :]
            acc += tl.load(p_partials + o_line + column[None, :], mask=mask, other=0.0)
    mask = column // 4 * 4 < tl.where(pieces > 0, stride, 0)
    tl.store(p_folds + tl.multiple_of(fold * stride, 4) + column, tl.sum(acc, axis=0), mask=mask)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def join_kernel(
    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_skip,
    p_keys, p_list_counts, p_cuts, p_cut_tables, p_partials, p_folds, p_source, number, stride, rule_number,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, SEVERAL_RULES: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_SKIP: tl.constexpr, CLIPPED: tl.constexpr, ALIGN: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr, DIM_ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, FOLD: tl.constexpr, JOIN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: every so many of the runs that are cut."""
    turn = tl.program_id(0)
    count = tl.load(p_list_counts + 1)
    if HAS_SKIP:
        count = tl.where(tl.load(p_skip) != 0, 0, count)
    lane = tl.arange(0, JOIN)
    column = tl.arange(0, BLOCK_D)
    while turn < count:
        edge = tl.load(p_cuts + turn).to(tl.int64)
        table = tl.load(p_cut_tables + turn).to(tl.int64)
        position = edge * CHUNK
        key = tl.load(p_keys + position)
        dim = table_dim(p_tables, table)
        row = tl.zeros([1], tl.int64) + (key.to(tl.int64) - table_row_base(p_tables, table))
        live = row >= 0
        if SEVERAL_RULES:
            # no row of another rule is live, nor any of its pieces added
            own = table_rule(p_tables, table) == rule_number
            live = row >= tl.where(own, 0, 1 << 62)
            key = tl.where(own, key, -2)
        mask = live[:, None] & (column // DIM_ALIGN * DIM_ALIGN < dim)[None, :]
        w, s0, s1 = load_rows(
            p_table, p_slots, p_tables, table, row, dim, column, live, mask, MODE, SLOT0, SLOT1, ALIGN, SLOT_ALIGN
        )
        o_first = tl.multiple_of(((edge * 2 + 1) * stride + lane * 0)[:, None], [4, 4]) + column[None, :]
        m_first = (lane == 0)[:, None] & (column // 4 * 4 < stride)[None, :]
        acc = tl.load(p_partials + o_first, mask=m_first, other=0.0)
        # pieces up to the next fold, then whole folds, then the pieces that are left
        bend = (edge + FOLD - 1) // FOLD * FOLD
        acc, unit = add_partials(
            p_partials, p_keys, acc, key, number, stride, edge, bend, column, CHUNK, 0, 2, CHUNK, JOIN
        )
        fold = bend // FOLD
        limit = tl.where(unit == bend, number // (FOLD * CHUNK) + 1, fold)
        acc, fold = add_partials(
            p_folds, p_keys, acc, key, number, stride, fold, limit, column,
            FOLD * CHUNK, (FOLD - 1) * CHUNK, 1, CHUNK, JOIN,
        )  # fmt: skip
        limit = tl.where(unit == bend, fold * FOLD + FOLD, fold * FOLD)
        acc, unit = add_partials(
            p_partials, p_keys, acc, key, number, stride, fold * FOLD, limit, column,
            CHUNK, 0, 2, CHUNK, JOIN,
        )  # fmt: skip
        g = tl.sum(acc, axis=0)[None, :]
        finish(
            p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_source, table, row, dim, column,
            row * 0 + position, live, mask, g, w, s0, s1,
            RULE, MODE, SLOT0, SLOT1, HAS_GRAD_SCALE, CLIPPED, ALIGN, SOURCE_ALIGN, SLOT_ALIGN,
        )  # fmt: skip
        turn += tl.num_programs(0)
