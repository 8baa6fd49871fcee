"""Has inductor leave alone what a compiled backward hands to a ledger, so that nobody need copy it.

Code that inductor generates writes new results where it thinks that nobody will read the old ones again. A lowering of
`finish_backward` puts the memory of gradient and batch on the list of what is never written again, and tells the op so.
Both are inductor's own affairs: where they are not as expected here, or where anything else may write there, the op
makes copies, as it does for every other compiler.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from . import ledger
from .compiling import constant_in_graphs

# What `finish_backward` copies of what it hands over: all; ids, offsets, weights and scale; nothing, since it is the
# graph's own; or nothing, as without a compiler. Compilers find what they generated on disk again by the words of the
# first: count up when backward, or what is decided below, becomes another
ALL, BATCH, OWN, NOTHING = f"all, {__version__}, 3", "all but the gradient", "nothing, nobody else has it", "nothing"
_KEPT_TO = {"aten", "prims", "embedfuse"}
"""Namespaces of ops that write to nothing but what their schema names."""
_told: list[bool] = []


@constant_in_graphs
def tell_inductor() -> None:
    """Registers the lowering, once; compilers call this while they trace a lookup."""
    if not _told:
        _told.append(True)
        # another inductor than this file knows finds the op by itself, which copies
        with contextlib.suppress(ImportError, AttributeError, TypeError):
            _register()


def _register() -> None:
    from torch._inductor import lowering

    op = torch.ops.embedfuse.finish_backward.default
    plain = lowering.fallback_handler(op, add_to_fallback_set=False)

    def lower(*given: Any) -> Any:
        # as above: what is given says that all is to be copied
        with contextlib.suppress(AttributeError, TypeError):
            given = _kept(*given)
        return plain(*given)

    # what inductor does with fallbacks of its own
    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _kept(
    anchor: Any, grad: Any, table: Any, features: Any, ids: Any, offsets: Any, weights: Any, scale: Any, *given: Any
) -> tuple[Any, ...]:
    """What the op is called with, once inductor has been told."""
    from torch._inductor import config, ir
    from torch._inductor.virtualized import V

    *rest, owner, call, copied = given
    slot = ledger.find(owner)
    waits = slot is not None and slot.ledger.on_backward is None
    # replays of inductor's own CUDA graphs write to the same memory again, whatever is read later
    if waits and copied == ALL and not config.triton.cudagraphs and _is_left_alone(V.graph.current_node):
        grad = ir.ExternKernel.realize_input(grad)
        name = grad.get_name()
        buffer = V.graph.try_get_buffer(name)
        if buffer is not None and _is_one_tensor(ir, buffer):
            batch = [value.get_name() for value in (ids, offsets, weights, scale) if value is not None]
            # made by the forward graph and known to nobody but this one: not a batch of the caller's
            donated = all(isinstance(V.graph.graph_inputs_original.get(name), ir.DonatedBuffer) for name in batch)
            donated = donated and _are_apart(V.graph.current_node)
            V.graph.never_reuse_buffers.update([name, *batch] if donated else [name])
            copied = OWN if donated else BATCH
    return anchor, grad, table, features, ids, offsets, weights, scale, *rest, owner, call, copied


def _is_one_tensor(ir: Any, buffer: Any) -> bool:
    """Whether this memory is, and has one name only.

    Parts of a concatenation may be tensors that others write to; what other ops return may be their inputs' memory.
    """
    computed = isinstance(buffer, (ir.ComputedBuffer, ir.ExternKernelOut, ir.TemplateBuffer))
    return computed and type(buffer.get_output_spec()) in (ir.FixedLayout, ir.FlexibleLayout)


def _is_left_alone(node: Any) -> bool:
    """Whether the graph computes the gradient of this `finish_backward` by itself, for itself, and then only reads."""
    storage = _storage(node.args[1])
    views = [other for other in node.graph.nodes if _storage(other) == storage]
    return storage is not None and all(map(_reads_only, views)) and all(_reads_only(u) for v in views for u in v.users)


def _are_apart(node: Any) -> bool:
    """Whether no two tensors that this graph is given lie in the same memory."""
    given = [_storage(other) for other in node.graph.nodes if other.op == "placeholder"]
    tensors = [storage for storage in given if storage is not None]
    return len(set(tensors)) == len(tensors)


def _storage(node: Any) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _reads_only(node: Any) -> bool:
    """Of an op that does what its schema says. False of a graph's inputs and results, to which others may write."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _KEPT_TO and not target._schema.is_mutable
