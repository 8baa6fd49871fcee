"""What the three primitives compute, on a backend and without gradients; and the ops that graphs are made of.

Ids are in bags: bag `b` owns positions `offsets[b] .. offsets[b + 1]` of `ids`.

    gather_sum    out[b] = Σ w_i table[id_i]        over the positions i of bag b
    gather_dot    out[i] = <table[id_i], x[b]>      b being the bag of position i
    scatter_sum   out[id_i] += w_i grad[b]          zeros elsewhere

Each one's gradients are the other two. `scatter_and_dot` is `scatter_sum` and `gather_dot` of the same ids and vectors,
which is what the backward of `gather_sum` asks for, in one pass over the rows.
"""

from typing import Any

import torch
from torch import Tensor

from .. import one_table
from ..backends import BadId, Csr, Policy, Rows, accumulation_dtype, device_errors, select
from ..compiling import EVERY_TIME
from ..zero_pages import zero_pages

_lib: Any = torch.library.Library("embedfuse", "FRAGMENT")
_IDS = "Tensor ids, Tensor offsets"
for _schema in (
    f"gather_sum(Tensor table, Tensor? weights, {_IDS}, str policy) -> Tensor",
    f"gather_dot(Tensor table, Tensor x, {_IDS}, str policy) -> Tensor",
    f"scatter_sum(Tensor grad, Tensor? weights, {_IDS}, SymInt rows, ScalarType dtype, str policy) -> Tensor",
    f"scatter_and_dot(Tensor table, Tensor grad, Tensor? weights, {_IDS}, str policy) -> (Tensor, Tensor)",
):
    _lib.define(_schema, tags=EVERY_TIME)


def gather_sum(table: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, policy: Policy) -> Tensor:
    """`[B, D]` of the table's dtype; `weights` `[N]` are of its accumulation dtype."""
    bags, dim = offsets.shape[0] - 1, table.shape[1]
    if bags == 0 or dim == 0 or ids.shape[0] == 0:
        refuse_bad_ids(ids, table.shape[0], policy)
        return table.new_zeros((bags, dim))
    features = one_table.descriptor(table, "sum", 0, False)
    csr = Csr(ids, offsets, None if weights is None else weights.detach(), bags)
    out, _ = select(table.device, table.dtype).pooled_lookup(_flat(table), features, csr, dim, False, policy)
    return out


def gather_dot(table: Tensor, x: Tensor, ids: Tensor, offsets: Tensor, policy: Policy) -> Tensor:
    """`[N]` of the accumulation dtype; `x` `[B, D]` of any float dtype and any strides."""
    bags, dim = offsets.shape[0] - 1, table.shape[1]
    refuse_bad_ids(ids, table.shape[0], policy)
    if bags == 0 or dim == 0 or ids.shape[0] == 0:
        return table.new_zeros(ids.shape, dtype=accumulation_dtype(table.dtype))
    features = one_table.descriptor(table, "sum", 0, False)
    unscaled = table.new_empty(0, dtype=accumulation_dtype(table.dtype))
    csr = Csr(ids, offsets, None, bags)
    return select(table.device, table.dtype).coefficient_grad(_flat(table), features, csr, unscaled, x.detach())


def scatter_sum(
    grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, rows: int, dtype: torch.dtype, policy: Policy
) -> Tensor:
    """`[rows, D]` of `dtype`; `grad` `[B, D]` of any float dtype and any strides."""
    bags, dim = grad.shape
    refuse_bad_ids(ids, rows, policy)
    out, fill = room_for_rows((rows, dim), grad, dtype, ids.shape[0] * bags)
    if bags and dim and rows and ids.shape[0]:
        features = one_table.descriptor(out, "sum", 0, False)
        unscaled = grad.new_empty(0, dtype=accumulation_dtype(dtype))
        csr = Csr(ids, offsets, None if weights is None else weights.detach(), bags)
        select(grad.device, dtype).row_grad(out.view(-1), features, csr, unscaled, grad.detach(), fill=fill)
    return out


def scatter_and_dot(
    table: Tensor, grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, policy: Policy
) -> tuple[Tensor, Tensor]:
    """`scatter_sum` of `grad` to the shape and dtype of `table`, and `gather_dot` of `table` with `grad`."""
    bags, (rows, dim) = offsets.shape[0] - 1, table.shape
    refuse_bad_ids(ids, rows, policy)
    kind = accumulation_dtype(table.dtype)
    out, fill = room_for_rows((rows, dim), table, table.dtype, ids.shape[0] * bags)
    dots = table.new_zeros(ids.shape, dtype=kind)
    if bags and dim and rows and ids.shape[0]:
        features, tables = (one_table.descriptor(out, "sum", 0, False, table=table) for table in (False, True))
        csr = Csr(ids, offsets, None if weights is None else weights.detach(), bags)
        read = Rows(_flat(table), tables)
        engine = select(table.device, table.dtype)
        unscaled = table.new_empty(0, dtype=kind)
        engine.row_grad(out.view(-1), features, csr, unscaled, grad.detach(), read, dots, fill=fill)
    return out, dots


def room_for_rows(shape: tuple[int, int], like: Tensor, dtype: torch.dtype, references: int) -> tuple[Tensor, bool]:
    """Where `row_grad` puts sums, and its `fill`: on a GPU zeros are written to rows that no id names only."""
    if references and like.is_cuda:
        return like.new_empty(shape, dtype=dtype), True
    return zero_pages(shape, like, dtype), False


def refuse_bad_ids(ids: Tensor, rows: int, policy: Policy) -> None:
    """Raises `BadId` for an id outside of `[0, rows)`, on a GPU at a later call; only where the policy says so."""
    if policy != "raise" or ids.shape[0] == 0:
        return
    bad = (ids < 0) | (ids >= rows)
    if ids.device.type != "cuda":
        if bool(bad.any()):
            raise BadId(int(bad.nonzero()[0]))
        return
    # earlier ones first: were it asked after the writing, this call's own might be there already, or not
    flag = device_errors.reported(ids.device)
    # the word that kernels write, see `device_errors`; the largest is the first position
    first = device_errors.POSITION_LIMIT - torch.arange(ids.shape[0], device=ids.device)
    word = torch.where(bad, first << device_errors.FEATURE_BITS, 0).amax()
    torch.maximum(flag, word, out=flag)


def _flat(table: Tensor) -> Tensor:
    # a copy of tables with gaps; `reshape` would keep some of them, such as an expanded number
    return table.detach().contiguous().view(-1)


for _name, _body in (
    ("gather_sum", gather_sum), ("gather_dot", gather_dot), ("scatter_sum", scatter_sum),
    ("scatter_and_dot", scatter_and_dot),
):  # fmt: skip
    _lib.impl(_name, _body, "CompositeExplicitAutograd")


# --- shapes --------------------------------------------------------------------------------------------------------


@torch.library.register_fake("embedfuse::gather_sum", lib=_lib)  # type: ignore[untyped-decorator]
def _(table: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, policy: str) -> Tensor:
    return table.new_empty((offsets.shape[0] - 1, table.shape[1]))


@torch.library.register_fake("embedfuse::gather_dot", lib=_lib)  # type: ignore[untyped-decorator]
def _(table: Tensor, x: Tensor, ids: Tensor, offsets: Tensor, policy: str) -> Tensor:
    return table.new_empty((ids.shape[0],), dtype=accumulation_dtype(table.dtype))


@torch.library.register_fake("embedfuse::scatter_sum", lib=_lib)  # type: ignore[untyped-decorator]
def _(grad: Tensor, weights: Any, ids: Tensor, offsets: Tensor, rows: Any, dtype: torch.dtype, policy: str) -> Tensor:
    return grad.new_empty((rows, grad.shape[1]), dtype=dtype)


@torch.library.register_fake("embedfuse::scatter_and_dot", lib=_lib)  # type: ignore[untyped-decorator]
def _(table: Tensor, grad: Tensor, weights: Any, ids: Tensor, offsets: Tensor, policy: str) -> tuple[Tensor, Tensor]:
    dots = table.new_empty((ids.shape[0],), dtype=accumulation_dtype(table.dtype))
    return table.new_empty(table.shape), dots
