"""The k best sums of one score of each of two vectors, in order, row by row.

First the k best of each half, by a partial sort of 64-bit keys: the score's bits in the upper half, the position's in
the lower. Then k rounds: lane r holds the best pair of rank r in the first half that is not taken yet; the best lane
gives its pair away and moves on to the next rank of the second half. So of all n * m sums only about 2 k are made, and
those of the staircase (r + 1)(s + 1) <= k bound how far a lane goes.

n + m scores in, k scores and ids out. The sorted second half lies in `p_scratch` and `p_places`, 12 bytes an entry,
which stay in the cache. What the order is: see `torch/product_topk.py`. A NaN is replaced by 2**400 and an infinity by
2**200, beyond all sums of float32 numbers; sums are float64, with what rounding took from them.
"""

from .._triton import tl, triton

SIZES = ["rows", "n", "m", "row_a", "row_b"]


@triton.jit
def sort_key(scores, position, count):
    """int64 whose order is that of the scores, the first position first among equals; the smallest for none."""
    # -0.0 equals 0.0, and all NaN are the same
    scores = tl.where(scores == 0, 0.0, scores)
    scores = tl.where(scores == scores, scores, float("nan"))
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(scores == scores, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - position).to(tl.int64)
    return tl.where(position < count, key, -0x8000000000000000)


@triton.jit
def key_position(key):
    return (0x7FFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def key_value(key):
    """The score as float64, with stand-ins for what is not finite."""
    bits = (key >> 32).to(tl.int32)
    is_nan = bits == 0x7FFFFFFF
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    value = tl.where(is_nan, 0, bits).to(tl.float32, bitcast=True).to(tl.float64)
    huge = 1606938044258990275541962092341162602522202993782792835301376.0
    infinite = tl.where(value > 3.5e38, huge, tl.where(value < -3.5e38, -huge, value))
    return tl.where(is_nan, huge * huge, infinite)


@triton.jit
def better(value_a, error_a, id_a, value_b, error_b, id_b):
    """Of two sums the one that comes first."""
    same = (value_a == value_b) & (error_a == error_b)
    first = (value_a > value_b) | ((value_a == value_b) & (error_a > error_b)) | (same & (id_a < id_b))
    return tl.where(first, value_a, value_b), tl.where(first, error_a, error_b), tl.where(first, id_a, id_b)


@triton.jit
def exact_sum(a, b):
    """The sum, and what its rounding took away (Knuth's two-sum)."""
    value = a + b
    part = value - a
    return value, (a - (value - part)) + (b - part)


@triton.jit(do_not_specialize=SIZES)
def product_topk_kernel(
    p_a, p_b, p_scratch, p_places, p_scores, p_ids, rows, n, m, row_a, row_b,
    K: tl.constexpr, K_A: tl.constexpr, K_B: tl.constexpr, K_OUT: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program: `ROWS` rows. `K_A`, `K_B` and `K_OUT` are the least powers of two that hold the ranks, and `K`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    m_row = row < rows
    at_a = tl.arange(0, N)[None, :]
    scores_a = tl.load(p_a + row * row_a + at_a, mask=m_row & (at_a < n), other=0.0).to(tl.float32)
    best_a = tl.topk(sort_key(scores_a, at_a, n), K_A)
    at_b = tl.arange(0, M)[None, :]
    scores_b = tl.load(p_b + row * row_b + at_b, mask=m_row & (at_b < m), other=0.0).to(tl.float32)
    best_b = tl.topk(sort_key(scores_b, at_b, m), K_B)
    o_scratch = row * K_B + tl.arange(0, K_B)[None, :]
    tl.store(p_scratch + o_scratch, key_value(best_b), mask=m_row)
    tl.store(p_places + o_scratch, key_position(best_b), mask=m_row)
    # what was written is read by other threads
    tl.debug_barrier()
    rank = tl.arange(0, K_A)[None, :]
    value_a = key_value(best_a)
    place_a = key_position(best_a).to(tl.int64) * m
    # how far each rank may go
    last = tl.minimum(K // (rank + 1), m)
    last = tl.where(m_row & (rank < n), last, 0)
    next_b = tl.zeros([ROWS, K_A], tl.int32)
    o_next = row * K_B
    lowest = float("-inf")
    value, error = exact_sum(value_a, tl.load(p_scratch + o_next + next_b, mask=m_row, other=0.0))
    ids = place_a + tl.load(p_places + o_next + next_b, mask=m_row, other=0).to(tl.int64)
    value = tl.where(next_b < last, value, lowest)
    error = tl.where(next_b < last, error, lowest)
    for number in range(K):
        _, _, best = tl.reduce((value, error, ids), 1, better)
        best = best[:, None]
        tl.store(p_ids + row * K + number, best, mask=m_row)
        won = (ids == best) & (next_b < last)
        next_b += won.to(tl.int32)
        more = won & (next_b < last)
        other = tl.load(p_scratch + o_next + next_b, mask=more, other=0.0)
        place = tl.load(p_places + o_next + next_b, mask=more, other=0)
        fresh, rest = exact_sum(value_a, other)
        value = tl.where(more, fresh, tl.where(won, lowest, value))
        error = tl.where(more, rest, tl.where(won, lowest, error))
        ids = tl.where(more, place_a + place.to(tl.int64), ids)
    tl.debug_barrier()
    number = tl.arange(0, K_OUT)[None, :]
    inside = m_row & (number < K)
    ids = tl.load(p_ids + row * K + number, mask=inside, other=0)
    score_a = tl.load(p_a + row * row_a + ids // m, mask=inside, other=0.0).to(tl.float32)
    score_b = tl.load(p_b + row * row_b + ids % m, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_scores + row * K + number, (score_a + score_b).to(p_scores.dtype.element_ty), mask=inside)
