"""Runs that were cut: the partial sums of their pieces → the gradient of the row, in order.

For each multiple of CHUNK, an *edge*, there are two lines of partial sums: line `2 * edge` for the piece that begins
there, `2 * edge + 1` for the first piece of a run whose first cut this is. `fold_kernel` adds up FOLD pieces that
follow each other in one run, and `join_kernel` all pieces of a run. How runs are cut is told in `runs.py`.
"""

from .._triton import tl, triton
from .descriptors import table_dim, table_row_base, table_rule
from .row_step import SIZES, UNALIGNED, finish, load_rows


@triton.jit
def add_partials(
    p_partials, p_keys, acc, key, number, stride, dim, unit, limit, column,
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
        # a narrow table's lines are written no further than that
        mask = exists[:, None] & (column // 4 * 4 < dim)[None, :]
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
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, AT_RANDOM: tl.constexpr,
    SEVERAL_RULES: tl.constexpr,
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
            p_table, p_slots, p_tables, p_source, table, row, dim, column, live, mask,
            MODE, SLOT0, SLOT1, False, ALIGN, SOURCE_ALIGN, SLOT_ALIGN,
        )  # fmt: skip
        o_first = tl.multiple_of(((edge * 2 + 1) * stride + lane * 0)[:, None], [4, 4]) + column[None, :]
        m_first = (lane == 0)[:, None] & (column // 4 * 4 < dim)[None, :]
        acc = tl.load(p_partials + o_first, mask=m_first, other=0.0)
        # pieces up to the next fold, then whole folds, then the pieces that are left
        bend = (edge + FOLD - 1) // FOLD * FOLD
        acc, unit = add_partials(
            p_partials, p_keys, acc, key, number, stride, dim, edge, bend, column, CHUNK, 0, 2, CHUNK, JOIN
        )
        fold = bend // FOLD
        limit = tl.where(unit == bend, number // (FOLD * CHUNK) + 1, fold)
        acc, fold = add_partials(
            p_folds, p_keys, acc, key, number, stride, dim, fold, limit, column,
            FOLD * CHUNK, (FOLD - 1) * CHUNK, 1, CHUNK, JOIN,
        )  # fmt: skip
        limit = tl.where(unit == bend, fold * FOLD + FOLD, fold * FOLD)
        acc, unit = add_partials(
            p_partials, p_keys, acc, key, number, stride, dim, fold * FOLD, limit, column,
            CHUNK, 0, 2, CHUNK, JOIN,
        )  # fmt: skip
        g = tl.sum(acc, axis=0)[None, :]
        finish(
            p_table, p_slots, p_tables, p_hyper, p_steps, p_grad_scale, p_source, table, row, dim, column,
            row * 0 + position, live, mask, g, w, s0, s1,
            RULE, MODE, SLOT0, SLOT1, AT_RANDOM, HAS_GRAD_SCALE, False, CLIPPED, ALIGN, SOURCE_ALIGN, SLOT_ALIGN,
        )  # fmt: skip
        turn += tl.num_programs(0)
