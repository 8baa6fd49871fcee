"""Default rows for empty bags: ids are checked once, and every bag gets a place more, before the lookup itself.

As an op where ops are traced, as a Function elsewhere, like the lookups. Weights keep their gradient.
"""

from typing import Any

import torch
from torch import Tensor

from . import ledger
from .backends import BadId, Csr, Policy, Prepared, Shards, accumulation_dtype, select
from .compiling import EVERY_TIME
from .functions import call, is_watched, looped

_lib: Any = torch.library.Library("embedfuse", "FRAGMENT")
_lib.define(
    "prepare_ids(Tensor features, Tensor ids, Tensor offsets, Tensor? weights, SymInt bags, str policy, int owner)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=EVERY_TIME,
)


def prepared(
    features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int, policy: Policy, owner: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`ids`, `offsets` and `weights` in which bags that would be empty hold their DEFAULT_ID at weight 1.

    No id of the result needs checking any more.
    """
    if is_watched(ids, offsets, weights):
        rows, ends, made, _ = torch.ops.embedfuse.prepare_ids(features, ids, offsets, weights, bags, policy, owner)
    else:
        rows, _, ends, made, _ = call(PrepareIds, weights, features, ids, offsets, bags, None, policy, owner)
    return rows, ends, None if weights is None else made


def look_through(features: Tensor, csr: Csr, shards: Shards | None, policy: Policy, owner: int) -> Prepared:
    """`Backend.prepare_ids`, with an IndexError that names feature and id."""
    dtype = torch.float32 if csr.weights is None else csr.weights.dtype
    try:
        return select(csr.ids.device, dtype).prepare_ids(features, csr, shards, policy)
    except BadId as error:
        slot = ledger.find(owner)
        if slot is None:
            raise
        raise IndexError(slot.bad_id(csr.ids, csr.offsets, csr.bags, error.position)) from None


@looped
class PrepareIds(torch.autograd.Function):
    """`(weights, …) → rows, starts, offsets, weights, places`, see `Prepared`; empty tensors for what is None there."""

    @staticmethod
    def forward(
        weights: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor, bags: int, shards: Shards | None,
        policy: Policy, owner: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        made = look_through(features, Csr(ids, offsets, weights, bags), shards, policy, owner)
        starts = ids.new_empty(0) if made.starts is None else made.starts
        moved = torch.empty(0, device=ids.device) if made.weights is None else made.weights
        return made.rows, starts, made.offsets, moved, made.places

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        rows, starts, offsets, _, places = output
        ctx.mark_non_differentiable(rows, starts, offsets, places)
        ctx.save_for_backward(places)

    @staticmethod
    def backward(ctx: Any, _rows: Any, _starts: Any, _offsets: Any, grad: Tensor, _places: Any) -> Any:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None, None, None, None, None


def _body(
    features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int, policy: Policy, owner: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, _, ends, moved, places = PrepareIds.forward(weights, features, ids, offsets, bags, None, policy, owner)
    return rows, ends, moved, places


_lib.impl("prepare_ids", _body, "CompositeExplicitAutograd")


@torch.library.register_fake("embedfuse::prepare_ids", lib=_lib)  # type: ignore[untyped-decorator]
def _(features: Any, ids: Any, offsets: Any, weights: Any, bags: Any, policy: Any, owner: Any) -> Any:
    count = ids.shape[0] + offsets.shape[0] - 1
    rows = ids.new_empty(count, dtype=torch.int64)
    dtype = accumulation_dtype(torch.float32 if weights is None else weights.dtype)
    made = ids.new_empty(0 if weights is None else count, dtype=dtype)
    return rows, torch.empty_like(offsets), made, ids.new_empty(ids.shape[0], dtype=torch.int64)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.weighted = inputs[3] is not None
    ctx.mark_non_differentiable(output[0], output[1], output[3])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[3])


def _backward(ctx: Any, _rows: Any, _offsets: Any, grad: Any, _places: Any) -> Any:
    (places,) = ctx.saved_tensors
    return None, None, None, grad[places] if ctx.weighted and grad is not None else None, None, None, None


torch.library.register_autograd("embedfuse::prepare_ids", _backward, setup_context=_save, lib=_lib)
