"""Rows cut to a length: `row = c * e`, `c = m / ||e||` where the stored row `e` is longer than `m`, else 1.

The gradient with respect to `e` is `c * (g - e * <e, g> / ||e||²)` for a row that was cut, else `g`. Kernels that know
of no such row leave all of this out (CLIPPED).
"""

from .._triton import tl, triton


@triton.jit
def cut_factor(square, longest):
    """`c`, from `||e||²`. A row without a length (NaN) is left as it is."""
    length = tl.sqrt_rn(square)
    cut = length > longest
    return tl.where(cut, tl.div_rn(longest + length * 0, tl.where(cut, length, 1.0)), 1.0)


@triton.jit
def cut_gradient(g, e, longest):
    """The gradient of whole rows `e`, from that of the rows as they were used; both `[R, BLOCK_D]`, 0 in padding."""
    square = tl.sum(e * e, axis=1)[:, None]
    factor = cut_factor(square, longest)
    cut = tl.sqrt_rn(square) > longest
    along = tl.div_rn(tl.sum(e * g, axis=1)[:, None], tl.where(cut, square, 1.0))
    return tl.where(cut, factor * (g - e * along), g)
