"""What becomes of the complete gradient of a row: a step of the optimizer, a stored gradient, or a norm.

    MODE 0: w, slots = rule(w, g, slots)               between clipping g, decaying w, and clipping w
    MODE 1: out[row] = g
    MODE 2: values[place of the row] = ||g||²

A rule is `rule(w, g, s0, s1, p_hyper, step, dim, mask) -> (w, s0, s1)` over a tile of rows of one table: `w`, `g` and
slots per element float32 `[R, BLOCK_D]`, slots per row `[R, 1]`, slots the rule lacks `[R, 1]` zeros; `p_hyper`
points to the table's numbers, `step` and `dim` are scalars, `mask` marks what is no padding. Whole rows are in the
tile, so a rule may reduce over axis 1. SLOT0 and SLOT1 are 0 for no slot, 1 per element, 2 per row.
"""

from .._triton import tl, triton
from .descriptors import table_max_norm, table_offset, table_slot0, table_slot1, table_source
from .max_norm import cut_gradient
from .rounding import rounded_at_random

SIZES = ["number", "absent", "stride", "rule_number"]
UNALIGNED = [
    "p_hyper", "p_steps", "p_tables", "p_grad_scale", "p_skip", "p_keys", "p_sources", "p_coefficients", "p_order",
    "p_dots", "p_starts", "p_tags", "p_rows", "p_first_sources", "p_counts", "p_cuts", "p_cut_tables",
    "p_list_counts", "p_long",
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
    p_table, p_slots, p_tables, p_source, table, row, dim, column, live, mask,
    MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, HAS_DOTS: tl.constexpr, ALIGN: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """Rows and their slots for an optimizer, or rows for dots, from T_SOURCE on.

    Called before the gradient is summed, so that both are under way.
    """
    if MODE == 0:
        o_row = tl.multiple_of((table_offset(p_tables, table) + row * dim)[:, None], [ALIGN, ALIGN])
        w = tl.load(p_table + o_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        s0 = load_slot(p_slots, table_slot0(p_tables, table), row, dim, column, live, mask, SLOT0, SLOT_ALIGN)
        s1 = load_slot(p_slots, table_slot1(p_tables, table), row, dim, column, live, mask, SLOT1, SLOT_ALIGN)
    else:
        s0 = tl.zeros_like(row)[:, None].to(tl.float32)
        s1 = s0
        if HAS_DOTS:
            o_row = tl.multiple_of((table_source(p_tables, table) + row * dim)[:, None], [SOURCE_ALIGN, SOURCE_ALIGN])
            w = tl.load(p_source + o_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            w = s0
    return w, s0, s1


@triton.jit
def step_rows(
    p_table, p_slots, p_tables, p_hyper, p_steps, table, row, dim, column, live, mask, g, w, s0, s1,
    RULE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, AT_RANDOM: tl.constexpr, ALIGN: tl.constexpr,
    SLOT_ALIGN: tl.constexpr,
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
    if AT_RANDOM and p_table.dtype.element_ty != tl.float32:
        # the seed of stochastic rounding, 0 for tables without (optim/base.py: ROUNDING_SEED)
        seed = tl.load(p_own + 15).to(tl.int64)
        element = (row * dim)[:, None] + column[None, :]
        lost: tl.constexpr = 16 if p_table.dtype.element_ty == tl.bfloat16 else 13
        # without a branch on the seed, inside of which Triton 3.6 fails to lay out some tiles
        w = rounded_at_random(w, element, seed, step, lost)
    tl.store(p_table + o_row + column[None, :], w.to(p_table.dtype.element_ty), mask=mask)
    store_slot(p_slots, table_slot0(p_tables, table), row, dim, column, live, mask, s0, SLOT0, SLOT_ALIGN)
    store_slot(p_slots, table_slot1(p_tables, table), row, dim, column, live, mask, s1, SLOT1, SLOT_ALIGN)


@triton.jit
def uncut(
    p_source, p_tables, table, row, dim, column, mask, g, w,
    MODE: tl.constexpr, HAS_DOTS: tl.constexpr, SOURCE_ALIGN: tl.constexpr,
):  # fmt: skip
    """Complete gradients of the rows as they are stored, from those of the rows cut to MAX_NORM.

    The rows are `w` where there is an optimizer, or were dots; else they are read: where a norm is asked for from the
    tables themselves, where gradients are stored from T_SOURCE on.
    """
    if MODE == 0 or HAS_DOTS:
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
    RULE: tl.constexpr, MODE: tl.constexpr, SLOT0: tl.constexpr, SLOT1: tl.constexpr, AT_RANDOM: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_DOTS: tl.constexpr, CLIPPED: tl.constexpr, ALIGN: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr, SLOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """What becomes of complete gradients; `place` is where the mode of norms puts each."""
    if CLIPPED:
        g = uncut(p_source, p_tables, table, row, dim, column, mask, g, w, MODE, HAS_DOTS, SOURCE_ALIGN)
    if HAS_GRAD_SCALE:
        g = g * tl.load(p_grad_scale)
    if MODE == 0:
        step_rows(
            p_table, p_slots, p_tables, p_hyper, p_steps, table, row, dim, column, live, mask, g, w, s0, s1,
            RULE, SLOT0, SLOT1, AT_RANDOM, ALIGN, SLOT_ALIGN,
        )  # fmt: skip
    elif MODE == 1:
        o_row = tl.multiple_of((table_offset(p_tables, table) + row * dim)[:, None], [ALIGN, ALIGN])
        tl.store(p_table + o_row + column[None, :], g.to(p_table.dtype.element_ty), mask=mask)
    else:
        tl.store(p_table + place, tl.sum(g * g, axis=1), mask=live)
