"""The k best sums of one score of each of two vectors, in order, row by row.

First the k best of each half, by a partial sort of 64-bit keys: the score's bits in the upper half, the position's in
the lower; of long halves only those are sorted that can be among them. Then k rounds: lane r holds the best pair of
rank r in the first half that is not taken yet; the best lane gives its pair away and moves on to the next rank of the
second half. So of all n * m sums only about 2 k are made, and those of the staircase (r + 1)(s + 1) <= k bound how far
a lane goes.

n + m scores in, k scores and ids out. What is sorted of long halves lies in `p_found`, 8 bytes an entry, the second
half in order in `p_scratch` and `p_places`, 12 bytes; most of it stays in the cache. What the order is: see
`torch/product_topk.py`. A NaN is replaced by 2**400 and an infinity by 2**200, beyond all sums of float32 numbers; sums
are float64, with what rounding took from them.
"""

from .._triton import tl, triton

SIZES = ["n", "m", "row_a", "row_b"]


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
def exact_sum(a, b):
    """The sum, and what its rounding took away (Knuth's two-sum)."""
    value = a + b
    part = value - a
    return value, (a - (value - part)) + (b - part)


@triton.jit
def keys_of(p_scores, position, inside, count):
    return sort_key(tl.load(p_scores + position, mask=inside, other=0.0).to(tl.float32), position, count)


@triton.jit
def best_keys(p_scores, p_found, count, K: tl.constexpr, ROOM: tl.constexpr, N: tl.constexpr):
    """The `K` largest of the keys of `count` scores, at most `N`, in order `[1, K]`; `p_found` has room for `ROOM`."""
    at = tl.arange(0, N)[None, :]
    key = keys_of(p_scores, at, at < count, count)
    if N < 4 * ROOM:
        best = tl.topk(key, K)
    else:
        # The best of 2 K groups bound from below what is wanted, and nearly always a few more than K keys are not less.
        # Neighbours are in different groups, so that scores in order are dealt out evenly.
        largest = tl.max(tl.reshape(key, [1, N // (2 * K), 2 * K]), axis=1)
        chosen = key >= tl.min(tl.topk(largest, K), axis=1)[:, None]
        place = tl.cumsum(chosen.to(tl.int32), axis=1)
        number = tl.max(tl.max(place, axis=1), axis=0)
        tl.store(p_found + place - 1, key, mask=chosen & (place <= ROOM))
        # what is written is read by other threads
        tl.debug_barrier()
        lane = tl.arange(0, ROOM)[None, :]
        best = tl.topk(tl.load(p_found + lane, mask=lane < number, other=-0x8000000000000000), K)
        if number > ROOM:
            # the best so far and the next keys, again and again
            rank = tl.arange(0, K)[None, :]
            best = tl.full([1, K], -0x8000000000000000, tl.int64)
            for start in range(0, count, ROOM - K):
                tl.debug_barrier()
                tl.store(p_found + rank, best)
                tl.debug_barrier()
                kept = tl.load(p_found + lane, mask=lane < K, other=0)
                position = start + lane - K
                inside = (lane >= K) & (position < count)
                fresh = keys_of(p_scores, position, inside, count)
                best = tl.topk(tl.where(lane < K, kept, fresh), K)
    return best


@triton.jit(do_not_specialize=SIZES)
def product_topk_kernel(
    p_a, p_b, p_found, p_scratch, p_places, p_scores, p_ids, n, m, row_a, row_b,
    K: tl.constexpr, K_A: tl.constexpr, K_B: tl.constexpr, K_OUT: tl.constexpr, ROOM_A: tl.constexpr,
    ROOM_B: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One program: one row. `K_A`, `K_B` and `K_OUT` are the least powers of two that hold the ranks, and `K`."""
    row = tl.program_id(0).to(tl.int64)
    p_found += row * (ROOM_A + ROOM_B)
    best_a = best_keys(p_a + row * row_a, p_found, n, K_A, ROOM_A, N)
    best_b = best_keys(p_b + row * row_b, p_found + ROOM_A, m, K_B, ROOM_B, M)
    o_scratch = row * K_B + tl.arange(0, K_B)[None, :]
    tl.store(p_scratch + o_scratch, key_value(best_b))
    tl.store(p_places + o_scratch, key_position(best_b))
    # what was written is read by other threads
    tl.debug_barrier()
    rank = tl.arange(0, K_A)[None, :]
    value_a = key_value(best_a)
    place_a = key_position(best_a).to(tl.int64) * m
    # how far each rank may go
    last = tl.where(rank < n, tl.minimum(K // (rank + 1), m), 0)
    next_b = tl.zeros([1, K_A], tl.int32)
    o_next = row * K_B
    lowest = float("-inf")
    value, error = exact_sum(value_a, tl.load(p_scratch + o_next + next_b))
    ids = place_a + tl.load(p_places + o_next + next_b).to(tl.int64)
    value = tl.where(next_b < last, value, lowest)
    for number in range(K):
        left = next_b < last
        won = left & (value == tl.max(value, axis=1)[:, None])
        if tl.sum(tl.sum(won.to(tl.int32), axis=1), axis=0) > 1:
            # among equals what rounding took away decides, then the lowest id
            won = won & (error == tl.max(tl.where(won, error, lowest), axis=1)[:, None])
            won = won & (ids == tl.min(tl.where(won, ids, 0x7FFFFFFFFFFFFFFF), axis=1)[:, None])
        tl.store(p_ids + row * K + number + rank * 0, ids, mask=won)
        next_b += won.to(tl.int32)
        more = won & (next_b < last)
        other = tl.load(p_scratch + o_next + next_b, mask=more, other=0.0)
        place = tl.load(p_places + o_next + next_b, mask=more, other=0)
        fresh, rest = exact_sum(value_a, other)
        value = tl.where(more, fresh, tl.where(won, lowest, value))
        error = tl.where(more, rest, error)
        ids = tl.where(more, place_a + place.to(tl.int64), ids)
    tl.debug_barrier()
    number = tl.arange(0, K_OUT)[None, :]
    inside = number < K
    ids = tl.load(p_ids + row * K + number, mask=inside, other=0)
    score_a = tl.load(p_a + row * row_a + ids // m, mask=inside, other=0.0).to(tl.float32)
    score_b = tl.load(p_b + row * row_b + ids % m, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_scores + row * K + number, (score_a + score_b).to(p_scores.dtype.element_ty), mask=inside)
