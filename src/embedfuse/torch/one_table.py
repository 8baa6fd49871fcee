"""Lookups in one table, what `embedding_bag` is made of: as ops where ops are traced, as Functions elsewhere."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plan import NO_DEFAULT, PlannedFeature, PlannedTable, plan_group
from . import sparse_op  # noqa: F401 (declares its ops)
from .backends import Policy
from .compiling import constant_in_graphs
from .functions import Layout, MaxLookup, PooledLookup, call, is_transformed
from .shelf import Shelf
from .sparse_grad import SparseGradLookup


class Kind(NamedTuple):
    """A lookup in one table; `flags`, `max_norm` and `default_id` are those of `plan.py`."""

    rows: int
    dim: int
    combiner: str
    flags: int
    device: torch.device
    max_norm: float = math.inf
    default_id: int = NO_DEFAULT


_known: dict[tuple[Kind, bool], Tensor] = {}


def _describe(kind: Kind, table: bool) -> Tensor:
    planned = PlannedFeature(0, kind.combiner, kind.flags, kind.default_id)
    group = plan_group([PlannedTable(kind.rows, kind.dim, kind.max_norm)], [planned])
    return torch.tensor((group.tables if table else group.features).tolist(), device=kind.device)


def _remembered(kind: Kind, table: bool) -> Tensor:
    made = _known.get((kind, table))
    if made is None:
        # a tensor made in inference mode could never be saved for a backward
        with torch.inference_mode(False):
            made = _describe(kind, table)
        # and one made inside of a transform or a fake mode is of no use after it
        if not is_transformed() and type(made) is Tensor:
            _known[kind, table] = made
    return made


_shelf = Shelf()
_names: dict[tuple[Kind, bool], str] = {}


@constant_in_graphs
def _put_on_shelf(
    rows: int, dim: int, combiner: str, flags: int, device: torch.device, max_norm: float, default_id: int, table: bool
) -> str:
    kind = Kind(rows, dim, combiner, flags, device, max_norm, default_id)
    made = _remembered(kind, table)
    # CUDA graphs read it where it is, instead of a copy made for each call
    torch._dynamo.mark_static_address(made)
    name = _names.setdefault((kind, table), f"descriptors_{len(_names)}")
    setattr(_shelf, name, made)
    return name


def descriptor(
    weight: Tensor, combiner: str, flags: int, watched: bool, max_norm: float = math.inf, default_id: int = NO_DEFAULT,
    table: bool = False,
) -> Tensor:  # fmt: skip
    """The descriptors of a launch with `weight` as its only table, int64 `[1, FEATURE_WIDTH]` on its device.

    With `table` those of the table itself, `[1, TABLE_WIDTH]`.
    """
    kind = Kind(weight.shape[0], weight.shape[1], combiner, flags, weight.device, max_norm, default_id)
    if not watched:
        return _remembered(kind, table)
    if torch.compiler.is_dynamo_compiling():
        # imported here, since it takes a second and only a compiler needs it
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        # a graph serves tables of one shape
        rows, dim = int(guard_scalar(weight.shape[0])), int(guard_scalar(weight.shape[1]))
        name = _put_on_shelf(rows, dim, combiner, flags, weight.device, max_norm, default_id, table)
        made: Tensor = getattr(_shelf, name)
        return made
    return _describe(kind, table)


def pooled(
    weight: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, normalised: bool,
    policy: Policy, watched: bool, cut: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`torch.ops.embedfuse.pooled_lookup` of one table: `[B, D]`. `cut` describes the table if its rows are cut."""
    bags = offsets.shape[0] - 1
    if watched:
        out, _ = torch.ops.embedfuse.pooled_lookup(
            [weight], [0], weight.numel(), features, ids, offsets, weights, bags, weight.shape[1], normalised, policy,
            0, cut,
        )  # fmt: skip
    else:
        layout = Layout((0,), weight.numel(), bags, weight.shape[1], normalised, policy, cut=cut)
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
