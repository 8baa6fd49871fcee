"""A layer of single-neuron experts: `out[b] = Σ_k activation(<x[b], down[id_k]>) * score_k * up[id_k]`.

With a gate, `activation(<x[b], gate[id_k]>) * <x[b], down[id_k]>` in place of `activation(<x[b], down[id_k]>)`.

One program: one bag. First all its dot products, which stay in `p_dots` (and `p_gates`) for backward; then the weighted
rows. Each row is read once: K * (D + E) elements in, E out, K dot products aside.
"""

from .._triton import tl, triton
from .descriptors import within

SIZES = ["places", "rows", "x_row"]
RELU, GELU, SILU, IDENTITY = range(4)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        return tl.where(x > 0, x, tl.where(x == x, 0.0, x))
    elif ACTIVATION == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:
        return x / (1.0 + tl.exp(-x))
    else:
        return x


@triton.jit
def dots_of(p_table, o_row, p_x, o_x, counts, dim, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The dot products of `ROWS` rows with one vector."""
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    first = dim * 0
    while first < dim:
        column = first + tl.arange(0, BLOCK_D)
        m_column = column // ALIGN * ALIGN < dim
        x = tl.load(p_x + o_x + column, mask=m_column, other=0.0).to(tl.float32)
        row = tl.load(p_table + o_row + column[None, :], mask=counts[:, None] & m_column[None, :], other=0.0)
        # an absent row gives 0, also where `x` is infinite
        total += tl.where(counts[:, None], row.to(tl.float32) * x[None, :], 0.0)
        first += BLOCK_D
    return tl.sum(total, axis=1)


@triton.jit(do_not_specialize=SIZES)
def expert_kernel(
    p_x, p_down, p_gate, p_up, p_ids, p_scores, p_dots, p_gates, p_out, places, rows, dim, out_dim, x_row,
    HAS_GATE: tl.constexpr, ACTIVATION: tl.constexpr, ALIGN: tl.constexpr, OUT_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, OUT_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """One program: one bag of `places` ids; `rows` is int64, as addresses are."""
    bag = tl.program_id(0).to(tl.int64)
    start = bag * places
    rows = rows.to(tl.int64)
    lane = tl.arange(0, ROWS)
    at = 0
    while at < places:
        inside = at + lane < places
        ids = tl.load(p_ids + start + at + lane, mask=inside, other=0).to(tl.int64)
        counts = inside & within(ids, rows)
        o_row = tl.multiple_of((ids * dim)[:, None], [ALIGN, ALIGN])
        o_x = tl.multiple_of(bag * x_row, ALIGN)
        dots = dots_of(p_down, o_row, p_x, o_x, counts, dim, ALIGN, ROWS, BLOCK_D)
        tl.store(p_dots + start + at + lane, dots, mask=inside)
        if HAS_GATE:
            gates = dots_of(p_gate, o_row, p_x, o_x, counts, dim, ALIGN, ROWS, BLOCK_D)
            tl.store(p_gates + start + at + lane, gates, mask=inside)
        at += ROWS
    # what was written is read by other threads
    tl.debug_barrier()
    lane = tl.arange(0, OUT_ROWS)
    first = 0
    while first < out_dim:
        column = first + tl.arange(0, BLOCK_OUT)
        m_column = column // OUT_ALIGN * OUT_ALIGN < out_dim
        total = tl.zeros([OUT_ROWS, BLOCK_OUT], tl.float32)
        at = 0
        while at < places:
            inside = at + lane < places
            ids = tl.load(p_ids + start + at + lane, mask=inside, other=0).to(tl.int64)
            counts = inside & within(ids, rows)
            dots = tl.load(p_dots + start + at + lane, mask=inside, other=0.0)
            scores = tl.load(p_scores + start + at + lane, mask=inside, other=0.0)
            if HAS_GATE:
                gates = tl.load(p_gates + start + at + lane, mask=inside, other=0.0)
                weights = activated(gates, ACTIVATION) * dots * scores
            else:
                weights = activated(dots, ACTIVATION) * scores
            weights = tl.where(counts, weights, 0.0)
            o_row = tl.multiple_of((ids * out_dim)[:, None], [OUT_ALIGN, OUT_ALIGN])
            row = tl.load(p_up + o_row + column[None, :], mask=counts[:, None] & m_column[None, :], other=0.0)
            total += row.to(tl.float32) * weights[:, None]
            at += OUT_ROWS
        out = tl.sum(total, axis=0).to(p_out.dtype.element_ty)
        o_out = tl.multiple_of(bag * out_dim, OUT_ALIGN)
        tl.store(p_out + o_out + column, out, mask=m_column)
        first += BLOCK_OUT
