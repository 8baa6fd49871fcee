"""An optimizer step like the ones before, of which the host asks as little as can be; see `usual_lookup.py`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .backends import Update, chosen, select
from .learning_rates import rates_of_tables
from .ledger import Ledger, Record
from .state import GroupState, ordinary_tensors

Waiting = list[tuple[GroupState, Record, Ledger]]
"""Lookups that wait for a step: the state of their tables, and the ledger that has them."""
Change = tuple[list[float], list[float], np.ndarray]
"""Learning rates, those of the tables, and the numbers of their optimizers that go with them."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class UsualStep:
    """What steps of one group of tables have in common, each with the gradient of one lookup.

    Attributes:
        state: of the group.
        groups: for each table the number of its learning rate.
        rates: the optimizer's learning rates.
        of_tables: those of the tables, in a list that the state has as long as they are so.
        learns: for each table, whether it does.
        backend: that was chosen.
        changes: of the tables, so far.
        update: what is repeated; None once the tables have moved.
        repeat: the backend's `row_update_again`.
    """

    state: GroupState
    groups: Sequence[int]
    rates: list[float]
    of_tables: list[float]
    learns: tuple[bool, ...]
    backend: str
    changes: int
    update: Update | None
    repeat: Callable[..., bool]

    @classmethod
    def of(cls, state: GroupState, record: Record, rates: list[float], groups: Sequence[int]) -> "UsualStep | None":
        """After such a step; None where a backend's own time is what counts, or tables step in several ways."""
        update, buffer = state.latest, state.arena.buffer
        repeat = getattr(select(buffer.device, buffer.dtype), "row_update_again", None)
        if update is None or repeat is None or state.by_mode(record.learns).keys() != {"rows"}:
            return None
        changes = state.arena._tables._changes
        made = cls(state, groups, rates, state.learning_rates, record.learns, chosen(), changes, update, repeat)
        state.arena.followers.add(made)
        return made

    def forget(self) -> None:
        """Drops what holds memory of tables that have moved."""
        self.update = None

    def fits(self, record: Record) -> bool:
        """Whether all but the learning rates is as before: a look, which changes nothing."""
        state, update = self.state, self.update
        arena = state.arena
        return (
            update is not None and update.table is arena.buffer and update.features is record.launch.features
            and record.learns == self.learns and record.factor is None and arena._tables._changes == self.changes
            and chosen() == self.backend and arena.state() != 0
        )  # fmt: skip

    def change_of(self, rates: list[float]) -> Change | None:
        """What must be written for these learning rates; None if they are as before.

        Raises:
            ValueError: a learning rate that cannot be.
        """
        state = self.state
        if state.learning_rates is self.of_tables and rates == self.rates:
            return None
        of_tables = rates_of_tables(rates, self.groups)
        rows = state.hyper_of(of_tables)
        if rows is None:
            # those of other tables changed
            self.rates, self.of_tables = rates, state.learning_rates
            return None
        return rates, of_tables, rows

    def again(self, record: Record, change: Change | None) -> bool:
        """Steps, and says so; False if the batch's launches differ. It must fit, and `change` be of now."""
        state, update = self.state, self.update
        assert update is not None
        if change is not None:
            self.rates, of_tables, rows = change
            with ordinary_tensors():
                state.set_hyper(of_tables, rows)
            self.of_tables = state.learning_rates
        if not self.repeat(update, record.csr, record.scale, record.grad):
            return False
        state.arena.written()
        return True


def usual_steps(
    known: Mapping[GroupState, UsualStep | None], waiting: Waiting, states: Collection[GroupState]
) -> Sequence[UsualStep] | None:
    """Those of all that waits, if each fits and no other table has moved, which could be refused; else None."""
    found = []
    if len(states) > len(waiting) and not all(state.arena.state() for state in states):
        return None
    for state, record, _ in waiting:
        one = known.get(state)
        if one is None or not one.fits(record):
            return None
        found.append(one)
    return found or None


def step_again(usual: Sequence[UsualStep], waiting: Waiting, rates: list[float]) -> Waiting:
    """Makes the steps that are as before, and takes them out of their ledgers; returns the others.

    Raises:
        ValueError: a learning rate that cannot be; nothing is changed.
    """
    changes = [one.change_of(rates) for one in usual]
    left: Waiting = []
    for one, change, entry in zip(usual, changes, waiting, strict=True):
        _, record, ledger = entry
        if one.again(record, change):
            ledger.records.remove(record)
        else:
            left.append(entry)
    return left
