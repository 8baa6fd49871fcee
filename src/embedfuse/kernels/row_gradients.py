"""Gradient rows of the ids of a segment, and their dots with the row: what short and long segments are summed from."""

from .._triton import tl, triton
from .descriptors import table_max_norm
from .max_norm import cut_factor


@triton.jit
def as_looked_up(p_tables, table, w, HAS_DOTS: tl.constexpr, CLIPPED: tl.constexpr):
    """Rows as they take part in dots: cut to MAX_NORM. Without dots nothing of use."""
    looked_up = w
    if HAS_DOTS and CLIPPED:
        looked_up = w * cut_factor(tl.sum(w * w, axis=1), table_max_norm(p_tables, table))[:, None]
    return looked_up


@triton.jit
def load_gradients(
    p_grad, p_winners, p_order, p_dots, looked_up, j, source, coefficient, inside, column, m_column, grad_column,
    HAS_COEFFICIENTS: tl.constexpr, HAS_WINNERS: tl.constexpr, HAS_DOTS: tl.constexpr, GRAD_ALIGN: tl.constexpr,
):  # fmt: skip
    """Gradient rows that start at `source`, times their coefficients; `j` numbers their ids in sorted order.

    Before that, their dots with rows that are `looked_up` go where the ids were in the batch.
    """
    o_grad = tl.multiple_of(source.to(tl.int64)[:, None], [GRAD_ALIGN, GRAD_ALIGN]) + column[None, :] * grad_column
    mask = inside[:, None] & m_column[None, :]
    if HAS_WINNERS or HAS_DOTS:
        # asked for before the gradients, so that it is there when they are
        order = tl.load(p_order + j, mask=inside, other=0)
    if HAS_WINNERS:
        mask = mask & (tl.load(p_winners + o_grad, mask=mask, other=-1) == order[:, None])
    value = tl.load(p_grad + o_grad, mask=mask, other=0.0).to(tl.float32)
    if HAS_DOTS:
        tl.store(p_dots + order, tl.sum(value * looked_up, axis=1), mask=inside)
    if HAS_COEFFICIENTS:
        value = value * coefficient[:, None]
    return value


@triton.jit
def load_coefficients(p_coefficients, j, inside, HAS_COEFFICIENTS: tl.constexpr):
    """The coefficients of ids; without any nothing of use."""
    if HAS_COEFFICIENTS:
        coefficient = tl.load(p_coefficients + j, mask=inside, other=0.0)
    else:
        coefficient = tl.zeros_like(j).to(tl.float32)
    return coefficient


@triton.jit
def load_sources(p_sources, p_coefficients, j, inside, HAS_COEFFICIENTS: tl.constexpr):
    """Where the gradient rows of ids start, and their coefficients."""
    source = tl.load(p_sources + j, mask=inside, other=0)
    return source, load_coefficients(p_coefficients, j, inside, HAS_COEFFICIENTS)
