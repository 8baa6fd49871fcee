"""What backward leaves behind for the optimizer: the ids, coefficients and upstream gradient of each lookup.

These tensors exist anyway, so keeping them costs no pass over memory. The compiled graph of a model only knows the
number of a ledger; the ledger itself lives here.
"""

import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan import ROWS
from .backends import Csr
from .compiling import constant_in_graphs
from .layout import Launch, unfolded
from .state import ordinary_tensors
from .tables import Arena

_CAN_BE_MANY = torch.distributed.is_available()
MOST_UNUSED = 1000
"""Records that may wait although no optimizer exists to use them."""


@dataclass(eq=False)
class Record:
    """One lookup whose backward has run."""

    group: int
    launch: Launch
    csr: Csr
    scale: Tensor
    grad: Tensor  # [B, width], any strides; not a copy, so it must stay as it is until the step
    owned: bool = False  # whether nobody else can write any of these tensors
    learns: tuple[bool, ...] = ()  # for each table of the group, whether it was to learn when backward ran
    versions: tuple[int, ...] = ()  # of what the caller might write, at that time
    factor: Tensor | None = None  # scalar the gradient is multiplied by, if it was clipped or unscaled

    def check(self) -> None:
        """Raises RuntimeError if the gradient, or the batch, was written since backward."""
        if self.owned or self.versions == self._versions():
            return
        if self.versions[0] != self.grad._version:
            raise RuntimeError(
                "the gradient that backward gave to a lookup was changed in place before `step()`, which still reads "
                "it: give backward a copy, out.backward(gradient.clone()), or change the gradient after the step"
            )
        raise RuntimeError(
            "ids, offsets or weights of a lookup were changed in place before `step()`, which still reads them: look "
            "up copies of them, or step before the next batch is written to their place"
        )

    def watch(self) -> None:
        """From now on, `check` is to find out about changes."""
        self.versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        (ids, offsets, weights, _), grad = self.csr, self.grad
        return grad._version, ids._version, offsets._version, 0 if weights is None else weights._version


@dataclass
class Ledger:
    """The records of one collection that wait for `optimizer.step()`. Lives as long as the collection.

    Attributes:
        update: what the collection's is now.
        learns: for each table of a group, whether it is to learn now.
        on_backward: what to do with a record at once (`update="backward"`); None keeps it.
        optimizer: whoever will use the records.
        waiting: groups looked up since any backward (counted in `update="backward"` only).
        current: groups looked up since their rows changed last (the same).
    """

    update: Callable[[], str]
    learns: Callable[[int], tuple[bool, ...]]
    records: list[Record] = field(default_factory=list)
    on_backward: Callable[[Record], None] | None = None
    optimizer: Callable[[], object] = lambda: None
    waiting: set[int] = field(default_factory=set)
    current: set[int] = field(default_factory=set)
    warned: bool = False

    def check(self, group: int = 0) -> None:
        """Before each training lookup of a group: raises RuntimeError if it cannot be right."""
        update = self.update()
        if _CAN_BE_MANY and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise RuntimeError(
                f"update={update!r} changes the tables of this process only, and "
                f"{torch.distributed.get_world_size()} processes hold copies of them, which would drift apart: use "
                'update="autograd" with DistributedDataParallel and a torch optimizer'
            )
        if update == "backward":
            if self.on_backward is None:
                raise RuntimeError(
                    'update="backward" needs its optimizer before the first training lookup: create '
                    "FusedOptimizer(collection)"
                )
            if group in self.waiting:
                raise RuntimeError(
                    'update="backward" cannot be right here: the tables were looked up again before backward of the '
                    'last lookup ran, so their rows would be updated twice. Use update="step"; evaluate under '
                    "torch.no_grad(); or call `discard()` if that backward will never run"
                )

    def opened(self, group: int = 0) -> None:
        """Counts a lookup whose backward is to come."""
        if self.on_backward is not None:
            self.waiting.add(group)
            self.current.add(group)

    def closed(self, *groups: int) -> None:
        """Takes back that backwards are to come: of lookups whose result is lost, or whose graph is freed."""
        self.waiting.difference_update(groups)

    def add(self, record: Record) -> None:
        """Keeps a record, or applies it at once in `"backward"` mode."""
        record.learns = self.learns(record.group)
        if self.on_backward is not None:
            if record.group not in self.current:
                raise RuntimeError(
                    'update="backward" cannot be right here: the rows of this lookup were changed by another backward '
                    'since, or it was discarded. Run one backward for each lookup, or use update="step"'
                )
            self.current.discard(record.group)
            # what else was looked up with it may be no part of the loss
            self.waiting.clear()
            self.on_backward(record)
            return
        if self.optimizer() is None:
            self._complain()
        if not record.owned:
            _own(record)
        self.records.append(record)

    def _complain(self) -> None:
        if len(self.records) >= MOST_UNUSED:
            raise RuntimeError(
                f"gradients of {len(self.records)} lookups wait for an optimizer, and there is none: create "
                'FusedOptimizer(collection) and call its step(), choose update="autograd" for a torch optimizer, or '
                "call collection.discard()"
            )
        if not self.warned:
            self.warned = True
            warnings.warn(
                'a collection with update="step" got a gradient, and has no optimizer: its tables are no parameters '
                "for a torch optimizer, they get no `.grad`. Create FusedOptimizer(collection) and call its step(), "
                'or choose update="autograd"',
                stacklevel=2,
            )

    def clear(self) -> None:
        """Forgets all records, and that lookups wait for their backward; should one come, it is checked then."""
        self.waiting.clear()
        if self.records:
            self.records = []

    def discard(self) -> None:
        """Forgets all records, and lookups whose backward will never run."""
        self.clear()
        self.current.clear()


def _own(record: Record) -> None:
    """Keeps what the caller might write, under watch; as a copy what cannot be watched, or is cheaply copied."""
    (ids, offsets, weights, bags), grad = record.csr, record.grad
    # ids of one feature were not put together, so these may be the caller's own
    copied = record.launch.is_single and not ids.is_cuda
    if copied or _changes(grad) or _changes(ids) or _changes(offsets) or (weights is not None and _changes(weights)):
        with ordinary_tensors():
            if copied or _changes(ids):
                ids = ids.clone()
            if copied or _changes(offsets):
                offsets = offsets.clone()
            if weights is not None and (copied or _changes(weights)):
                weights = weights.clone()
            if grad.is_inference():
                record.grad = grad.clone()
        record.csr = Csr(ids, offsets, weights, bags)
    record.watch()


def _changes(tensor: Tensor) -> bool:
    """Whether a tensor has no version to watch, or is a parameter that another optimizer may step before."""
    return tensor.is_inference() or (tensor.requires_grad and tensor.is_leaf)


def learning(records: Sequence[Record]) -> tuple[bool, ...]:
    """For each table, whether it was to learn when any of these lookups had its backward."""
    first = records[0].learns
    if all(record.learns == first for record in records):
        return first
    return tuple(any(of_table) for of_table in zip(*(record.learns for record in records), strict=True))


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
    arena: Arena

    def bad_id(self, ids: Tensor, offsets: Tensor, bags: int, position: int) -> str:
        """The message for the id at `position` of the launch, which lies outside its table."""
        bag = int(torch.searchsorted(offsets, position, right=True)) - 1
        feature = bag // bags
        rows, found = int(self.launch.features[feature, ROWS]), int(ids[position])
        if self.launch.sequences[feature]:
            found = unfolded(found)
        return (
            f"ids of feature {self.names[feature]!r} must lie in [0, {rows}), the rows of table "
            f"{self.tables[feature]!r}: got {found} in bag {bag % bags}, at position "
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


class Known(NamedTuple):
    """A slot, and what a lookup needs of it."""

    number: int
    launch: Launch
    slot: Slot
    weakly: "weakref.ref[Slot]"

    @classmethod
    def of(cls, slot: Slot) -> "Known":
        """Registered."""
        return cls(register(slot), slot.launch, slot, weakref.ref(slot))


def find(number: int) -> Slot | None:
    """The slot of that number, if it still lives."""
    return _slots.get(number)


@constant_in_graphs
def call_number() -> int:
    """A number no other call has.

    Two equal lookups in one compiled graph would otherwise be merged into one, and half the gradient lost.
    """
    return next(_numbers)
