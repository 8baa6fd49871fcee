"""What sorts and sums a batch by row: made for the first batch of a kind, found again for all others."""

from typing import Any

import torch
from torch import Tensor

from ...kernels.configs import UpdateConfig
from ...plan import FROZEN
from . import Csr
from .absent_rows import fill_absent
from .descriptor_facts import TableFacts, known_columns
from .issuing import Issuer, Now
from .launching import HOST, device_of, unwatched
from .program import Program, write_down
from .sorted_runs import INT32, Given, Order, Sorter
from .summed_runs import STEP_ROWS, STORE_SUMS, Summer, Sums, Target

MOST = 1024
"""Entries that are kept for a group of tables: a transposed gradient has a stride for each size of a batch."""
PROGRAMS = 64
"""The most programs of a kind: numbers of ids have a dozen limits on whose sides launches differ."""


class Passes:
    """Sorts and sums batches of one kind.

    Args:
        sorter: the first half.
        summer: the second half.
        facts: of the tables.
        filled: the type of the gradient whose other rows get zeros in between, if any do.
    """

    def __init__(self, sorter: Sorter, summer: Summer, facts: TableFacts, filled: torch.dtype | None) -> None:
        self.sorter, self.summer, self._facts, self._filled = sorter, summer, facts, filled
        self._programs: list[Program] = []

    def __call__(self, given: Given, on: Tensor) -> None:
        """Launches all for one batch, on the device of a tensor, which is the current one."""
        index, _ = device_of(on)
        if index == HOST or not unwatched():
            self._issue(given, Now(on))
            return
        left_to_python = False
        for program in self._programs:
            done = program(given, on.device, index)
            if done:
                return
            left_to_python |= done is None
        self._issue(given, Now(on))
        if not left_to_python:
            written = write_down(given, index, self._issue)
            if written is not None:
                if len(self._programs) >= PROGRAMS:
                    self._programs.clear()
                self._programs.append(written)

    def _issue(self, given: Given, to: Issuer) -> None:
        runs = self.sorter(given, to)
        if self._filled is not None:
            fill_absent(runs, given, self._filled, self._facts, to)
        self.summer(runs, given, to)


def passes_of(
    target: Target, facts: TableFacts, config: UpdateConfig, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor,
    winners: Tensor | None, dots: Tensor | None,
) -> Passes:  # fmt: skip
    """What a batch needs; arguments as in `given_of`.

    Its kernels depend on `Order` and `Sums`; what these depend on is asked first, since that is quicker.
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
        target.sources, target.fill, step, ids.dtype, ids.shape[0] > INT32 // 2, csr.weights is None,
        scale.shape[0] == 0, grad.dtype, row, column, (rows - 1) * row + (columns - 1) * column > INT32, aligned,
        winners is None, dots is None,
    )  # fmt: skip
    found: Passes | None = facts.passes.get(kind)
    if found is None:
        chosen = winners is not None
        order = Order.of(
            csr, scale, grad, chosen or dots is not None, target.mode != STORE_SUMS and FROZEN in facts.rules, update
        )
        sums = Sums.of(target, grad, aligned, chosen, dots is not None, facts.clipped)
        if len(facts.passes) >= MOST:
            facts.passes.clear()
        key = order, sums, id(config), target.fill
        found = facts.passes.get(key)
        if found is None:
            sorter = Sorter(order, facts, config)
            filled = target.out.dtype if target.fill else None
            found = facts.passes[key] = Passes(sorter, Summer(sums, sorter, facts, config), facts, filled)
        facts.passes[kind] = found
    return found


def given_of(
    target: Target, facts: TableFacts, features: Tensor, tables: Tensor, csr: Csr, scale: Tensor, grad: Tensor,
    winners: Tensor | None, dots: Tensor | None,
) -> Given:  # fmt: skip
    """What the launches of a batch are given.

    Args:
        target: what becomes of the sums.
        facts: of the tables.
        features: descriptors, as `tables`.
        tables: see there.
        csr: the ids.
        scale: of each bag; empty for all ones.
        grad: where the gradient rows lie.
        winners: of max pooling: positions in the ids; only elements won by an id are of its gradient.
        dots: gets the dot of each id's row, read from `target.source`, with its gradient row; see `Backend.row_grad`.
    """
    _, pointer = device_of(grad)
    (ids, offsets, weights, bags), update, owners = csr, target.update, facts.owners
    slots = hyper = steps = counted = grad_scale = skip = None
    if update is not None and target.mode == STEP_ROWS:
        slots, hyper, steps = pointer(update.slots), pointer(update.hyper), pointer(update.steps)
        counted = None if update.counted is None else pointer(update.counted)
        grad_scale = None if update.grad_scale is None else pointer(update.grad_scale)
        skip = None if update.skip is None else pointer(update.skip)
    reads = target.source is not None and (facts.clipped or dots is not None)
    row, column = grad.stride()
    return Given(
        ids.shape[0], bags, offsets.shape[0] - 1, row, column, features.shape[0], tables.shape[0], owners.shape[0],
        facts.rows, pointer(features), pointer(tables), pointer(owners), pointer(ids), pointer(offsets),
        None if weights is None else pointer(weights), pointer(scale), pointer(grad),
        None if winners is None else pointer(winners), None if dots is None else pointer(dots), pointer(target.out),
        pointer(target.source) if reads and target.source is not None else None, slots, hyper, steps, counted,
        grad_scale, skip,
    )  # fmt: skip
