"""Ids → keys, and sorted keys → runs of equal rows, cut into short segments that can be summed side by side.

A key numbers a row among the rows of all tables: ROW_BASE + id. Ids that do not count, and those of tables that do not
learn, get the key `absent`, one more than any row has, so that the sort puts them last.

A *segment* is a run of equal keys, or a piece of a long one. Runs are cut at multiples of CHUNK, but only where at
least half a CHUNK of the run lies on either side, so that short runs stay whole; and at every multiple of BLOCK. So
no segment is longer than two CHUNKs, a program knows the segments of its block without a scan over the batch, and a
row that holds half of the batch is shared by many programs.

Sorted keys are dealt out in blocks of BLOCK; block `k` has its segments' starts at `p_starts[k * (BLOCK + 1):]`, and
behind them the end of the last one. Per id this reads 12 to 20 bytes and writes 4 to 12.
"""

from .._triton import tl, triton
from .descriptors import (
    feature_column,
    feature_flags,
    feature_row_base,
    feature_rows,
    feature_table,
    id_counts,
    table_rule,
)


@triton.jit(
    do_not_specialize=["number", "bags", "total_bags", "feature_count", "absent", "steps"],
    do_not_specialize_on_alignment=["p_features", "p_tables", "p_ids", "p_offsets", "p_weights", "p_scale"],
)
def key_kernel(
    p_features, p_tables, p_ids, p_offsets, p_weights, p_scale, p_keys, p_bags, p_coefficients,
    number, bags, total_bags, feature_count, absent, steps,
    HAS_WEIGHTS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` positions. Writes the key, the bag and, if there are scales, the coefficient of each."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    position = first + tl.arange(0, BLOCK)
    inside = position < number
    # two searches at once: the bags of the block's first and last position
    ends = tl.where(tl.arange(0, 2) == 0, first, tl.minimum(first + BLOCK, number) - 1)
    low = tl.zeros([2], tl.int64)
    high = low + total_bags - 1
    while steps > 0:
        middle = (low + high + 1) // 2
        reached = tl.load(p_offsets + middle) <= ends
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
        steps -= 1
    first_bag = tl.min(low, axis=0)
    span = tl.max(low, axis=0) - first_bag
    # the bag of each position lies between those two
    bag = tl.zeros([BLOCK], tl.int64) + first_bag
    last = bag + span
    while span > 0:
        middle = (bag + last + 1) // 2
        reached = tl.load(p_offsets + middle) <= position
        bag = tl.where(reached, middle, bag)
        last = tl.where(reached, last, middle - 1)
        span = span // 2
    # division is much cheaper in 32 bits, where they suffice
    bag = bag.to(p_bags.dtype.element_ty)
    feature = (bag // bags) % feature_count
    rows = feature_rows(p_features, feature)
    flags = feature_flags(p_features, feature)
    ids = tl.load(p_ids + position, mask=inside, other=0).to(tl.int64)
    weights = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_WEIGHTS:
        weights = tl.load(p_weights + position, mask=inside, other=0.0)
    counts = id_counts(ids, weights, rows, flags, inside)
    counts = counts & (table_rule(p_tables, feature_table(p_features, feature)) >= 0)
    key = tl.where(counts, feature_row_base(p_features, feature) + ids, absent)
    tl.store(p_keys + position, key.to(p_keys.dtype.element_ty), mask=inside)
    tl.store(p_bags + position, bag, mask=inside)
    if HAS_SCALE:
        coefficient = weights * tl.load(p_scale + bag)
        tl.store(p_coefficients + position, coefficient, mask=inside)


@triton.jit
def reach_back(edge, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """A run is cut at `edge`, a multiple of CHUNK, if it holds the keys this far before it and `reach_on` after it."""
    return tl.where(edge % BLOCK == 0, 1, CHUNK // 2)


@triton.jit
def reach_on(edge, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """See `reach_back`."""
    return tl.where(edge % BLOCK == 0, 0, CHUNK // 2)


@triton.jit(
    do_not_specialize=["number", "bags", "feature_count", "absent", "grad_row", "grad_column"],
    do_not_specialize_on_alignment=["p_features", "p_coefficients"],
)
def segment_kernel(
    p_features, p_keys, p_order, p_bags, p_coefficients,
    p_sources, p_sorted_coefficients, p_starts, p_start_tables, p_counts, p_window_tables,
    number, bags, feature_count, absent, grad_row, grad_column,
    HAS_COEFFICIENTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` sorted keys.

    Writes, for each, where its gradient row starts and its coefficient, both in sorted order; and the segments of the
    block, the table of each, their number, and the table at every multiple of CHUNK.
    """
    block = tl.program_id(0).to(tl.int64)
    position = block * BLOCK + tl.arange(0, BLOCK)
    inside = position < number
    key = tl.load(p_keys + position, mask=inside, other=absent)
    before = tl.load(p_keys + position - 1, mask=inside & (position > 0), other=-1)
    order = tl.load(p_order + position, mask=inside, other=0)
    bag = tl.load(p_bags + order, mask=inside, other=0)
    line = bag // bags
    record = line // feature_count
    feature = line - record * feature_count
    row = record.to(tl.int64) * bags + (bag - line * bags)
    source = row * grad_row + feature_column(p_features, feature) * grad_column
    tl.store(p_sources + position, source.to(p_sources.dtype.element_ty), mask=inside)
    if HAS_COEFFICIENTS:
        coefficient = tl.load(p_coefficients + order, mask=inside, other=0.0)
        tl.store(p_sorted_coefficients + position, coefficient, mask=inside)
    table = feature_table(p_features, feature).to(tl.int32)
    window = position // CHUNK
    edge = position == window * CHUNK
    tl.store(p_window_tables + window, table, mask=inside & edge)
    learns = inside & (key < absent)
    # other keys are looked at in edges alone
    back = position - reach_back(position, CHUNK, BLOCK)
    on = position + reach_on(position, CHUNK, BLOCK)
    cut = edge & (tl.load(p_keys + back, mask=inside & edge & (position > 0), other=-1) == key)
    cut = cut & (tl.load(p_keys + on, mask=inside & edge & (on < number), other=-1) == key)
    begins = learns & ((key != before) | cut)
    rank = tl.cumsum(begins.to(tl.int32), axis=0) - 1
    at = block * (BLOCK + 1) + rank
    tl.store(p_starts + at, position.to(p_starts.dtype.element_ty), mask=begins)
    tl.store(p_start_tables + at, table, mask=begins)
    count = tl.sum(begins.to(tl.int32), axis=0)
    end = block * BLOCK + tl.sum(learns.to(tl.int32), axis=0)
    tl.store(p_counts + block, count)
    tl.store(p_starts + block * (BLOCK + 1) + count, end.to(p_starts.dtype.element_ty))
