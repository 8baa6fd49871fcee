"""What backward leaves behind for the optimizer: the ids, coefficients and upstream gradient of each lookup.

These tensors exist anyway, so keeping them costs no pass over memory. The compiled graph of a model only knows the
number of a ledger; the ledger itself lives here.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plan import ROWS
from .backends import Csr
from .compiling import constant_in_graphs
from .layout import Launch


@dataclass
class Record:
    """One lookup whose backward has run."""

    group: int
    launch: Launch
    csr: Csr
    scale: Tensor
    grad: Tensor  # [B, width], any strides


@dataclass
class Ledger:
    """The records of one collection that wait for `optimizer.step()`.

    Attributes:
        check: called before each training lookup; raises if it cannot be right.
        on_backward: what to do with a record at once (`update="backward"`); None keeps it.
        open: lookups whose backward has not run yet (counted in `update="backward"` only).
        version: changes whenever the records do.
    """

    check: Callable[[], None]
    records: list[Record] = field(default_factory=list)
    on_backward: Callable[[Record], None] | None = None
    open: int = 0
    version: int = 0

    def opened(self) -> None:
        """Counts a lookup whose backward is to come."""
        if self.on_backward is not None:
            self.open += 1

    def add(self, record: Record) -> None:
        """Keeps a record, or applies it at once in `"backward"` mode."""
        if self.on_backward is not None:
            self.open = max(0, self.open - 1)
            self.on_backward(record)
            return
        self.records.append(record)
        self.version += 1

    def clear(self) -> None:
        """Forgets all records."""
        self.open = 0
        if self.records:
            self.records = []
            self.version += 1


@dataclass(eq=False)
class Slot:
    """What an op finds under the number it was given: a ledger, and the launch of one group.

    `names` and `tables` say, for each row of the launch's descriptors, whose feature and which table it is.
    """

    ledger: Ledger
    group: int
    launch: Launch
    names: list[str]
    tables: list[str]

    def bad_id(self, ids: Tensor, offsets: Tensor, bags: int, position: int) -> str:
        """The message for the id at `position` of the launch, which lies outside its table."""
        bag = int(torch.searchsorted(offsets, position, right=True)) - 1
        feature = bag // bags
        rows = int(self.launch.features[feature, ROWS])
        return (
            f"ids of feature {self.names[feature]!r} must lie in [0, {rows}), the rows of table "
            f"{self.tables[feature]!r}: got {int(ids[position])} in bag {bag % bags}, at position "
            f"{position - int(offsets[feature * bags])} of the feature's ids. Clean the ids, enlarge "
            '`vocabulary_size`, or choose out_of_range="drop"'
        )


_numbers = itertools.count(1)
_slots: "weakref.WeakValueDictionary[int, Slot]" = weakref.WeakValueDictionary()


def register(slot: Slot) -> int:
    """A number under which ops find `slot`, as long as somebody holds it."""
    number = next(_numbers)
    _slots[number] = slot
    return number


def find(number: int) -> Slot | None:
    """The slot of that number, if it still lives."""
    return _slots.get(number)


@constant_in_graphs
def call_number() -> int:
    """A number no other call has.

    Two equal lookups in one compiled graph would otherwise be merged into one, and half the gradient lost.
    """
    return next(_numbers)
