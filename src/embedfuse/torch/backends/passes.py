"""What sorts and sums a batch by row: made for the first batch of a kind, found again for all others."""

from typing import Any, NamedTuple

from torch import Tensor

from ...kernels.configs import UpdateConfig
from ...plan import FROZEN
from . import Csr, Update
from .absent_rows import fill_absent
from .descriptor_facts import TableFacts, known_columns
from .issuing import Issuer
from .program import Program
from .programs import ask_aligned, ask_contiguous, issued
from .sorted_runs import INT32, Given, Order, Sorter, last_element
from .summed_runs import STORE_SUMS, Summer, Sums, Target

MOST = 1024
"""Entries that are kept for a group of tables: a transposed gradient has a stride for each size of a batch."""


class Batch(NamedTuple):
    """All tensors that a sum by row reads and writes, and the number of bags."""

    ids: Any
    offsets: Any
    weights: Any
    bags: Any
    scale: Any
    grad: Any
    winners: Any  # of max pooling: positions in the ids; only elements won by an id are of its gradient
    dots: Any  # gets the dot of each id's row, read from `source`, with its gradient row; see `Backend.row_grad`
    features: Any  # descriptors, as `tables`
    tables: Any
    out: Any
    source: Any = None
    slots: Any = None
    hyper: Any = None
    steps: Any = None
    counted: Any = None
    grad_scale: Any = None
    skip: Any = None

    @classmethod
    def of(
        cls, target: Target, features: Tensor, tables: Tensor, csr: Csr, scale: Tensor, grad: Tensor,
        winners: Tensor | None, dots: Tensor | None,
    ) -> "Batch":  # fmt: skip
        """Of what becomes of the sums, and of a batch."""
        if target.update is not None:
            return cls(*stepping(target.update, csr, scale, grad))
        return cls(*csr, scale, grad, winners, dots, features, tables, target.out, target.source)


def stepping(update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> tuple[Any, ...]:
    """The `Batch` of an optimizer step; without names, which take the host longer to give than to read them here."""
    return (
        *csr, scale, grad, None, None, update.features, update.tables, update.table, None, update.slots,
        update.hyper, update.steps, update.counted, update.grad_scale, update.skip,
    )  # fmt: skip


class Passes:
    """Sorts and sums batches of one kind.

    Args:
        sorter: the first half.
        summer: the second half.
        columns: the largest alignment of any features' columns.
        fills: whether rows of the gradient that no id names get zeros in between.
    """

    def __init__(self, sorter: Sorter, summer: Summer, columns: int, fills: bool) -> None:
        self.sorter, self.summer, self._columns, self._fills = sorter, summer, columns, fills
        self.programs: list[Program] = []

    def __call__(self, batch: Batch) -> Program | None:
        """Launches all for one batch, on the current device; returns the program that does it next time."""
        return issued(self.programs, batch, batch.grad, self._issue, self._ask)

    def _issue(self, batch: Batch, to: Issuer) -> None:
        facts, pointer = self.sorter.facts, to.pointer
        row, column = batch.grad.stride()
        given = Given(
            batch.ids.shape[0], batch.bags, batch.offsets.shape[0] + -1, row, column, batch.features.shape[0],
            batch.tables.shape[0], facts.owners.shape[0], facts.rows, pointer(batch.features), pointer(batch.tables),
            to.constant(facts.owners), *map(pointer, (
                batch.ids, batch.offsets, batch.weights, batch.scale, batch.grad, batch.winners, batch.dots, batch.out,
                batch.source, batch.slots, batch.hyper, batch.steps, batch.counted, batch.grad_scale, batch.skip,
            )),
        )  # fmt: skip
        runs = self.sorter(given, to)
        if self._fills:
            fill_absent(runs, given, self.summer.sums.out, facts, to)
        self.summer(runs, given, to)

    def _ask(self, batch: Batch) -> None:
        """Asks a traced batch for all that makes its kind, beside types."""
        ask_contiguous(batch.ids, batch.offsets, batch.weights, batch.scale)
        number, (rows, columns), (row, column) = batch.ids.shape[0], batch.grad.shape, batch.grad.stride()
        bool(number > 0), bool(batch.bags > 0), bool(number > INT32 // 2)
        bool(batch.scale.shape[0] == 0), bool(last_element(rows, columns, row, column) > INT32)
        ask_aligned(batch.grad, self._columns, self.summer.sums.grad.itemsize)


def passes_of(
    target: Target, facts: TableFacts, config: UpdateConfig, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor,
    winners: Tensor | None, dots: Tensor | None,
) -> Passes:  # fmt: skip
    """What a batch needs, whose `source` is there only if it is read.

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
    aligned, ids = known_columns(features, facts, config.block_d // config.narrow), csr.ids
    kind = (
        # what is found keeps `config`, and with it its id
        id(config), target.mode, target.out.dtype, target.starts, None if source is None else source.dtype,
        target.sources, target.fill, step, ids.dtype, ids.shape[0] > INT32 // 2, csr.weights is None,
        scale.shape[0] == 0, grad.dtype, row, column, last_element(rows, columns, row, column) > INT32,
        *aligned.items(), winners is None, dots is None,
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
            longest = max(wide for _, wide in aligned.values())
            found = facts.passes[key] = Passes(sorter, Summer(sums, sorter, facts, config), longest, target.fill)
        facts.passes[kind] = found
    return found
