"""What sorts and sums a batch by row: made for the first batch of a kind, found again for all others."""

from typing import Any

from torch import Tensor

from ...kernels.configs import UpdateConfig
from ...plan import FROZEN
from . import Csr
from .descriptor_facts import TableFacts, known_columns
from .sorted_runs import INT32, Order, Sorter
from .summed_runs import STORE_SUMS, Summer, Sums, Target

MOST = 1024
"""Entries that are kept for a group of tables: a transposed gradient has a stride for each size of a batch."""


def passes_of(
    target: Target, facts: TableFacts, config: UpdateConfig, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor,
    winners: Tensor | None, dots: Tensor | None,
) -> tuple[Sorter, Summer]:  # fmt: skip
    """The two halves of a sum by row; arguments as theirs, on the current device.

    Their kernels depend on `Order` and `Sums`; what these depend on is asked first, since that is quicker.
    """
    (rows, columns), (row, column) = grad.shape, grad.stride()
    update, source = target.update, target.source
    step: Any = None
    if update is not None:
        grad_scale, skip = update.grad_scale, update.skip
        step = (
            *update.rules, update.at_random, update.counted is None, None if grad_scale is None else grad_scale.dtype,
            None if skip is None else skip.dtype,
        )  # fmt: skip
    aligned, ids = known_columns(features), csr.ids
    kind = (
        # what is found keeps `config`, and with it its id
        id(config), target.mode, target.out.dtype, target.starts, None if source is None else source.dtype,
        target.sources, step, ids.dtype, ids.shape[0] > INT32 // 2, csr.weights is None, scale.shape[0] == 0,
        grad.dtype, row, column, (rows - 1) * row + (columns - 1) * column > INT32, aligned, winners is None,
        dots is None,
    )  # fmt: skip
    found: tuple[Sorter, Summer] | None = facts.passes.get(kind)
    if found is None:
        chosen = winners is not None
        order = Order.of(
            csr, scale, grad, chosen or dots is not None, target.mode != STORE_SUMS and FROZEN in facts.rules, update
        )
        sums = Sums.of(target, grad, aligned, chosen, dots is not None, facts.clipped)
        if len(facts.passes) >= MOST:
            facts.passes.clear()
        found = facts.passes.get((order, sums, id(config)))
        if found is None:
            sorter = Sorter(order, facts, config)
            found = facts.passes[order, sums, id(config)] = sorter, Summer(sums, sorter, facts, config)
        facts.passes[kind] = found
    return found
