"""Gradient of the loss with respect to each weight.

With `s_i = <row(id_i), grad of its bag>`, `scale = M ** (-q/2)` and `M = Σ w**p`:

    out_i = scale * s_i - (q/2) * p * w_i**(p-1) / M * scale * Σ_j w_j s_j

Each row is read once, as in the lookup: N * D elements in, N numbers out.
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
    moment_of,
)
from .max_norm import cut_factor

SIZES = ["bags", "grad_row"]
UNALIGNED = ["p_features", "p_ids", "p_offsets", "p_weights", "p_scale", "p_out"]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def coefficient_grad_kernel(
    p_table, p_features, p_ids, p_offsets, p_weights, p_scale, p_grad, p_out, bags, grad_row, grad_column,
    HAS_WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr, CLIPPED: tl.constexpr,
    ALIGN: tl.constexpr, GRAD_ALIGN: tl.constexpr, DIM_ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one bag of one feature, `BLOCK_D` columns at a time, `ROWS` rows in flight, ids one round ahead."""
    # division is cheap in 32 bits, which hold the number of programs
    feature = tl.program_id(0) // bags
    bag = tl.program_id(0).to(tl.int64)
    rows = feature_rows(p_features, feature)
    dim = feature_dim(p_features, feature)
    flags = feature_flags(p_features, feature)
    stride = feature_stride(p_features, feature)
    o_table = feature_offset(p_features, feature)
    moment = feature_moment(p_features, feature)
    power = feature_power(p_features, feature)
    o_grad = tl.multiple_of(
        (bag - feature * bags) * grad_row + feature_column(p_features, feature) * grad_column, GRAD_ALIGN
    )
    lane = tl.arange(0, ROWS)
    start = tl.load(p_offsets + bag)
    end = tl.load(p_offsets + bag + 1)
    scale = start * 0.0 + 1.0
    if NORMALISED:
        scale = tl.load(p_scale + bag)
    scale = scale.to(tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    position = start
    next_ids = tl.load(p_ids + start + lane, mask=start + lane < end, other=0)
    while position < end:
        at = position + lane
        inside = at < end
        ids = next_ids.to(tl.int64)
        next_ids = tl.load(p_ids + at + ROWS, mask=at + ROWS < end, other=0)
        weights = tl.full([ROWS], 1.0, tl.float32)
        if HAS_WEIGHTS:
            weights = tl.load(p_weights + at, mask=inside, other=0.0)
        counts = id_counts(ids, weights, rows, flags, inside)
        o_row = tl.multiple_of((o_table + ids * stride)[:, None], [ALIGN, ALIGN])
        dot = tl.zeros([ROWS, BLOCK_D], tl.float32)
        if CLIPPED:
            square = tl.zeros([ROWS, BLOCK_D], tl.float32)
        first = start * 0
        while first < dim:
            column = first + tl.arange(0, BLOCK_D)
            m_column = column // DIM_ALIGN * DIM_ALIGN < dim
            grad = tl.load(p_grad + o_grad + column * grad_column, mask=m_column, other=0.0).to(tl.float32)
            row = tl.load(p_table + o_row + column[None, :], mask=counts[:, None] & m_column[None, :], other=0.0).to(
                tl.float32
            )
            dot += row * grad[None, :]
            if CLIPPED:
                square += row * row
            first += BLOCK_D
        product = tl.sum(dot, axis=1)
        if CLIPPED:
            product = product * cut_factor(tl.sum(square, axis=1), feature_max_norm(p_features, feature))
        tl.store(p_out + at, tl.where(counts, scale * product, 0.0), mask=inside)
        if NORMALISED:
            total += tl.where(counts, moment_of(weights, moment), 0.0)
            weighted += tl.where(counts, weights * product, 0.0)
        position += ROWS
    if NORMALISED:
        moments = tl.sum(total, axis=0)
        shared = tl.sum(weighted, axis=0) * scale * (power * 0.5).to(tl.float32)
        shared = tl.where(moments == 0, 0.0, tl.div_rn(shared, tl.where(moments == 0, 1.0, moments)))
        # a second pass over the bag, where the weights take part in the scale
        position = tl.where((power != 0) & (moment != 0), start, end)
        # what the first pass wrote is read by other threads
        tl.debug_barrier()
        while position < end:
            at = position + lane
            inside = at < end
            ids = tl.load(p_ids + at, mask=inside, other=0).to(tl.int64)
            weights = tl.full([ROWS], 1.0, tl.float32)
            if HAS_WEIGHTS:
                weights = tl.load(p_weights + at, mask=inside, other=0.0)
            counts = id_counts(ids, weights, rows, flags, inside)
            slope = tl.where(moment == 1, 1.0, 2.0 * weights)
            own = tl.load(p_out + at, mask=inside, other=0.0)
            tl.store(p_out + at, tl.where(counts, own - slope * shared, 0.0), mask=inside)
            position += ROWS
