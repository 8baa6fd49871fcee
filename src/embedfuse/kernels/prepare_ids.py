"""The ids of a batch, checked once: absent ones become -1, every bag gets one place more, each row its shard.

Bag `k` of all bags owns the places `offsets[k] + k .. offsets[k + 1] + k` of what is written: its own ids in order, and
last its default. Per id this reads 8 to 16 bytes and writes 16 to 28.
"""

from .._triton import tl, triton
from .descriptors import (
    feature_default_id,
    feature_flags,
    feature_rows,
    id_counts,
    id_is_bad,
    within,
)
from .runs import bags_of, last_not_above

SIZES = ["number", "bags", "total_bags", "feature_count", "shards", "stride"]
UNALIGNED = [
    "p_features", "p_ids", "p_offsets", "p_weights", "p_shards", "p_rows", "p_starts", "p_new_offsets",
    "p_new_weights", "p_places", "p_bad",
]  # fmt: skip


@triton.jit
def located(p_shards, shards, stride, ids, valid, SHARDED: tl.constexpr, MODULO: tl.constexpr, BLOCK: tl.constexpr):
    """Which of the `valid` ids have a row in their shard, its number among the rows of all shards, where it starts."""
    row = ids
    start = ids
    if SHARDED:
        # an id outside the table must not lead astray
        safe = tl.where(valid, ids, 0)
        if MODULO:
            local = safe // shards
            shard = safe - local * shards
        else:
            shard = tl.full([BLOCK], -1, tl.int64)
            number = shards * 0
            while number < shards:
                # an empty shard starts where the next one does, which is then the later one
                shard += (safe >= tl.load(p_shards + number * 3)).to(tl.int64)
                number += 1
            local = safe - tl.load(p_shards + shard * 3)
        valid = valid & (local < tl.load(p_shards + shard * 3 + 1))
        row = tl.load(p_shards + shard * 3) + local
        start = tl.load(p_shards + shard * 3 + 2) + local * stride
    return valid, tl.where(valid, row, -1), tl.where(valid, start, -1)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=UNALIGNED)
def prepare_ids_kernel(
    p_features, p_ids, p_offsets, p_weights, p_shards, p_rows, p_starts, p_new_offsets, p_new_weights, p_places,
    p_bad, number, bags, total_bags, feature_count, shards, stride,
    HAS_WEIGHTS: tl.constexpr, SHARDED: tl.constexpr, MODULO: tl.constexpr, CHECK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK` ids, or, when those are done, `BLOCK` bags: where they start, and their defaults."""
    lane = tl.arange(0, BLOCK)
    programs = (number + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    weights = tl.full([BLOCK], 1.0, tl.float32)
    if program < programs:
        position = program * BLOCK + lane
        inside = position < number
        ids = tl.load(p_ids + position, mask=inside, other=0).to(tl.int64)
        first_bag, last_bag = last_not_above(
            p_offsets, total_bags, program * BLOCK, tl.minimum(program * BLOCK + BLOCK, number) - 1, 1, 128
        )
        bag = bags_of(p_offsets, position, inside, first_bag, last_bag)
        feature = bag // bags % feature_count
        rows = feature_rows(p_features, feature)
        flags = feature_flags(p_features, feature)
        place = position + bag
        tl.store(p_places + position, place, mask=inside)
        if HAS_WEIGHTS:
            weights = tl.load(p_weights + position, mask=inside, other=0.0)
            tl.store(p_new_weights + place, weights, mask=inside)
        known = inside & within(ids, rows)
        has_row, row, start = located(p_shards, shards, stride, ids, known, SHARDED, MODULO, BLOCK)
        if CHECK:
            bad = id_is_bad(ids, rows, flags, inside) | (known & (has_row == 0))
            word = tl.max(tl.where(bad, ((1099511627775 - position) << 20) | (feature & 1048575), 0), axis=0)
            # as in `report_bad_bags`
            if word > 0:
                tl.atomic_max(p_bad, word)
        counts = id_counts(ids, weights, rows, flags, has_row)
        tl.store(p_rows + place, tl.where(counts, row, -1), mask=inside)
        if SHARDED:
            tl.store(p_starts + place, tl.where(counts, start, -1), mask=inside)
    else:
        bag = (program - programs) * BLOCK + lane
        exists = bag < total_bags
        begin = tl.load(p_offsets + bag, mask=bag <= total_bags, other=0)
        end = tl.load(p_offsets + bag + 1, mask=exists, other=0)
        tl.store(p_new_offsets + bag, begin + bag, mask=bag <= total_bags)
        feature = tl.where(exists, bag, 0) // bags % feature_count
        rows = feature_rows(p_features, feature)
        flags = feature_flags(p_features, feature)
        default = feature_default_id(p_features, feature)
        # nearly always the first id settles it
        empty = exists & (default >= 0)
        position = begin
        left = tl.max((empty & (position < end)).to(tl.int32), axis=0)
        while left > 0:
            looks = empty & (position < end)
            ids = tl.load(p_ids + position, mask=looks, other=0).to(tl.int64)
            if HAS_WEIGHTS:
                weights = tl.load(p_weights + position, mask=looks, other=0.0)
            counts = id_counts(ids, weights, rows, flags, looks)
            if SHARDED:
                counts, row, start = located(p_shards, shards, stride, ids, counts, SHARDED, MODULO, BLOCK)
            empty = empty & (counts == 0)
            position += 1
            left = tl.max((empty & (position < end)).to(tl.int32), axis=0)
        place = end + bag
        has_row, row, start = located(p_shards, shards, stride, default, empty, SHARDED, MODULO, BLOCK)
        tl.store(p_rows + place, row, mask=exists)
        if HAS_WEIGHTS:
            tl.store(p_new_weights + place, tl.where(has_row, 1.0, 0.0), mask=exists)
        if SHARDED:
            tl.store(p_starts + place, start, mask=exists)
