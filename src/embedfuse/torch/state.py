"""The optimizer's state of one group of tables: slots, step counters and hyper-parameters, as kernels read them."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..optim import Optimizer
from ..optim.base import ROUNDING_SEED
from ..plan import ALIGNMENT, FROZEN, T_RULE, T_SLOT0
from .backends import Update, accumulation_dtype
from .tables import Arena, zeros

MOST_FORMS = 8
"""Forms of lookups, such as lengths of sequences, whose updates are kept."""


class ordinary_tensors:
    """Without gradients, but outside of inference mode: what is made there could never be written later.

    A `with` statement. Each step enters it, and a generator would cost the host more than all that it does.
    """

    def __enter__(self) -> None:
        self._outside: torch.inference_mode | None = None
        if torch.is_inference_mode_enabled():
            self._outside = torch.inference_mode(False)
            self._outside.__enter__()
        # in this order: leaving inference mode turns gradients on
        self._graded = torch.is_grad_enabled()
        # what `torch.set_grad_enabled` does, without making an object of it
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._graded)
        if self._outside is not None:
            self._outside.__exit__(*error)


class GroupState:
    """State of the tables of one arena.

    Attributes:
        optimizers: one for each table.
        at_random: whether any table rounds stochastically.
        modes: for each table, whether its "rows" step once, once for "each" contribution, or "all" of them.
        rules: the distinct row rules among them.
        slots: all slots of all tables, flat, float32 (float64 for float64 tables).
        steps: int64 `[T]`: optimizer steps each table has made.
        hyper: float64 `[T, HYPER_WIDTH]`.
        learning_rates: of `hyper`, one for each table; a new list whenever it changes.

    Args:
        seeds: of stochastic rounding, one for each table; 0 for none.
    """

    def __init__(self, arena: Arena, optimizers: Sequence[Optimizer], seeds: Sequence[int]) -> None:
        self.arena, self.optimizers, self._seeds = arena, list(optimizers), list(seeds)
        self._distinct = list(dict.fromkeys(optimizers))
        self._kinds = [self._distinct.index(optimizer) for optimizer in optimizers]
        self.at_random = any(seeds)
        self.modes = [_mode(optimizer) for optimizer in optimizers]
        self.rules = list(dict.fromkeys(optimizer.kernel_class() for optimizer in optimizers))
        self._descriptors = arena.descriptors.copy()
        self._places: list[dict[str, tuple[int, tuple[int, int]]]] = []
        total = 0
        for number, (optimizer, (rows, dim)) in enumerate(zip(optimizers, arena.shapes, strict=True)):
            self._descriptors[number, T_RULE] = self.rules.index(optimizer.kernel_class())
            places: dict[str, tuple[int, tuple[int, int]]] = {}
            for slot_number, slot in enumerate(optimizer.slots()):
                shape = (rows, dim if slot.per == "element" else 1)
                self._descriptors[number, T_SLOT0 + slot_number] = total
                places[slot.name] = (total, shape)
                total += -(-shape[0] * shape[1] // ALIGNMENT) * ALIGNMENT
            self._places.append(places)
        self._total = max(total, 1)
        self._masks: dict[tuple[bool, ...], tuple[Tensor, Tensor]] = {}
        self._by_mode: dict[tuple[bool, ...], dict[str, Tensor]] = {}
        self._updates: list[Update] = []
        self.latest: Update | None = None  # the one that `update_of` gave last
        arena.followers.add(self)
        self._start()

    def forget(self) -> None:
        """Drops updates, whose tensors are replaced; the arena's buffer, that of before, may be most of a device."""
        self._updates, self.latest = [], None

    def _start(self) -> None:
        buffer = self.arena.buffer
        self._followed = weakref.ref(buffer)
        self.slots = zeros(self._total, accumulation_dtype(buffer.dtype), buffer.device)
        self.steps = torch.zeros(len(self.optimizers), dtype=torch.int64, device=buffer.device)
        self.hyper = torch.zeros((0, 0), dtype=torch.float64, device=buffer.device)
        self.learning_rates: list[float] = []
        for number, optimizer in enumerate(self.optimizers):
            for slot in optimizer.slots():
                self.view(number, slot.name).fill_(slot.initial)

    def names(self, table: int) -> list[str]:
        """Names of the slots of a table."""
        return list(self._places[table])

    def view(self, table: int, slot: str) -> Tensor:
        """One slot of one table, `[V, D]` or `[V, 1]`, sharing memory."""
        start, shape = self._places[table][slot]
        return self.slots[start : start + shape[0] * shape[1]].view(shape)

    def follow(self) -> bool:
        """Moves to the device and type of the tables, should they have moved; says whether they had."""
        buffer = self.arena.buffer
        if self._followed() is buffer:
            return False
        self._followed = weakref.ref(buffer)
        self.forget()
        device, dtype = buffer.device, accumulation_dtype(buffer.dtype)
        if self.slots.device == device and self.slots.dtype == dtype:
            return False
        if self.slots.is_meta:
            self._start()
        else:
            self.slots = self.slots.to(device, dtype)
            self.steps, self.hyper = self.steps.to(device), self.hyper.to(device)
        self._masks, self._by_mode = {}, {}
        return True

    def hyper_of(self, learning_rates: list[float]) -> np.ndarray | None:
        """Hyper-parameters `[T, HYPER_WIDTH]` for these learning rates of the tables; None if they are there already.

        Raises:
            ValueError: a learning rate that cannot be.
        """
        if self.learning_rates == learning_rates:
            return None
        # many tables have few optimizers
        pairs = list(zip(self._kinds, learning_rates, strict=True))
        place = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        rows = np.array([self._distinct[kind].hyper(rate) for kind, rate in place])[[place[pair] for pair in pairs]]
        rows[:, ROUNDING_SEED] = self._seeds
        return rows

    def set_hyper(self, learning_rates: list[float], rows: np.ndarray) -> None:
        """Brings hyper-parameters up to date with what `hyper_of` gave for these learning rates."""
        fresh = torch.from_numpy(rows)
        if self.slots.is_cuda:
            # page-locked, so that the copy does not wait for the device
            fresh = fresh.pin_memory()
        if self.hyper.shape == fresh.shape:
            # in place: a captured CUDA graph keeps reading this tensor
            self.hyper.copy_(fresh, non_blocking=True)
        else:
            self.hyper = fresh.to(self.slots.device, non_blocking=True)
            self.forget()
        self.learning_rates = list(learning_rates)

    def masked(self, learns: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """Table descriptors with FROZEN for tables that do not learn, and int64 `[T]` ones for those that do."""
        key = tuple(learns)
        if key not in self._masks:
            descriptors = self._descriptors.copy()
            descriptors[~np.array(key, bool), T_RULE] = FROZEN
            device = self.slots.device
            self._masks[key] = (
                torch.from_numpy(descriptors).to(device),
                torch.tensor(key, dtype=torch.int64, device=device),
            )
        return self._masks[key]

    def by_mode(self, learns: tuple[bool, ...]) -> dict[str, Tensor]:
        """For each mode that occurs among the tables that learn, descriptors in which all others are FROZEN."""
        if learns not in self._by_mode:
            modes = [mode if learn else "frozen" for mode, learn in zip(self.modes, learns, strict=True)]
            self._by_mode[learns] = {
                mode: self.masked([own == mode for own in modes])[0] for mode in set(modes) - {"frozen"}
            }
        return self._by_mode[learns]

    def update_of(self, features: Tensor, tables: Tensor, counted: Tensor | None) -> Update:
        """The update of lookups of these features whose tables step so, one object for all steps of one kind.

        With it a backend keeps what it prepared.
        """
        for update in self._updates:
            if update.features is features and update.tables is tables and update.counted is counted:
                self.latest = update
                return update
        update = Update(
            self.arena.buffer, features, tables, self.rules, self.slots, self.hyper, self.steps, counted=counted,
            at_random=self.at_random, programs=[],
        )  # fmt: skip
        # several lookups that are joined have features of their own
        self._updates[MOST_FORMS - 1 :] = []
        self._updates.insert(0, update)
        self.latest = update
        return update


def _mode(optimizer: Optimizer) -> str:
    if optimizer.dense:
        return "all"
    return "rows" if optimizer.use_gradient_accumulation else "each"
