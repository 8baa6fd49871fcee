"""Ids → keys, and sorted keys → runs of equal rows, cut into short segments that can be summed side by side.

A key numbers a row among the rows of all tables: ROW_BASE + id. Ids that do not count, and those of tables that do not
learn, get the key `absent`, one more than any row has, so that the sort puts them last.

A *segment* is a run of equal keys, or a piece of a long one. Runs are cut at multiples of CHUNK, but only where more
than half a CHUNK of the run lies on either side, so that short runs stay whole. So no segment is longer than two
CHUNKs, where a run is cut shows without a scan over the batch, and a row that holds half of the batch is shared by many
programs.

Segments are dealt out by where they start, in blocks of BLOCK sorted keys; block `k` has those that start in it at
`[k * (BLOCK + 1):]`, with all that a program must know of them, so that it waits for memory once before it asks for
rows and gradients. Per id this reads 20 to 28 bytes and writes 12 to 20, and 16 to 32 for each segment.
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
def last_not_above(p_sorted, count, first, last, STRIDE: tl.constexpr, PROBES: tl.constexpr):
    """For two numbers: which of the `count` sorted ones, `STRIDE` apart, is the last not above; in few rounds."""
    lane = tl.arange(0, PROBES)
    numbers = tl.where(tl.arange(0, 2) == 0, first, last)[:, None]
    low = tl.zeros([2, 1], tl.int64)
    left = low + count
    span = count
    while span > 1:
        span = (span + PROBES - 1) // PROBES
        ahead = lane[None, :] * span
        inside = ahead < left
        reached = inside & (tl.load(p_sorted + (low + ahead) * STRIDE, mask=inside, other=0) <= numbers)
        ahead = tl.max(tl.where(reached, ahead, 0), axis=1, keep_dims=True)
        low += ahead
        left = tl.minimum(left - ahead, span)
    return tl.min(tl.min(low, axis=1), axis=0), tl.max(tl.max(low, axis=1), axis=0)


@triton.jit
def last_not_above_each(p_sorted, low, span, numbers, STRIDE: tl.constexpr):
    """The same for a block of numbers, each of which has its place from `low` to `low + span`."""
    high = low + span
    while span > 0:
        middle = (low + high + 1) // 2
        reached = tl.load(p_sorted + middle * STRIDE) <= numbers
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
        span = span // 2
    return low


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
    low = tl.where(wrong, first_bag, guess)
    return last_not_above_each(p_offsets, low, tl.where(wrong, span, 0), position, 1)


@triton.jit(
    do_not_specialize=["number", "bags", "total_bags", "feature_count", "absent", "grad_row", "grad_column"],
    do_not_specialize_on_alignment=["p_features", "p_tables", "p_ids", "p_offsets", "p_weights", "p_scale"],
)
def key_kernel(
    p_features, p_tables, p_ids, p_offsets, p_weights, p_scale, p_keys, p_sources, p_coefficients,
    number, bags, total_bags, feature_count, absent, grad_row, grad_column,
    HAS_WEIGHTS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FROZEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` positions.

    Writes the key of each, where its gradient row starts and, if there are scales, its coefficient.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    position = first + tl.arange(0, BLOCK)
    inside = position < number
    ids = tl.load(p_ids + position, mask=inside, other=0).to(tl.int64)
    first_bag, last_bag = last_not_above(p_offsets, total_bags, first, tl.minimum(first + BLOCK, number) - 1, 1, 128)
    bag = bags_of(p_offsets, position, inside, first_bag, last_bag)
    # bags come feature by feature, and record by record of all features
    line = first_bag // bags
    record = line // feature_count
    feature = line - record * feature_count
    row = bag - line * bags + record * bags
    zeros = tl.zeros([BLOCK], tl.int64)
    rows = zeros + feature_rows(p_features, feature)
    flags = zeros + feature_flags(p_features, feature)
    base = zeros + feature_row_base(p_features, feature)
    column = zeros + feature_column(p_features, feature)
    table = zeros + feature_table(p_features, feature)
    # nearly always all are of one feature; division and gathers cost more than all the rest
    if last_bag // bags != line:
        lines = bag // bags
        records = lines // feature_count
        features = lines - records * feature_count
        row = bag - lines * bags + records * bags
        rows = feature_rows(p_features, features)
        flags = feature_flags(p_features, features)
        base = feature_row_base(p_features, features)
        column = feature_column(p_features, features)
        table = feature_table(p_features, features)
    weights = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_WEIGHTS:
        weights = tl.load(p_weights + position, mask=inside, other=0.0)
    counts = id_counts(ids, weights, rows, flags, inside)
    if HAS_FROZEN:
        counts = counts & (table_rule(p_tables, table) >= 0)
    key = tl.where(counts, base + ids, absent)
    tl.store(p_keys + position, key.to(p_keys.dtype.element_ty), mask=inside)
    source = row * grad_row + column * grad_column
    tl.store(p_sources + position, source.to(p_sources.dtype.element_ty), mask=inside)
    if HAS_SCALE:
        coefficient = weights * tl.load(p_scale + bag)
        tl.store(p_coefficients + position, coefficient, mask=inside)


@triton.jit(
    do_not_specialize=["number", "absent", "owners"], do_not_specialize_on_alignment=["p_owners", "p_coefficients"]
)
def segment_kernel(
    p_owners, p_keys, p_order, p_position_sources, p_coefficients, p_sources, p_sorted_coefficients,
    p_starts, p_tags, p_rows, p_first_sources, p_counts, p_cuts, number, absent, owners,
    HAS_COEFFICIENTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` sorted keys. `p_owners` holds the ROW_BASE and the number of each table, sorted.

    Writes, for each, where its gradient row starts and its coefficient, both in sorted order; and the segments that
    start in the block, and their number. Of a segment: its first position; a tag, `2 * table`, and 1 more where a run
    begins; its row; where its first gradient row starts. Behind the last one: where it ends, and whether its run does.
    And for every multiple of CHUNK: the table if it is the first cut of a run, else -1.
    """
    HALF: tl.constexpr = CHUNK // 2
    block = tl.program_id(0).to(tl.int64)
    position = block * BLOCK + tl.arange(0, BLOCK)
    inside = position < number
    order = tl.load(p_order + position, mask=inside, other=0)
    key = tl.load(p_keys + position, mask=inside, other=absent)
    before = tl.load(p_keys + position - 1, mask=inside & (position > 0), other=-1)
    source = tl.load(p_position_sources + order, mask=inside, other=0)
    tl.store(p_sources + position, source, mask=inside)
    if HAS_COEFFICIENTS:
        coefficient = tl.load(p_coefficients + order, mask=inside, other=0.0)
        tl.store(p_sorted_coefficients + position, coefficient, mask=inside)
    learns = inside & (key < absent)
    first_key = tl.min(key, axis=0)
    last_key = tl.max(tl.where(learns, key, first_key), axis=0)
    first_owner, last_owner = last_not_above(p_owners, owners, first_key, last_key, 2, 128)
    owner = tl.zeros([BLOCK], tl.int64) + first_owner
    base = tl.zeros([BLOCK], tl.int64) + tl.load(p_owners + first_owner * 2)
    table = tl.zeros([BLOCK], tl.int64) + tl.load(p_owners + first_owner * 2 + 1)
    # nearly always all are of one table
    if last_owner != first_owner:
        owner = last_not_above_each(p_owners, owner, last_owner - first_owner, key, 2)
        base = tl.load(p_owners + owner * 2)
        table = tl.load(p_owners + owner * 2 + 1)
    window = position // CHUNK
    edge = inside & (position == window * CHUNK)
    # other keys are looked at in edges alone
    cut = learns & edge & (tl.load(p_keys + position - HALF, mask=edge & (position > 0), other=-1) == key)
    cut = cut & (tl.load(p_keys + position + HALF, mask=edge & (position + HALF < number), other=-1) == key)
    # a run that is cut at the edge before, too, had its first cut there or earlier
    earlier = tl.load(p_keys + position - CHUNK - HALF, mask=cut & (window > 1), other=-1) == key
    tl.store(p_cuts + window, tl.where(cut & (earlier == 0), table, -1).to(tl.int32), mask=edge)
    fresh = key != before
    begins = learns & (fresh | cut)
    rank = tl.cumsum(begins.to(tl.int32), axis=0) - 1
    first = block * (BLOCK + 1)
    at = first + rank
    tl.store(p_starts + at, position.to(p_starts.dtype.element_ty), mask=begins)
    tl.store(p_tags + at, table.to(tl.int32) * 2 + fresh.to(tl.int32), mask=begins)
    tl.store(p_rows + at, (key - base).to(p_rows.dtype.element_ty), mask=begins)
    tl.store(p_first_sources + at, source, mask=begins)
    count = tl.sum(begins.to(tl.int32), axis=0)
    tl.store(p_counts + block, count)
    # the last segment may reach into the next block
    learnt = tl.sum(learns.to(tl.int32), axis=0)
    end = block * BLOCK + learnt
    ahead = tl.arange(0, 2 * CHUNK)
    beyond_end = tl.where(learnt == BLOCK, number - end, 0)
    beyond = tl.load(p_keys + end + ahead, mask=ahead < beyond_end, other=-1)
    alike = tl.sum((beyond == last_key).to(tl.int32), axis=0)
    cut_here = (alike > HALF) & (tl.load(p_keys + end - HALF, mask=beyond_end > 0, other=-1) == last_key)
    cut_next = alike > CHUNK + HALF
    end += tl.where(cut_here, 0, tl.where(cut_next, CHUNK, alike))
    tl.store(p_starts + first + count, end.to(p_starts.dtype.element_ty))
    tl.store(p_tags + first + count, tl.where(cut_here | cut_next, 0, 1))
