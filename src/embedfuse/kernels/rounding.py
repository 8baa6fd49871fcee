"""Stochastic rounding to 16 bits: `torch/backends/rounding.py` says how, and gives the same bits."""

# Triton code bears no annotations
# mypy: allow-untyped-defs, allow-untyped-decorators

from .._triton import tl, triton


@triton.jit
def rounded_at_random(w, element, seed, step, LOST: tl.constexpr):
    """`w` with its last LOST bits rounded up or down at random; as it is where `seed` is 0 or `w` is not finite.

    `element` is the place of each number in its table, int64 like `seed` and `step`.
    """
    x = element.to(tl.uint64) + seed.to(tl.uint64) * 0x9E3779B97F4A7C15 + step.to(tl.uint64) * 0xD1B54A32D192ED03
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    bits = w.to(tl.uint32, bitcast=True)
    raised = bits + (x.to(tl.uint32) & ((1 << LOST) - 1))
    cut = (raised >> LOST) << LOST
    finite = (bits & 0x7F800000) != 0x7F800000
    chosen = tl.where(finite & (seed != 0), cut, bits)
    return chosen.to(tl.float32, bitcast=True)
