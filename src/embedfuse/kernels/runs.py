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
    NARROW_BLOCK,
    feature_column,
    feature_flags,
    feature_row_base,
    feature_rows,
    feature_table,
    id_counts,
    table_dim,
    table_rule,
)

# wide words gain nothing here, so alignment makes no kernel of its own
KEY_POINTERS = [
    "p_features", "p_tables", "p_ids", "p_offsets", "p_weights", "p_scale", "p_keys", "p_sources", "p_coefficients",
    "p_list_counts", "p_steps", "p_counted", "p_skip",
]  # fmt: skip
KEY_SIZES = ["number", "bags", "total_bags", "feature_count", "absent", "grad_row", "grad_column", "table_count"]
SEGMENT_POINTERS = [
    "p_owners", "p_keys", "p_order", "p_position_sources", "p_coefficients", "p_sources", "p_sorted_coefficients",
    "p_starts", "p_tags", "p_rows", "p_first_sources", "p_counts", "p_list_counts", "p_long", "p_cuts",
    "p_cut_tables", "p_tables",
]  # fmt: skip


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
def bags_at(p_offsets, bags, number, first, last):
    """The bags of two positions of `number`, both inside: at once where bags are equally long."""
    low = tl.minimum(first * bags // number, bags - 1)
    high = tl.minimum(last * bags // number, bags - 1)
    right = (tl.load(p_offsets + low) <= first) & (tl.load(p_offsets + low + 1) > first)
    right = right & (tl.load(p_offsets + high) <= last) & (tl.load(p_offsets + high + 1) > last)
    if right == 0:
        low, high = last_not_above(p_offsets, bags, first, last, 1, 128)
    return low, high


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


@triton.jit(do_not_specialize=KEY_SIZES, do_not_specialize_on_alignment=KEY_POINTERS)
def key_kernel(
    p_features, p_tables, p_ids, p_offsets, p_weights, p_scale, p_keys, p_sources, p_coefficients, p_list_counts,
    p_steps, p_counted, p_skip,
    number, bags, total_bags, feature_count, absent, grad_row, grad_column, table_count,
    HAS_WEIGHTS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FROZEN: tl.constexpr, COUNTED: tl.constexpr,
    HAS_SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` positions.

    Writes the key of each, where its gradient row starts and, if there are scales, its coefficient. The first one also
    counts the step, which the kernels that come after it read: a launch of its own would cost the host as much as one
    of these.
    """
    if COUNTED:
        if tl.program_id(0) == 0:
            stop = table_count
            if HAS_SKIP:
                stop = tl.where(tl.load(p_skip) != 0, 0, stop)
            for start in range(0, stop, BLOCK):
                table = start + tl.arange(0, BLOCK)
                steps = tl.load(p_steps + table, mask=table < stop, other=0)
                counted = tl.load(p_counted + table, mask=table < stop, other=0)
                tl.store(p_steps + table, steps + counted, mask=table < stop)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    position = first + tl.arange(0, BLOCK)
    inside = position < number
    # what the next kernels count from
    four = tl.arange(0, 4)
    tl.store(p_list_counts + four, four * 0, mask=four + first < 4)
    ids = tl.load(p_ids + position, mask=inside, other=0).to(tl.int64)
    first_bag, last_bag = bags_at(p_offsets, total_bags, number, first, tl.minimum(first + BLOCK, number) - 1)
    # bags come feature by feature, and record by record of all features
    line = first_bag // bags
    record = line // feature_count
    feature = line - record * feature_count
    zeros = tl.zeros([BLOCK], tl.int64)
    rows = zeros + feature_rows(p_features, feature)
    flags = zeros + feature_flags(p_features, feature)
    base = zeros + feature_row_base(p_features, feature)
    column = zeros + feature_column(p_features, feature)
    table = zeros + feature_table(p_features, feature)
    bag = bags_of(p_offsets, position, inside, first_bag, last_bag)
    row = bag - line * bags + record * bags
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


@triton.jit
def tables_of(p_owners, owners, key, first_key, last_key, BLOCK: tl.constexpr):
    """The ROW_BASE and the table of each of `BLOCK` sorted keys, from `first_key` to `last_key`."""
    first_owner, last_owner = last_not_above(p_owners, owners, first_key, last_key, 2, 128)
    base = tl.zeros([BLOCK], tl.int64) + tl.load(p_owners + first_owner * 2)
    table = tl.zeros([BLOCK], tl.int64) + tl.load(p_owners + first_owner * 2 + 1)
    # nearly always all are of one table
    if last_owner != first_owner:
        owner = tl.zeros([BLOCK], tl.int64) + first_owner
        owner = last_not_above_each(p_owners, owner, last_owner - first_owner, key, 2)
        base = tl.load(p_owners + owner * 2)
        table = tl.load(p_owners + owner * 2 + 1)
    return base, table


@triton.jit(do_not_specialize=["number", "absent", "owners"], do_not_specialize_on_alignment=SEGMENT_POINTERS)
def segment_kernel(
    p_owners, p_keys, p_order, p_position_sources, p_coefficients, p_sources, p_sorted_coefficients,
    p_starts, p_tags, p_rows, p_first_sources, p_counts, p_list_counts, p_long, p_cuts, p_cut_tables, p_tables,
    number, absent, owners,
    HAS_COEFFICIENTS: tl.constexpr, CARRIED: tl.constexpr, CHUNK: tl.constexpr, LONG: tl.constexpr,
    NARROW_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` sorted keys. `p_owners` holds the ROW_BASE and the number of each table, sorted.

    Where gradient rows start lies at `p_sources` already if CARRIED, since the sort carried it; then there is no
    `p_order`.

    Writes, for each, where its gradient row starts and its coefficient, both in sorted order; and the segments that
    start in the block, and their number, NARROW_BLOCK more if all are of tables of at most NARROW_D columns, twice that
    if some are. Of a segment: its first position; a tag, `4 * table`, 2 more if it is of more than LONG ids (which is
    less than half a CHUNK), 1 more where a run begins; its row; where its first gradient row starts. Behind the last
    one: where it ends, and whether its run does.

    And two lists of the batch, their numbers in `p_list_counts`: of all long segments; of the edges where runs are
    first cut, with the table. Places in them are drawn by atomic additions, but what becomes of a segment or of a run
    does not depend on its place.

    All loads that nothing must be known for come first, so that memory is waited for few times.
    """
    HALF: tl.constexpr = CHUNK // 2
    EDGES: tl.constexpr = BLOCK // CHUNK
    block = tl.program_id(0).to(tl.int64)
    # positions in as many bits as they need: registers decide how many programs run at once
    lane = tl.arange(0, BLOCK)
    left = tl.minimum(number - block * BLOCK, BLOCK).to(tl.int32)
    inside = lane < left
    p_own_keys = p_keys + block * BLOCK
    if CARRIED:
        source = tl.load(p_sources + block * BLOCK + lane, mask=inside, other=0)
    else:
        order = tl.load(p_order + block * BLOCK + lane, mask=inside, other=0)
    key = tl.load(p_own_keys + lane, mask=inside, other=absent)
    before = tl.load(p_own_keys + lane - 1, mask=inside & (lane + block > 0), other=-1)
    edge = lane // CHUNK * CHUNK == lane
    m_low = inside & edge & (lane + block > 0)
    low = tl.load(p_own_keys + lane - HALF, mask=m_low, other=-1)
    high = tl.load(p_own_keys + lane + HALF, mask=edge & (block * BLOCK + lane + HALF < number), other=-1)
    later = tl.load(p_own_keys + lane + LONG, mask=block * BLOCK + lane + LONG < number, other=-1)
    # the edges once more, as a block of their own
    at_edge = tl.arange(0, EDGES) * CHUNK
    m_edge = at_edge < left
    inner = (at_edge + block) > 0
    edge_key = tl.load(p_own_keys + at_edge, mask=m_edge, other=absent)
    edge_low = tl.load(p_own_keys + at_edge - HALF, mask=m_edge & inner, other=-1)
    edge_high = tl.load(p_own_keys + at_edge + HALF, mask=at_edge + HALF < number - block * BLOCK, other=-1)
    m_earlier = m_edge & (block * BLOCK + at_edge >= 2 * CHUNK)
    earlier = tl.load(p_own_keys + at_edge - CHUNK - HALF, mask=m_earlier, other=-1)
    # the last segment may reach into the next block
    ahead = tl.arange(0, 2 * CHUNK)
    beyond = tl.load(p_own_keys + BLOCK + ahead, mask=block * BLOCK + BLOCK + ahead < number, other=-1)
    last_half = tl.load(p_own_keys + BLOCK - HALF, mask=left == BLOCK, other=-1)

    if not CARRIED:
        source = tl.load(p_position_sources + order, mask=inside, other=0)
        tl.store(p_sources + block * BLOCK + lane, source, mask=inside)
        if HAS_COEFFICIENTS:
            coefficient = tl.load(p_coefficients + order, mask=inside, other=0.0)
            tl.store(p_sorted_coefficients + block * BLOCK + lane, coefficient, mask=inside)
    learns = inside & (key < absent)
    learnt = tl.sum(learns.to(tl.int32), axis=0)
    first_key = tl.min(key, axis=0)
    last_key = tl.max(tl.where(learns, key, first_key), axis=0)
    base, table = tables_of(p_owners, owners, key, first_key, last_key, BLOCK)
    cut = learns & edge & (low == key) & (high == key)
    fresh = key != before
    begins = learns & (fresh | cut)
    rank = tl.cumsum(begins.to(tl.int32), axis=0) - 1
    first = block * (BLOCK + 1)
    at = first + rank
    tl.store(p_starts + at, (block * BLOCK + lane).to(p_starts.dtype.element_ty), mask=begins)
    long = begins & (later == key)
    tl.store(p_tags + at, table.to(tl.int32) * 4 + long.to(tl.int32) * 2 + fresh.to(tl.int32), mask=begins)
    tl.store(p_rows + at, (key - base).to(p_rows.dtype.element_ty), mask=begins)
    tl.store(p_first_sources + at, source, mask=begins)
    count = tl.sum(begins.to(tl.int32), axis=0)
    if NARROW_D > 0:
        narrow = table_dim(p_tables, table) <= NARROW_D
        narrows = tl.sum((begins & narrow).to(tl.int32), axis=0)
        tl.store(p_counts + block, count + tl.where(narrows == count, 1, tl.where(narrows > 0, 2, 0)) * NARROW_BLOCK)
    else:
        tl.store(p_counts + block, count)
    longs = tl.sum(long.to(tl.int32), axis=0)
    if longs > 0:
        place = tl.atomic_add(p_list_counts, longs) + tl.cumsum(long.to(tl.int32), axis=0) - 1
        tl.store(p_long + place, at.to(p_long.dtype.element_ty), mask=long)

    alike = tl.where(learnt == BLOCK, tl.sum((beyond == last_key).to(tl.int32), axis=0), 0)
    cut_here = (alike > HALF) & (last_half == last_key)
    cut_next = alike > CHUNK + HALF
    end = block * BLOCK + learnt + tl.where(cut_here, 0, tl.where(cut_next, CHUNK, alike))
    tl.store(p_starts + first + count, end.to(p_starts.dtype.element_ty))
    tl.store(p_tags + first + count, tl.where(cut_here | cut_next, 0, 1))

    # a run that is cut at the edge before, too, had its first cut there or earlier
    cut_first = m_edge & (edge_key < absent) & (edge_low == edge_key) & (edge_high == edge_key) & (earlier != edge_key)
    cuts = tl.sum(cut_first.to(tl.int32), axis=0)
    if cuts > 0:
        _, edge_table = tables_of(p_owners, owners, edge_key, first_key, last_key, EDGES)
        place = tl.atomic_add(p_list_counts + 1, cuts) + tl.cumsum(cut_first.to(tl.int32), axis=0) - 1
        number_of_edge = block * EDGES + tl.arange(0, EDGES)
        tl.store(p_cuts + place, number_of_edge.to(p_cuts.dtype.element_ty), mask=cut_first)
        tl.store(p_cut_tables + place, edge_table.to(tl.int32), mask=cut_first)
