"""The offsets of each feature, one behind the other → those of all features.

    out[f * B + b] = Σ_{g < f} offsets[g, B] + offsets[f, b]

Each program adds up the ends of the features before its own, a few hundred numbers at most, instead of waiting for a
scan. Bytes: 16 for each bag.
"""

from .._triton import tl, triton


@triton.jit(do_not_specialize=["features", "bags"], do_not_specialize_on_alignment=["p_offsets", "p_out"])
def join_offsets_kernel(p_offsets, p_out, features, bags, BAGS: tl.constexpr, AHEAD: tl.constexpr):
    """One program: `BAGS` bags of one feature; the ends of features are read `AHEAD` at a time."""
    groups = (bags + BAGS - 1) // BAGS
    program = tl.program_id(0)
    feature = program // groups
    lane = (program - feature * groups) * BAGS + tl.arange(0, BAGS)
    stride = (bags + 1).to(tl.int64)
    ahead = tl.arange(0, AHEAD)
    ends = tl.zeros([AHEAD], tl.int64)
    first = feature * 0
    while first < feature:
        at = first + ahead
        ends += tl.load(p_offsets + at * stride + bags, mask=at < feature, other=0)
        first += AHEAD
    start = tl.sum(ends, axis=0)
    own = p_offsets + feature * stride
    offset = start + tl.load(own + lane, mask=lane < bags, other=0)
    tl.store(p_out + feature.to(tl.int64) * bags + lane, offset, mask=lane < bags)
    # the last of all is the number of ids
    writes = lane < tl.where(program == (features - 1) * groups, 1, 0)
    end = start + tl.load(own + bags + lane * 0, mask=writes, other=0)
    tl.store(p_out + features.to(tl.int64) * bags + lane * 0, end, mask=writes)
