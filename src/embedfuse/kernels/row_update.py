"""The gradient of each row in the batch, and what becomes of it: a step of the optimizer, a stored gradient, or a norm.

    g[row] = Σ coefficient * grad[bag, columns]        over all ids of the row, in sorted order
    MODE 0: w, slots = rule(w, g, slots)               between clipping g, decaying w, and clipping w
    MODE 1: out[row] = g
    MODE 2: values[place of the row] = ||g||²

`segments_kernel` sums the segments of `runs.py` side by side, several rows to a tile. Rows of one segment end there.
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
from .descriptors import table_dim, table_offset, table_row_base, table_rule, table_slot0, table_slot1
from .rounding import rounded_at_random

SIZES = ["number", "windows", "absent", "stride", "rule_number"]
UNALIGNED = [
    "p_hyper", "p_steps", "p_tables", "p_grad_scale", "p_skip", "p_keys", "p_sources", "p_coefficients", "p_order",
    "p_starts", "p_tags", "p_rows", "p_first_sources", "p_counts", "p_cuts",
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
    SLOT0: tl.constexpr, SLOT1: tl.constexpr, ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """Rows and their slots. Called before the gradient is summed, so that both are under way at once."""
    o_row = tl.multiple_of((table_offset(p_tables, table) + row * dim)[:, None], [ALIGN, ALIGN])
    w = tl.load(p_table + o_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    s0 = load_slot(p_slots, table_slot0(p_tables, table), row, dim, column, live, mask, SLOT0, SLOT_ALIGN)
    s1 = load_slot(p_slots, table_slot1(p_tables, table), row, dim, column, live, mask, SLOT1, SLOT_ALIGN)
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
def store_sums(
    p_table, p_tables, table, row, dim, column, place, live, mask, g, MODE: tl.constexpr, ALIGN: tl.constexpr
):
    """What the modes without an optimizer do with a complete gradient; `p_table` is where their result goes."""
    if MODE == 1:
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
    p_coefficients, p_starts, p_tags, p_rows, p_first_sources, p_counts, p_partials, grad_column, stride, rule_number,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, SEVERAL_RULES: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_COEFFICIENTS: tl.constexpr, HAS_WINNERS: tl.constexpr,
    ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr, GRAD_ALIGN: tl.constexpr, DIM_ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_D: tl.constexpr,
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
        table = tag_of_first // 2
        here = (cursor + lane < stop) & (tag // 2 == table)
        cursor += tl.sum(here.to(tl.int32), axis=0)
        tag_of_next, start_1, end_1, tag_1, next_tag_1, local_1, source_1 = load_segments(
            p_starts, p_tags, p_rows, p_first_sources, first, cursor, stop, lane
        )
        if SEVERAL_RULES:
            # the rows of other rules are passed by
            here = here & (lane < tl.where(table_rule(p_tables, table) == rule_number, SEGMENTS, 0))
        whole = here & (tag % 2 == 1) & (next_tag % 2 == 1)
        row = local.to(tl.int64)
        dim = table_dim(p_tables, table)
        m_column = column // DIM_ALIGN * DIM_ALIGN < dim
        m_whole = whole[:, None] & m_column[None, :]
        if MODE == 0:
            w, s0, s1 = load_rows(
                p_table, p_slots, p_tables, table, row, dim, column, whole, m_whole, SLOT0, SLOT1, ALIGN, SLOT_ALIGN
            )
        g = load_gradients(
            p_grad, p_winners, p_order, p_coefficients, start, source, here, column_64, m_column, grad_column,
            HAS_COEFFICIENTS, HAS_WINNERS, GRAD_ALIGN,
        )  # fmt: skip
        longest = tl.max(tl.where(here, end - start, 0), axis=0)
        k = longest * 0 + 1
        while k < longest:
            j = start + k
            inside = here & (j < end)
            next_source = tl.load(p_sources + j, mask=inside, other=0)
            g += load_gradients(
                p_grad, p_winners, p_order, p_coefficients, j, next_source, inside, column_64, m_column, grad_column,
                HAS_COEFFICIENTS, HAS_WINNERS, GRAD_ALIGN,
            )  # fmt: skip
            k += 1
        line = tl.where(tag % 2 == 1, end // CHUNK * 2 + 1, start // CHUNK * 2).to(tl.int64)
        o_partial = tl.multiple_of((line * stride)[:, None], [4, 4])
        m_partial = (here & (whole == 0))[:, None] & (column // 4 * 4 < stride)[None, :]
        tl.store(p_partials + o_partial + column[None, :], g, mask=m_partial)
        if HAS_GRAD_SCALE:
            g = g * tl.load(p_grad_scale)
        if MODE == 0:
            step_rows(
                p_table, p_slots, p_tables, p_hyper, p_steps, table, row, dim, column, whole, m_whole, g, w, s0, s1,
                RULE, SLOT0, SLOT1, ALIGN, SLOT_ALIGN,
            )  # fmt: skip
        else:
            store_sums(p_table, p_tables, table, row, dim, column, start, whole, m_whole, g, MODE, ALIGN)
        tag_of_first, start, end, tag = tag_of_next, start_1, end_1, tag_1
        next_tag, local, source = next_tag_1, local_1, source_1


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
        position = at * SPAN + LAST
        # what precedes is of the run already
        position += CHUNK // 2
        mine = (at < limit) & (position < number)
        mine = mine & (tl.load(p_keys + position, mask=mine, other=-1) == key)
        o_line = tl.multiple_of((at * (stride * LINES))[:, None], [4, 4])
        mask = mine[:, None] & (column // 4 * 4 < stride)[None, :]
        acc += tl.load(p_partials + o_line + column[None, :], mask=mask, other=0.0)
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
    first = fold * (FOLD * CHUNK)
    last = first + (FOLD - 1) * CHUNK + CHUNK // 2
    exists = (fold > 0) & (last < number)
    key = tl.load(p_keys + first, mask=exists, other=absent)
    before = tl.load(p_keys + first - CHUNK // 2, mask=exists, other=-1)
    after = tl.load(p_keys + last, mask=exists, other=-1)
    unit = fold * FOLD
    limit = tl.where((key < absent) & (key == before) & (key == after), unit + FOLD, unit)
    mask = column // 4 * 4 < tl.where(limit > unit, stride, 0)
    acc = tl.zeros([JOIN, BLOCK_D], tl.float32)
    acc, unit = add_partials(
        p_partials, p_keys, acc, key, number, stride, unit, limit, column, CHUNK, 0, 2, CHUNK, JOIN
    )
    tl.store(p_folds + tl.multiple_of(fold * stride, 4) + column, tl.sum(acc, axis=0), mask=mask)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def join_kernel(
    p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_skip,
    p_keys, p_cuts, p_partials, p_folds, number, windows, stride, rule_number,
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, SEVERAL_RULES: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_SKIP: tl.constexpr, ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr,
    DIM_ALIGN: tl.constexpr, CHUNK: tl.constexpr, FOLD: tl.constexpr, EDGES: tl.constexpr,
    JOIN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: the runs whose first cut is one of `EDGES` edges."""
    first = tl.program_id(0).to(tl.int64) * EDGES
    lane_edge = tl.arange(0, EDGES)
    tables = tl.load(p_cuts + first + lane_edge, mask=first + lane_edge < windows, other=-1)
    mine = tables >= 0
    if HAS_SKIP:
        mine = mine & (lane_edge >= tl.where(tl.load(p_skip) != 0, EDGES, 0))
    if SEVERAL_RULES:
        mine = mine & (table_rule(p_tables, tl.maximum(tables, 0)) == rule_number)
    lane = tl.arange(0, JOIN)
    column = tl.arange(0, BLOCK_D)
    turn = tl.where(mine, lane_edge, EDGES)
    chosen = tl.min(turn, axis=0)
    while chosen < EDGES:
        edge = first + chosen
        position = edge * CHUNK
        table = tl.max(tl.where(lane_edge == chosen, tables, 0), axis=0).to(tl.int64)
        key = tl.load(p_keys + position)
        dim = table_dim(p_tables, table)
        row = tl.zeros([1], tl.int64) + (key.to(tl.int64) - table_row_base(p_tables, table))
        live = row >= 0
        mask = live[:, None] & (column // DIM_ALIGN * DIM_ALIGN < dim)[None, :]
        if MODE == 0:
            w, s0, s1 = load_rows(
                p_table, p_slots, p_tables, table, row, dim, column, live, mask, SLOT0, SLOT1, ALIGN, SLOT_ALIGN
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
        if HAS_GRAD_SCALE:
            g = g * tl.load(p_grad_scale)
        if MODE == 0:
            step_rows(
                p_table, p_slots, p_tables, p_hyper, p_steps, table, row, dim, column, live, mask, g, w, s0, s1,
                RULE, SLOT0, SLOT1, ALIGN, SLOT_ALIGN,
            )  # fmt: skip
        else:
            place = row * 0 + position
            store_sums(p_table, p_tables, table, row, dim, column, place, live, mask, g, MODE, ALIGN)
        turn = tl.where(lane_edge == chosen, EDGES, turn)
        chosen = tl.min(turn, axis=0)
