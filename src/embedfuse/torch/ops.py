"""The ops: schema, shapes and gradients of each, declared once. A body asks the registry for a backend.

`pooled_lookup`, `row_grad` and `coefficient_grad` close under differentiation: each one's gradients are the other
two. So `update="autograd"` can be differentiated any number of times. `lookup_for_update` gives the tables no
gradient at all: its backward hands ids, coefficients and upstream gradient to a ledger (`ledger.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ledger
from .asked_for import is_asked_for
from .backends import BadId, Csr, Policy, Rows, accumulation_dtype, select
from .compiling import EVERY_TIME
from .exported import warn_of_copies
from .inductor_memory import ALL, NOTHING, OWN
from .zero_pages import zero_pages

_lib = torch.library.Library("embedfuse", "DEF")
_COMMON = "Tensor features, Tensor ids, Tensor offsets, Tensor? weights, SymInt bags, SymInt width"

for _schema in (
    f"pooled_lookup(Tensor[] tables, int[] starts, int size, {_COMMON}, bool normalised, str policy, int owner,"
    " Tensor? cut) -> (Tensor, Tensor)",
    f"lookup_for_update(Tensor anchor, Tensor table, {_COMMON}, bool normalised, str policy, int owner, int call,"
    " str copied) -> (Tensor, Tensor)",
    "finish_backward(Tensor anchor, Tensor grad, Tensor? table, Tensor features, Tensor ids, Tensor offsets,"
    " Tensor? weights, Tensor scale, SymInt bags, bool weights_need_grad, int owner, int call, str copied)"
    " -> (Tensor, Tensor)",
    "row_grad(Tensor like, int size, Tensor features, Tensor ids, Tensor offsets, Tensor? weights, Tensor scale,"
    " Tensor grad, SymInt bags, Tensor? cut, Tensor[] tables, int[] starts) -> Tensor",
    "coefficient_grad(Tensor[] tables, int[] starts, int size, Tensor features, Tensor ids, Tensor offsets,"
    " Tensor? weights, Tensor scale, Tensor grad, SymInt bags, Tensor? cut) -> Tensor",
):
    # strides as elsewhere for ops that inductor knows nothing of
    _lib.define(_schema, tags=[*EVERY_TIME, torch.Tag.needs_exact_strides])


# --- bodies --------------------------------------------------------------------------------------------------------


def base_of(tables: Sequence[Tensor], starts: Sequence[int], size: int) -> Tensor:
    """One tensor whose data pointer is where the descriptors count from.

    Usually the tables lie in one buffer already; otherwise (a functional call with other tensors) they are copied
    into one.
    """
    first = tables[0]
    step = first.element_size()
    origin = first.data_ptr() - starts[0] * step
    for table, start in zip(tables, starts, strict=True):
        if table.data_ptr() != origin + start * step or not table.is_contiguous():
            break
    else:
        # a view reaching over all tables, for backends that need bounds
        if first.untyped_storage().nbytes() >= (first.storage_offset() - starts[0] + size) * step:
            return first.detach().as_strided((size,), (1,), first.storage_offset() - starts[0])
        if len(tables) == 1:
            return first.detach().reshape(-1)
    flat = first.new_empty(size)
    for table, start in zip(tables, starts, strict=True):
        flat[start : start + table.numel()] = table.detach().reshape(-1)
    return flat


def rows_to_cut(tables: Sequence[Tensor], starts: Sequence[int], size: int, cut: Tensor | None) -> Rows | None:
    """What the gradient of cutting rows to a length reads; `cut` describes the tables."""
    return None if cut is None else Rows(base_of(tables, starts, size), cut)


def look_up(
    table: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int, width: int,
    normalised: bool, policy: Policy, owner: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The pooled lookup, with an IndexError that names feature and id."""
    csr = Csr(ids, offsets, weights, bags)
    backend = select(table.device, table.dtype)
    try:
        return backend.pooled_lookup(table, features, csr, width, normalised, policy)
    except BadId as error:
        slot = ledger.find(owner)
        if slot is None:
            raise
        raise IndexError(slot.bad_id(ids, offsets, bags, error.position)) from None


def _buffer(known: Tensor, owner: int) -> Tensor:
    """The buffer of the owner's tables; the one a graph was compiled with is dead once they have moved."""
    slot = ledger.find(owner)
    return known if slot is None else slot.arena.settled()


def _pooled_lookup(
    tables: list[Tensor], starts: list[int], size: int, features: Tensor, ids: Tensor, offsets: Tensor,
    weights: Tensor | None, bags: int, width: int, normalised: bool, policy: Policy, owner: int,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # a collection's own tables come as its flat buffer
    table = _buffer(tables[0], owner) if tables[0].dim() == 1 else base_of(tables, starts, size)
    if not owner and len(tables) > 1 and table.untyped_storage().data_ptr() != tables[0].untyped_storage().data_ptr():
        warn_of_copies()
    return look_up(table, features, ids, offsets, weights, bags, width, normalised, policy, owner)


def _lookup_for_update(
    anchor: Tensor, table: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int,
    width: int, normalised: bool, policy: Policy, owner: int, call: int, copied: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slot, table = ledger.find(owner), _buffer(table, owner)
    if slot is not None:
        slot.ledger.check(slot.group)
    found = look_up(table, features, ids, offsets, weights, bags, width, normalised, policy, owner)
    if slot is not None:
        # after the lookup: one that raises has no backward to wait for
        slot.ledger.opened(slot.group)
    return found


def hand_over(
    slot: "ledger.Slot | None", csr: Csr, scale: Tensor, grad: Tensor, features: Tensor, table: Tensor | None,
    copied: str = NOTHING,
) -> Tensor | None:  # fmt: skip
    """Gives a lookup whose backward runs to its ledger.

    Args:
        slot: the ledger's, and the lookup's; None if the collection is gone.
        csr: what was looked up.
        scale: of the bags.
        grad: of the lookup's result.
        features: what it read `table` by; the launch may have moved on.
        table: the buffer, if the weights want a gradient, which is returned.
        copied: what of it to copy, since a compiled graph calls this.
    """
    if slot is None:
        raise RuntimeError(
            "backward came to a lookup whose EmbeddingCollection is gone, so nobody can use the gradient: keep the "
            'collection until backward, or use update="autograd" inside of torch.func transforms'
        )
    weights_grad = None
    if table is not None:
        # first, since in "backward" mode the rows change now
        backend = select(table.device, table.dtype)
        weights_grad = backend.coefficient_grad(table, features, csr, scale, grad)
    owned = copied != NOTHING and slot.ledger.on_backward is None
    if owned and copied != OWN:
        # a compiled graph reuses the memory of what it thinks no longer needed
        ids, offsets, weights, bags = csr
        csr = Csr(ids.clone(), offsets.clone(), None if weights is None else weights.clone(), bags)
        scale, grad = scale.clone(), grad.clone() if copied == ALL else grad
    slot.ledger.add(ledger.Record(slot.group, slot.launch, csr, scale, grad, owned))
    return weights_grad


def _finish_backward(
    anchor: Tensor, grad: Tensor, table: Tensor | None, features: Tensor, ids: Tensor, offsets: Tensor,
    weights: Tensor | None, scale: Tensor, bags: int, weights_need_grad: bool, owner: int, call: int, copied: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    csr = Csr(ids, offsets, weights, bags)
    table = table if weights_need_grad else None
    weights_grad = hand_over(ledger.find(owner), csr, scale, grad, features, table, copied)
    # or autograd would add zeros to zeros
    anchor.grad = None
    return torch.zeros_like(anchor), grad.new_empty(0) if weights_grad is None else weights_grad


def _row_grad(
    like: Tensor, size: int, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, scale: Tensor,
    grad: Tensor, bags: int, cut: Tensor | None, tables: Sequence[Tensor], starts: Sequence[int],
) -> Tensor:  # fmt: skip
    out = zero_pages((size,), like)
    csr = Csr(ids, offsets, weights, bags)
    rows = rows_to_cut(tables, starts, size, cut)
    select(like.device, like.dtype).row_grad(out, features, csr, scale, grad, rows)
    return out


def _coefficient_grad(
    tables: list[Tensor], starts: list[int], size: int, features: Tensor, ids: Tensor, offsets: Tensor,
    weights: Tensor | None, scale: Tensor, grad: Tensor, bags: int, cut: Tensor | None,
) -> Tensor:  # fmt: skip
    table = base_of(tables, starts, size)
    csr = Csr(ids, offsets, weights, bags)
    return select(table.device, table.dtype).coefficient_grad(table, features, csr, scale, grad)


for _name, _body in (
    ("pooled_lookup", _pooled_lookup),
    ("lookup_for_update", _lookup_for_update),
    ("finish_backward", _finish_backward),
    ("row_grad", _row_grad),
    ("coefficient_grad", _coefficient_grad),
):
    _lib.impl(_name, _body, "CompositeExplicitAutograd")


# --- shapes --------------------------------------------------------------------------------------------------------


def _lookup_shapes(table: Tensor, features: Tensor, bags: int, width: int, normalised: bool) -> tuple[Tensor, Tensor]:
    scales = features.shape[0] * bags if normalised else 0
    return table.new_empty((bags, width)), table.new_empty((scales,), dtype=accumulation_dtype(table.dtype))


@torch.library.register_fake("embedfuse::pooled_lookup", lib=_lib)  # type: ignore[untyped-decorator]
def _(
    tables: Any, starts: Any, size: Any, features: Any, ids: Any, offsets: Any, weights: Any, bags: Any, width: Any,
    normalised: Any, policy: Any, owner: Any, cut: Any,
) -> Any:  # fmt: skip
    return _lookup_shapes(tables[0], features, bags, width, normalised)


@torch.library.register_fake("embedfuse::lookup_for_update", lib=_lib)  # type: ignore[untyped-decorator]
def _(
    anchor: Any, table: Any, features: Any, ids: Any, offsets: Any, weights: Any, bags: Any, width: Any,
    normalised: Any, policy: Any, owner: Any, call: Any, copied: Any,
) -> Any:  # fmt: skip
    return _lookup_shapes(table, features, bags, width, normalised)


@torch.library.register_fake("embedfuse::finish_backward", lib=_lib)  # type: ignore[untyped-decorator]
def _(
    anchor: Any, grad: Any, table: Any, features: Any, ids: Any, offsets: Any, weights: Any, scale: Any, bags: Any,
    weights_need_grad: Any, owner: Any, call: Any, copied: Any,
) -> Any:  # fmt: skip
    if weights_need_grad and table is not None:
        return torch.empty_like(anchor), torch.empty_like(weights)
    return torch.empty_like(anchor), grad.new_empty(0)


@torch.library.register_fake("embedfuse::row_grad", lib=_lib)  # type: ignore[untyped-decorator]
def _(
    like: Any, size: Any, features: Any, ids: Any, offsets: Any, weights: Any, scale: Any, grad: Any, bags: Any,
    cut: Any, tables: Any, starts: Any,
) -> Any:  # fmt: skip
    return like.new_empty(size)


@torch.library.register_fake("embedfuse::coefficient_grad", lib=_lib)  # type: ignore[untyped-decorator]
def _(
    tables: Any, starts: Any, size: Any, features: Any, ids: Any, offsets: Any, weights: Any, scale: Any, grad: Any,
    bags: Any, cut: Any,
) -> Any:  # fmt: skip
    return ids.new_empty(ids.shape, dtype=accumulation_dtype(tables[0].dtype))


# --- gradients -----------------------------------------------------------------------------------------------------


def views_of(flat: Tensor, shapes: Sequence[torch.Size], starts: Sequence[int]) -> list[Tensor]:
    """The tables' shares of a flat buffer laid out like the arena."""
    return [flat[start : start + shape.numel()].view(shape) for shape, start in zip(shapes, starts, strict=True)]


def refuse_second_derivative(normalised: bool) -> None:
    """Raises where weights that the sum was divided by would be differentiated twice."""
    if normalised:
        raise NotImplementedError(
            "the gradient of a weighted mean cannot be differentiated again through the weights: normalise the weights "
            'yourself and pool by "sum"'
        )


def refuse_second_cut(cut: Tensor | None) -> None:
    """Raises where the gradient of cut rows would be differentiated."""
    if cut is not None:
        raise NotImplementedError(
            "the gradient of tables with `max_norm` cannot be differentiated again: shorten the rows beforehand, "
            "with torch.renorm(table, 2, 0, max_norm)"
        )


def _save_lookup(ctx: Any, inputs: Any, output: Any) -> None:
    tables, starts, size, features, ids, offsets, weights, bags, _width, _normalised, _policy, _owner, cut = inputs
    ctx.starts, ctx.size, ctx.bags, ctx.shapes = starts, size, bags, [table.shape for table in tables]
    # tables may be written before backward runs, so they are kept only where their values are needed
    kept = tables if (weights is not None and weights.requires_grad) or cut is not None else []
    ctx.save_for_backward(features, ids, offsets, weights, output[1], cut, *kept)
    ctx.set_materialize_grads(False)


def _lookup_backward(ctx: Any, grad: Any, _scale_grad: Any) -> Any:
    features, ids, offsets, weights, scale, cut, *tables = ctx.saved_tensors
    nothing: list[Any] = [None] * 13
    # a Tensor[] input must be answered with a list, also when there is nothing to say
    nothing[0] = [None] * len(ctx.shapes)
    if grad is None:
        return tuple(nothing)
    if ctx.needs_input_grad[0]:
        to_cut = (cut, [] if cut is None else list(tables), ctx.starts)
        flat = torch.ops.embedfuse.row_grad(
            grad, ctx.size, features, ids, offsets, weights, scale, grad, ctx.bags, *to_cut
        )
        nothing[0] = views_of(flat, ctx.shapes, ctx.starts)
    if ctx.needs_input_grad[6]:
        nothing[6] = torch.ops.embedfuse.coefficient_grad(
            list(tables), ctx.starts, ctx.size, features, ids, offsets, weights, scale, grad, ctx.bags, cut
        )
    return tuple(nothing)


torch.library.register_autograd("embedfuse::pooled_lookup", _lookup_backward, setup_context=_save_lookup, lib=_lib)


def _save_row_grad(ctx: Any, inputs: Any, output: Any) -> None:
    _like, size, features, ids, offsets, weights, scale, grad, bags, cut, tables, _starts = inputs
    ctx.size, ctx.bags, ctx.width, ctx.count = size, bags, grad.shape[1], len(tables)
    ctx.save_for_backward(features, ids, offsets, weights, scale, grad, cut)


def _row_grad_backward(ctx: Any, upstream: Any) -> Any:
    features, ids, offsets, weights, scale, grad, cut = ctx.saved_tensors
    refuse_second_cut(cut)
    normalised = scale.shape[0] != 0
    grad_grad = weights_grad = None
    if ctx.needs_input_grad[5]:
        refuse_second_derivative(normalised)
        weights_grad = torch.ops.embedfuse.coefficient_grad(
            [upstream.contiguous()], [0], ctx.size, features, ids, offsets, weights, scale, grad, ctx.bags,
            None,
        )  # fmt: skip
    if ctx.needs_input_grad[7]:
        grad_grad, _ = torch.ops.embedfuse.pooled_lookup(
            [upstream.contiguous()], [0], ctx.size, features, ids, offsets, weights, ctx.bags, ctx.width, normalised,
            "drop", 0, None,
        )  # fmt: skip
    return None, None, None, None, None, weights_grad, None, grad_grad, None, None, [None] * ctx.count, None


torch.library.register_autograd("embedfuse::row_grad", _row_grad_backward, setup_context=_save_row_grad, lib=_lib)


def _save_coefficient_grad(ctx: Any, inputs: Any, output: Any) -> None:
    tables, starts, size, features, ids, offsets, _weights, scale, grad, bags, cut = inputs
    ctx.count, ctx.starts, ctx.size, ctx.bags, ctx.width = len(tables), starts, size, bags, grad.shape[1]
    ctx.save_for_backward(*tables, features, ids, offsets, scale, grad, cut)


def _coefficient_grad_backward(ctx: Any, upstream: Any) -> Any:
    saved = ctx.saved_tensors
    tables, (features, ids, offsets, scale, grad, cut) = saved[: ctx.count], saved[ctx.count :]
    refuse_second_derivative(scale.shape[0] != 0)
    ones = scale.new_empty(0)
    result: list[Any] = [None] * 11
    result[0] = [None] * ctx.count
    if ctx.needs_input_grad[0]:
        flat = torch.ops.embedfuse.row_grad(
            tables[0], ctx.size, features, ids, offsets, upstream.contiguous(), ones, grad, ctx.bags,
            cut, [] if cut is None else list(tables), ctx.starts,
        )  # fmt: skip
        result[0] = views_of(flat, [table.shape for table in tables], ctx.starts)
    if ctx.needs_input_grad[8]:
        result[8], _ = torch.ops.embedfuse.pooled_lookup(
            list(tables), ctx.starts, ctx.size, features, ids, offsets, upstream.contiguous(), ctx.bags, ctx.width,
            False, "drop", 0, cut,
        )  # fmt: skip
    return tuple(result)


torch.library.register_autograd(
    "embedfuse::coefficient_grad", _coefficient_grad_backward, setup_context=_save_coefficient_grad, lib=_lib
)


def _save_for_update(ctx: Any, inputs: Any, output: Any) -> None:
    anchor, table, features, ids, offsets, weights, bags, _width, _normalised, _policy, owner, call, copied = inputs
    ctx.weights_need_grad = weights is not None and weights.requires_grad
    ctx.bags, ctx.owner, ctx.call, ctx.copied = bags, owner, call, copied
    # the table is written by the update, so it is kept only where its values are needed
    ctx.save_for_backward(anchor, table if ctx.weights_need_grad else None, features, ids, offsets, weights, output[1])
    ctx.set_materialize_grads(False)


def _for_update_backward(ctx: Any, grad: Any, _scale_grad: Any) -> Any:
    anchor, table, features, ids, offsets, weights, scale = ctx.saved_tensors
    result: list[Any] = [None] * 13
    if grad is not None and ctx.weights_need_grad and ctx.copied == NOTHING and not is_asked_for(ctx):
        result[5] = torch.ops.embedfuse.coefficient_grad(
            [table], [0], table.shape[0], features, ids, offsets, weights, scale, grad, ctx.bags, None
        )
    elif grad is not None:
        result[0], weights_grad = torch.ops.embedfuse.finish_backward(
            anchor, grad, table, features, ids, offsets, weights, scale, ctx.bags, ctx.weights_need_grad, ctx.owner,
            ctx.call, ctx.copied,
        )  # fmt: skip
        result[5] = weights_grad if ctx.weights_need_grad else None
    return tuple(result)


torch.library.register_autograd(
    "embedfuse::lookup_for_update", _for_update_backward, setup_context=_save_for_update, lib=_lib
)
