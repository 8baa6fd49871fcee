"""A lookup like the ones before, of which the host asks as little as can be.

A small batch takes the host longer than the device, and most of that time are questions whose answers never change, all
the more straight after other work, when nothing of them is in the CPU's caches. So a collection keeps what a lookup on
a GPU has found out, and of the next batch asks only whether it still holds.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from .backends import Csr, Policy, chosen, select
from .functions import is_transformed, is_watched
from .layout import Assembled
from .ledger import Known
from .tables import LEARN, Arena
from .training_lookup import Training, joins_graph

grad_enabled: Any = torch.is_grad_enabled


@dataclass(eq=False, slots=True)
class UsualLookup:
    """What lookups of a collection have in common. Made anew when its tables have moved."""

    arena: Arena
    known: Known
    anchor: Tensor
    backend: str  # that was chosen
    features: Tensor
    lookups: Any  # of the features, by a backend

    @classmethod
    def of(cls, arena: Arena, known: Known, anchor: Tensor) -> "UsualLookup | None":
        """None where a backend's own time is what counts, or ids must be prepared first."""
        buffer, launch = arena.buffer, known.launch
        lookups = getattr(select(buffer.device, buffer.dtype), "lookups", None)
        if lookups is None or launch.has_defaults:
            return None
        return cls(arena, known, anchor, chosen(), launch.features, lookups(launch.features))

    def again(self, batch: Assembled, policy: Policy, update: str) -> Tensor | None:
        """The lookup, by the collection's settings; None, and nothing is done, if anything at all is different."""
        ids, offsets, weights, bags = batch
        known, arena = self.known, self.arena
        launch, buffer = known.launch, arena.buffer
        if (
            type(ids) is not Tensor or type(offsets) is not Tensor or is_watched(weights) or is_transformed()
            or chosen() != self.backend
            # a copy of the collection may have moved the tables of both
            or launch.features is not self.features
        ):  # fmt: skip
            return None
        state = arena.state()
        learn = state == LEARN and grad_enabled()
        if not state or (learn and update == "autograd"):
            return None
        if weights is not None:
            if not learn and weights.requires_grad and grad_enabled():
                return None
            weights = unwrap_if_dead(weights)
        ids, offsets = unwrap_if_dead(ids), unwrap_if_dead(offsets)
        if learn:
            # it may refuse
            known.slot.ledger.check(known.slot.group)
        csr = Csr(ids, offsets, weights, bags)
        found = self.lookups.again(buffer, self.features, csr, launch.width, launch.normalised, policy)
        if found is None or not learn:
            return None if found is None else found[0]
        one = Training(known.weakly, known.number, launch, self.features, buffer, bags, policy, *found)
        out = joins_graph(self.anchor, weights, ids, offsets, one)
        # after the lookup: one that raises has no backward to wait for
        known.slot.ledger.opened(known.slot.group)
        return out
