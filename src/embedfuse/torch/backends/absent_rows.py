"""Zeros in a gradient where no id of the batch names a row: over all of it before, or in those rows only, afterwards.

In one pass less over a gradient of which most is written anyway: that of a memory layer's table.
"""

import torch
from torch import Tensor

from ...kernels.absent_rows import absent_rows_kernel
from ...kernels.configs import ceil_div, power_of_two
from .descriptor_facts import TableFacts, rows_align
from .issuing import Issuer
from .launching import launcher
from .sorted_runs import Given, SortedRuns, key_type

NAMED = 0.5
"""Ids for each row from which on looking for the others pays; uniform ones then name four rows in ten."""
WIDE = 512
"""Bytes of a row from which on."""
ROWS = 32
"""Rows to a program."""


def zeros_come_later(out: Tensor, facts: TableFacts, number: int) -> bool:
    """Whether `fill_absent` is to be called for a batch of `number` ids; else writes zeros to all of `out`."""
    whole = facts.owners.shape[0] == 1 and facts.rows * facts.widest == out.shape[0]
    if whole and number > NAMED * facts.rows and facts.widest * out.element_size() >= WIDE:
        return True
    out.zero_()
    return False


def fill_absent(runs: SortedRuns, given: Given, out: torch.dtype, facts: TableFacts, to: Issuer) -> None:
    """Writes zeros to the rows of the one table that no id names; `out` is the type of the gradient."""
    dim = facts.widest
    kernel = launcher(
        absent_rows_kernel, 1,
        {"ALIGN": rows_align(facts.dims, out), "ROWS": ROWS, "BLOCK_D": min(power_of_two(dim), 2048 // ROWS)},
        (key_type(facts), out),
    )  # fmt: skip
    to(kernel, (ceil_div(facts.rows, ROWS),), (runs.keys, given.out), (given.number, given.rows, dim))
