"""Ids → keys, and sorted keys → runs of equal rows, cut into short segments that can be summed side by side.

A key numbers a row among the rows of all tables: ROW_BASE + id. Ids that do not count, and those of tables that do not
learn, get the key `absent`, one more than any row has, so that the sort puts them last.

A *segment* is a run of equal keys, or a piece of a long one. Runs are cut at multiples of CHUNK, but only where at
least half a CHUNK of the run lies on either side, so that short runs stay whole; and at every multiple of BLOCK. So
no segment is longer than two CHUNKs, a program knows the segments of its block without a scan over the batch, and a
row that holds half of the batch is shared by many programs.

Sorted keys are dealt out in blocks of BLOCK; block `k` has its segments' starts at `p_starts[k * (BLOCK + 1):]`, and
likewise what a program must know of them, so that it waits for memory once before it asks for rows and gradients.
Per id this reads 12 to 20 bytes and writes 4 to 8, and 16 to 32 for each segment.
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


@triton.jit
def bag_range(p_offsets, total_bags, first, last, PROBES: tl.constexpr):
    """The bags of two positions, the first and the last of a program, by a search of `PROBES` branches."""
    lane = tl.arange(0, PROBES)
    ends = tl.where(tl.arange(0, 2) == 0, first, last)[:, None]
    low = tl.zeros([2, 1], tl.int64)
    left = low + total_bags
    span = total_bags
    while span > 1:
        span = (span + PROBES - 1) // PROBES
        ahead = lane[None, :] * span
        inside = ahead < left
        reached = inside & (tl.load(p_offsets + low + ahead, mask=inside, other=0) <= ends)
        ahead = tl.max(tl.where(reached, ahead, 0), axis=1, keep_dims=True)
        low += ahead
        left = tl.minimum(left - ahead, span)
    return tl.min(tl.min(low, axis=1), axis=0), tl.max(tl.max(low, axis=1), axis=0)


@triton.jit
def bags_of(p_offsets, position, inside, first_bag, last_bag):
    """The bag of each position, all from `first_bag` to `last_bag`: at once where bags are equally long."""
    span = last_bag - first_bag
    start = tl.load(p_offsets + first_bag)
    length = tl.maximum(tl.load(p_offsets + last_bag) - start, 1).to(tl.float32)
    ahead = ((position - start).to(tl.float32) + 0.5) * (span.to(tl.float32) / length)
    guess = first_bag + tl.minimum(ahead.to(tl.int64), span)
    right = (tl.load(p_offsets + guess) <= position) & (tl.load(p_offsets + guess + 1) > position)
    wrong = tl.max((inside & (right == 0)).to(tl.int32), axis=0) > 0
    bag = tl.where(wrong, first_bag, guess)
    span = tl.where(wrong, span, 0)
    last = bag + span
    while span > 0:
        middle = (bag + last + 1) // 2
        reached = tl.load(p_offsets + middle) <= position
        bag = tl.where(reached, middle, bag)
        last = tl.where(reached, last, middle - 1)
        span = span // 2
    return bag


@triton.jit(
    do_not_specialize=["number", "bags", "total_bags", "feature_count", "absent"],
    do_not_specialize_on_alignment=["p_features", "p_tables", "p_ids", "p_offsets", "p_weights", "p_scale"],
)
def key_kernel(
    p_features, p_tables, p_ids, p_offsets, p_weights, p_scale, p_keys, p_bags, p_coefficients,
    number, bags, total_bags, feature_count, absent,
    HAS_WEIGHTS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FROZEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` positions. Writes the key, the bag and, if there are scales, the coefficient of each."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    position = first + tl.arange(0, BLOCK)
    inside = position < number
    ids = tl.load(p_ids + position, mask=inside, other=0).to(tl.int64)
    first_bag, last_bag = bag_range(p_offsets, total_bags, first, tl.minimum(first + BLOCK, number) - 1, 128)
    bag = bags_of(p_offsets, position, inside, first_bag, last_bag)
    # division is much cheaper in 32 bits, where they suffice
    bag = bag.to(p_bags.dtype.element_ty)
    feature = (bag // bags) % feature_count
    rows = feature_rows(p_features, feature)
    flags = feature_flags(p_features, feature)
    weights = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_WEIGHTS:
        weights = tl.load(p_weights + position, mask=inside, other=0.0)
    counts = id_counts(ids, weights, rows, flags, inside)
    if HAS_FROZEN:
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
    p_features, p_keys, p_order, p_bags, p_coefficients, p_sources, p_sorted_coefficients,
    p_starts, p_tags, p_rows, p_first_sources, p_counts, p_cuts,
    number, bags, feature_count, absent, grad_row, grad_column,
    HAS_COEFFICIENTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` sorted keys.

    Writes, for each, where its gradient row starts and its coefficient, both in sorted order; and the segments of the
    block and their number. Of a segment: its first position; a tag, `2 * table`, and 1 more where a run begins; its
    row; where its first gradient row starts. Behind the last one: where it ends, and whether its run does.
    And for every multiple of CHUNK: the table if it is the first cut of a run, else -1.
    """
    block = tl.program_id(0).to(tl.int64)
    position = block * BLOCK + tl.arange(0, BLOCK)
    inside = position < number
    key = tl.load(p_keys + position, mask=inside, other=absent)
    order = tl.load(p_order + position, mask=inside, other=0)
    before = tl.load(p_keys + position - 1, mask=inside & (position > 0), other=-1)
    bag = tl.load(p_bags + order, mask=inside, other=0)
    line = bag // bags
    record = line // feature_count
    feature = line - record * feature_count
    row = record.to(tl.int64) * bags + (bag - line * bags)
    source = row * grad_row + feature_column(p_features, feature) * grad_column
    source = source.to(p_sources.dtype.element_ty)
    tl.store(p_sources + position, source, mask=inside)
    if HAS_COEFFICIENTS:
        coefficient = tl.load(p_coefficients + order, mask=inside, other=0.0)
        tl.store(p_sorted_coefficients + position, coefficient, mask=inside)
    table = feature_table(p_features, feature).to(tl.int32)
    learns = inside & (key < absent)
    window = position // CHUNK
    edge = inside & (position == window * CHUNK)
    # other keys are looked at in edges alone
    back = position - reach_back(position, CHUNK, BLOCK)
    on = position + reach_on(position, CHUNK, BLOCK)
    entry = position - CHUNK - reach_back(position - CHUNK, CHUNK, BLOCK)
    cut = learns & edge & (tl.load(p_keys + back, mask=edge & (position > 0), other=-1) == key)
    cut = cut & (tl.load(p_keys + on, mask=edge & (on < number), other=-1) == key)
    # a run that is cut at the edge before, too, had its first cut there or earlier
    earlier = tl.load(p_keys + entry, mask=cut & (window > 1), other=-1) == key
    tl.store(p_cuts + window, tl.where(cut & (earlier == 0), table, -1), mask=edge)
    fresh = key != before
    begins = learns & (fresh | cut)
    rank = tl.cumsum(begins.to(tl.int32), axis=0) - 1
    first = block * (BLOCK + 1)
    at = first + rank
    tl.store(p_starts + at, position.to(p_starts.dtype.element_ty), mask=begins)
    tl.store(p_tags + at, table * 2 + fresh.to(tl.int32), mask=begins)
    local = key - feature_row_base(p_features, feature)
    tl.store(p_rows + at, local.to(p_rows.dtype.element_ty), mask=begins)
    tl.store(p_first_sources + at, source, mask=begins)
    count = tl.sum(begins.to(tl.int32), axis=0)
    tl.store(p_counts + block, count)
    end = block * BLOCK + tl.sum(learns.to(tl.int32), axis=0)
    after = tl.load(p_keys + end, mask=end < number, other=absent)
    last = tl.load(p_keys + end - 1, mask=end > 0, other=-1)
    tl.store(p_starts + first + count, end.to(p_starts.dtype.element_ty))
    tl.store(p_tags + first + count, (after != last).to(tl.int32))
