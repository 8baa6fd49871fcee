"""Zeros for the rows of a gradient that no id of the batch names, in place of zeros for all rows.

A memory layer names most of its rows in every step: writing zeros first would be a second pass over the whole gradient.
Bytes: one for each row, twice; and the rows that nobody named, once.
"""

from .._triton import tl, triton


@triton.jit(do_not_specialize=["number", "rows"], do_not_specialize_on_alignment=["p_ids", "p_touched"])
def touch_kernel(p_ids, p_touched, number, rows, BLOCK: tl.constexpr):
    """One program: `BLOCK` ids; `p_touched`, int8 `[rows]` and zeros on entry, gets 1 for each row that an id names."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < number
    ids = tl.load(p_ids + at, mask=inside, other=0).to(tl.int64)
    tl.store(p_touched + ids, (ids * 0 + 1).to(tl.int8), mask=inside & (ids >= 0) & (ids < rows))


@triton.jit(do_not_specialize=["rows", "dim"], do_not_specialize_on_alignment=["p_touched"])
def clear_kernel(p_touched, p_out, rows, dim, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program: `ROWS` rows of `[rows, dim]`, whose columns are a multiple of `ALIGN`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    clear = inside & (tl.load(p_touched + row, mask=inside, other=1) == 0)
    o_row = tl.multiple_of((row * dim)[:, None], [ALIGN, ALIGN])
    first = 0
    while first < dim:
        column = first + tl.arange(0, BLOCK_D)
        mask = clear[:, None] & (column // ALIGN * ALIGN < dim)[None, :]
        zeros = tl.zeros([ROWS, BLOCK_D], p_out.dtype.element_ty)
        tl.store(p_out + o_row + column[None, :], zeros, mask=mask)
        first += BLOCK_D
