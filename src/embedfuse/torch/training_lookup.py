"""Lookups of tables that an optimizer steps: the tables get no gradient, the ledger a record.

A `torch.autograd.Function` in place of `torch.ops.embedfuse.lookup_for_update` where nothing traces the call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from . import ops
from .asked_for import is_asked_for, may_come_again
from .backends import Csr, Policy, select
from .functions import is_transformed
from .inductor_memory import ALL, NOTHING, tell_inductor
from .layout import Assembled, Launch
from .ledger import Known, Slot, call_number
from .once import differentiable_once


# no tuple, which `torch.func` would take apart; not frozen, since that takes the host longer to make
@dataclass(slots=True)
class Training:
    """One lookup of tables that learn: all that is no tensor of the batch, and what becomes of it."""

    slot: Callable[[], Slot | None]  # weakly: a graph that is kept keeps no collection
    number: int  # of the slot
    launch: Launch
    features: Tensor  # the descriptors that are read; those of the launch follow the tables
    table: Tensor | None  # the buffer, until autograd has what it needs of it
    bags: int
    policy: Policy
    out: Tensor | None = None  # what was looked up, and the bags' scale; until autograd has them
    scale: Tensor | None = None

    def look_up(self, weights: Tensor | None, ids: Tensor, offsets: Tensor) -> None:
        """Fills in `out` and `scale`."""
        assert self.table is not None
        launch = self.launch
        self.out, self.scale = ops.look_up(
            self.table, self.features, ids, offsets, weights, self.bags, launch.width, launch.normalised, self.policy,
            self.number,
        )  # fmt: skip


class LookupForUpdate(torch.autograd.Function):
    """`(anchor, weights [N] or None, ids, offsets, …) → out [B, width]`; see `Backend.pooled_lookup`.

    The anchor only brings autograd here.
    """

    @staticmethod
    def forward(anchor: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, one: Training) -> Tensor:
        if one.out is None:
            one.look_up(weights, ids, offsets)
        # a graph must not hold its own result
        out, one.out = one.out, None
        return cast(Tensor, out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _anchor, weights, ids, offsets, one = inputs
        ctx.one = one
        ctx.save_for_backward(weights, one.table if ctx.needs_input_grad[1] else None, ids, offsets, one.scale)
        ctx.set_materialize_grads(False)

    @staticmethod
    @differentiable_once(
        'lookups whose tables an optimizer steps cannot be differentiated twice: use update="autograd"'
    )
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        weights, table, ids, offsets, scale = ctx.saved_tensors
        if grad is None:
            return None, None, None, None, None
        one: Training = ctx.one
        csr = Csr(ids, offsets, weights, one.bags)
        found: Tensor | None
        if table is not None and not is_asked_for(ctx):
            found = select(table.device, table.dtype).coefficient_grad(table, one.features, csr, scale, grad)
            slot = one.slot()
            if slot is not None and not may_come_again():
                slot.ledger.closed(slot.group)
        else:
            found = ops.hand_over(one.slot(), csr, scale, grad, one.features, table)
        return None, found, None, None, None


# past `Function.apply`, which inspects the signature of `forward` in every call, for 30 µs
_apply: Any = super(torch.autograd.Function, LookupForUpdate).apply


def joins_graph(anchor: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, one: Training) -> Tensor:
    """What was looked up, with a backward; not inside of a transform, which must see the lookup itself."""
    out = _apply(anchor, weights, ids, offsets, one)
    # what backward reads is saved: a graph frees it sooner than this
    one.table = one.scale = None
    return cast(Tensor, out)


def training_lookup(
    anchor: Tensor, buffer: Tensor, known: Known, batch: Assembled, policy: Policy, watched: bool
) -> Tensor:
    """A lookup of tables that learn, where gradients are on; by the op if something watches."""
    ids, offsets, weights, bags = batch
    launch, ledger = known.launch, known.slot.ledger
    if watched:
        copied = NOTHING
        if torch.compiler.is_compiling():
            tell_inductor()
            copied = ALL
        out, _ = torch.ops.embedfuse.lookup_for_update(
            anchor, buffer, launch.features, ids, offsets, weights, bags, launch.width, launch.normalised, policy,
            known.number, call_number(), copied,
        )  # fmt: skip
        return cast(Tensor, out)
    ids, offsets, weights = unwrap_dead_wrappers((ids, offsets, weights))
    one = Training(known.weakly, known.number, launch, launch.features, buffer, bags, policy)
    # it may refuse
    ledger.check(known.slot.group)
    if is_transformed():
        # which must see the lookup itself
        apply: Any = LookupForUpdate.apply
        out = apply(anchor, weights, ids, offsets, one)
    else:
        one.look_up(weights, ids, offsets)
        out = joins_graph(anchor, weights, ids, offsets, one)
    # after the lookup: one that raises has no backward to wait for
    ledger.opened(known.slot.group)
    return cast(Tensor, out)
