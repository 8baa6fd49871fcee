"""How kernels read the descriptors of `plan.py`: columns of its `features` and `tables`, and what makes an id count."""

from .._triton import tl, triton

NARROW_BLOCK = tl.constexpr(1 << 16)
"""Added to the number of segments of a block whose tables are all narrow; more than there are."""

# --- `features`: `feature` is a number or a block of numbers --------------------------------------------------------


@triton.jit
def feature_table(p_features, feature):
    return tl.load(p_features + feature * 12)


@triton.jit
def feature_offset(p_features, feature):
    return tl.load(p_features + feature * 12 + 1)


@triton.jit
def feature_rows(p_features, feature):
    return tl.load(p_features + feature * 12 + 2)


@triton.jit
def feature_dim(p_features, feature):
    return tl.load(p_features + feature * 12 + 3)


@triton.jit
def feature_column(p_features, feature):
    return tl.load(p_features + feature * 12 + 4)


@triton.jit
def feature_row_base(p_features, feature):
    return tl.load(p_features + feature * 12 + 5)


@triton.jit
def feature_moment(p_features, feature):
    return tl.load(p_features + feature * 12 + 6)


@triton.jit
def feature_power(p_features, feature):
    return tl.load(p_features + feature * 12 + 7)


@triton.jit
def feature_flags(p_features, feature):
    return tl.load(p_features + feature * 12 + 8)


@triton.jit
def feature_stride(p_features, feature):
    return tl.load(p_features + feature * 12 + 9)


@triton.jit
def feature_max_norm(p_features, feature):
    return tl.load(p_features + feature * 12 + 10).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def feature_default_id(p_features, feature):
    return tl.load(p_features + feature * 12 + 11)


# --- `tables` -------------------------------------------------------------------------------------------------------


@triton.jit
def table_offset(p_tables, table):
    return tl.load(p_tables + table * 9)


@triton.jit
def table_dim(p_tables, table):
    return tl.load(p_tables + table * 9 + 2)


@triton.jit
def table_row_base(p_tables, table):
    return tl.load(p_tables + table * 9 + 3)


@triton.jit
def table_rule(p_tables, table):
    return tl.load(p_tables + table * 9 + 4)


@triton.jit
def table_slot0(p_tables, table):
    return tl.load(p_tables + table * 9 + 5)


@triton.jit
def table_slot1(p_tables, table):
    return tl.load(p_tables + table * 9 + 6)


@triton.jit
def table_source(p_tables, table):
    return tl.load(p_tables + table * 9 + 7)


@triton.jit
def table_max_norm(p_tables, table):
    return tl.load(p_tables + table * 9 + 8).to(tl.float64, bitcast=True).to(tl.float32)


# --- ids ------------------------------------------------------------------------------------------------------------


@triton.jit
def within(ids, rows):
    """0 <= ids < rows, in one comparison: negative numbers are the largest unsigned ones."""
    return ids.to(tl.uint64, bitcast=True) < rows.to(tl.uint64, bitcast=True)


@triton.jit
def id_counts(ids, weights, rows, flags, inside):
    """Which ids count: those `inside` the batch and their table, of positive weight where the feature asks for it."""
    # not `<= 0`, so that a NaN is dropped
    dropped = ((flags & 2) != 0) & ((weights > 0) == 0)
    return inside & within(ids, rows) & (dropped == 0)


@triton.jit
def id_is_bad(ids, rows, flags, inside):
    """Which ids are out of range: outside their table, except negative ones where the feature drops those."""
    forgiven = ((flags & 1) != 0) & (ids < 0)
    return inside & (within(ids, rows) == 0) & (forgiven == 0)


@triton.jit
def report_bad_bags(p_bad, p_features, p_ids, p_offsets, feature, first_bag, number, COUNT: tl.constexpr, bags):
    """Keeps the first bad position of the batch, and its feature, in `p_bad`; looks at `COUNT` bags from `number` on.

    The word is `(2**40 - 1 - position) << 20 | feature`, so the first position is the largest word, and 0 is none.
    An atomic maximum, which does not depend on the order. Called only where an id is bad, so what it needs is read
    again: to keep it would cost every lookup registers.
    """
    start = tl.load(p_offsets + first_bag + number)
    end = tl.load(p_offsets + first_bag + tl.minimum(number + COUNT, bags))
    rows = feature_rows(p_features, feature)
    flags = feature_flags(p_features, feature)
    position = start + tl.arange(0, 32)
    worst = position * 0
    while start < end:
        inside = position < end
        ids = tl.load(p_ids + position, mask=inside, other=0).to(tl.int64)
        bad = id_is_bad(ids, rows, flags, inside)
        word = ((1099511627775 - position) << 20) | (feature & 1048575)
        worst = tl.maximum(worst, tl.where(bad, word, 0))
        position += 32
        start += 32
    tl.atomic_max(p_bad, tl.max(worst, axis=0))


@triton.jit
def moment_of(weights, moment):
    """`weights ** moment` for moments 0, 1 and 2."""
    return tl.where(moment == 0, 1.0, tl.where(moment == 1, weights, weights * weights))


@triton.jit
def scale_of(total, power):
    """`total ** (-power / 2)`, 0 where `total` is 0; 1 where `power` is 0."""
    safe = tl.where(total == 0, 1.0, total)
    root = tl.where(power == 2, safe, tl.sqrt_rn(tl.where(power == 2, 1.0, safe)))
    inverse = tl.where(total == 0, 0.0, tl.div_rn(safe * 0 + 1, root))
    return tl.where(power == 0, 1.0, inverse)
