"""Lookups in one table, what `embedding_bag` is made of: as ops where ops are traced, as Functions elsewhere."""

from typing import Any

import torch
from torch import Tensor

from ..combiners import COMBINERS
from . import sparse_op  # noqa: F401 (declares its ops)
from .backends import Policy
from .compiling import constant_in_graphs
from .functions import Layout, MaxLookup, PooledLookup, call, is_transformed
from .sparse_grad import SparseGradLookup

_Kind = tuple[int, int, str, int, torch.device]  # rows, dim, combiner, flags, device
_known: dict[_Kind, Tensor] = {}


def _describe(kind: _Kind) -> Tensor:
    rows, dim, combiner, flags, device = kind
    moment, power = COMBINERS[combiner].moment, COMBINERS[combiner].power
    # the columns of `plan.py`: one table that starts at element 0 and at column 0
    return torch.tensor([[0, 0, rows, dim, 0, 0, moment, power, flags]], device=device)


def _remembered(kind: _Kind) -> Tensor:
    made = _known.get(kind)
    if made is None:
        # a tensor made in inference mode could never be saved for a backward
        with torch.inference_mode(False):
            made = _describe(kind)
        # and one made inside of a transform or a fake mode is of no use after it
        if not is_transformed() and type(made) is Tensor:
            _known[kind] = made
    return made


# a constant of the graph: copying it to the device in every call would keep CUDA graphs from being captured
@constant_in_graphs
def _constant(rows: int, dim: int, combiner: str, flags: int, device: torch.device) -> Tensor:
    return _remembered((rows, dim, combiner, flags, device))


def descriptor(weight: Tensor, combiner: str, flags: int, watched: bool) -> Tensor:
    """The descriptors of a launch with `weight` as its only table, int64 `[1, FEATURE_WIDTH]` on its device."""
    kind = (weight.shape[0], weight.shape[1], combiner, flags, weight.device)
    if not watched:
        return _remembered(kind)
    if torch.compiler.is_dynamo_compiling():
        # imported here, since it takes a second and only a compiler needs it
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        # a graph serves tables of one shape
        rows, dim = int(guard_scalar(weight.shape[0])), int(guard_scalar(weight.shape[1]))
        made: Tensor = _constant(rows, dim, combiner, flags, weight.device)
        return made
    return _describe(kind)


def pooled(
    weight: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, normalised: bool,
    policy: Policy, watched: bool,
) -> Tensor:  # fmt: skip
    """`torch.ops.embedfuse.pooled_lookup` of one table: `[B, D]`."""
    bags = offsets.shape[0] - 1
    if watched:
        out, _ = torch.ops.embedfuse.pooled_lookup(
            [weight], [0], weight.numel(), features, ids, offsets, weights, bags, weight.shape[1], normalised, policy, 0
        )
    else:
        layout = Layout((0,), weight.numel(), bags, weight.shape[1], normalised, policy)
        out, _ = call(PooledLookup, weights, features, ids, offsets, layout, weight)
    result: Tensor = out
    return result


def pooled_sparse(
    weight: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, normalised: bool,
    policy: Policy, watched: bool,
) -> Tensor:  # fmt: skip
    """`pooled` with a sparse gradient of `weight`."""
    bags = offsets.shape[0] - 1
    if watched:
        out, _ = torch.ops.embedfuse.lookup_with_sparse_grad(
            weight, features, ids, offsets, weights, bags, normalised, policy
        )
        result: Tensor = out
        return result
    layout = Layout((0,), weight.numel(), bags, weight.shape[1], normalised, policy)
    result = call(SparseGradLookup, weights, features, ids, offsets, layout, weight)
    return result


def largest(weight: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, policy: Policy, watched: bool) -> Tensor:
    """`torch.ops.embedfuse.max_lookup` without the winners: `[B, D]`."""
    arguments = (weight, features, ids, offsets, offsets.shape[0] - 1, weight.shape[1], policy)
    if watched:
        out, _ = torch.ops.embedfuse.max_lookup(*arguments)
    else:
        out, _ = call(MaxLookup, *arguments)
    result: Tensor = out
    return result


class DivideByFrequency(torch.autograd.Function):
    """`weight` itself, but the gradient of each row is divided by how often the row stands in `ids`."""

    @staticmethod
    def forward(weight: Tensor, ids: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        rows = grad.shape[0]
        inside = (ids >= 0) & (ids < rows)
        # 16-bit floats hold no counts beyond 256 or 2048
        dtype = torch.promote_types(grad.dtype, torch.float32)
        if grad.is_sparse:
            # both list the distinct ids in ascending order
            counts = torch.unique(ids[inside], return_counts=True)[1]
            values = (grad.values().to(dtype) / counts[:, None]).to(grad.dtype)
            divided = torch.sparse_coo_tensor(
                grad.indices(), values, grad.shape, is_coalesced=True, check_invariants=False
            )
            return divided, None
        counts = torch.zeros(rows + 1, dtype=torch.int64, device=ids.device)
        counts = counts.scatter_add(0, torch.where(inside, ids.long(), rows), torch.ones_like(ids, dtype=torch.int64))
        return (grad.to(dtype) / counts[:rows, None].clamp(min=1)).to(grad.dtype), None
