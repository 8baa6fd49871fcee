"""Zeros in the rows of a gradient that no id of the batch names, found among the sorted keys.

Where most rows are named this writes a few rows, instead of the whole gradient once more. Bytes: some keys for each
row, most of them from the cache, and the rows that are absent once out.
"""

from .._triton import tl, triton
from .runs import last_not_above_each


@triton.jit(do_not_specialize=["number", "rows"], do_not_specialize_on_alignment=["p_keys"])
def absent_rows_kernel(
    p_keys, p_out, number, rows, dim, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program: `ROWS` rows of `out [rows, dim]`; `number` sorted keys, each the number of a row or more."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = last_not_above_each(p_keys, tl.zeros([ROWS], tl.int64), number - 1, row, 1)
    absent = (row < rows) & (tl.load(p_keys + place) != row)
    if tl.max(absent.to(tl.int32), axis=0) > 0:
        o_row = tl.multiple_of((row * dim)[:, None], [ALIGN, ALIGN])
        for start in range(0, dim, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            mask = absent[:, None] & (column // ALIGN * ALIGN < dim)[None, :]
            tl.store(p_out + o_row + column[None, :], tl.zeros([ROWS, BLOCK_D], p_out.dtype.element_ty), mask=mask)
