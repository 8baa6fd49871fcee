"""Gather rows, weigh them, sum them: the primitives of memory layers, of any number of dimensions.

No gathered row is ever in memory: forward and backward allocate nothing of the order of `indices.numel() * D`. Each is
differentiable any number of times, in forward and reverse mode, through the others.
"""

from typing import Literal

import torch
from torch import Tensor

from ..backends import Policy
from ..bag_arguments import FLOAT_TYPES
from ..collection import EmbeddingCollection
from . import functions as gather_functions
from .arguments import check_choices, check_each, checked, read_indices, read_vectors, read_weights
from .tables import goes_through_collection, open_for, table_and_sink, through_collection


def gather_reduce_sum(
    params: Tensor | EmbeddingCollection,
    indices: Tensor,
    weights: Tensor | None = None,
    *,
    grad: Literal["dense", "sparse"] = "dense",
    grad_into: Tensor | None = None,
    row_mask: Tensor | None = None,
    out_of_range: Policy = "raise",
) -> Tensor:
    """Weighted sums of rows of a table.

    Equivalent, with ones for `weights=None`, to

        torch.einsum("...k,...kd->...d", weights, params[indices])

    Sums are made in float32 at least and rounded once. The gradient of `weights` is made only if it is needed.

    Args:
        params: the table, `[V, D]` of any float dtype; or an `EmbeddingCollection` of one feature with
            `combiner="sum"`, whose `FusedOptimizer` then steps the rows as its `update` says.
        indices: integers `[..., K]`.
        weights: `[..., K]`, of any float dtype, also another than that of `params`.
        grad: the gradient of `params` is "dense", or "sparse": a `torch.sparse_coo` tensor of the distinct rows.
        grad_into: float32 (float64 for float64 tables) `[V, D]`: gradients of `params` are added to it in backward, and
            `params.grad` stays as it is.
        row_mask: bool `[V]`: rows where it is False get no gradient, and no step of an optimizer; they are read like
            the others. For fine-tuning some slots of a memory (Lin et al. 2025, arXiv:2510.15103).
        out_of_range: indices outside of `[0, V)` "raise" (on a GPU at a later call, since checking must not wait), or
            count as absent: "drop", and "ignore".

    Returns:
        `[..., D]` of the dtype of `params`.

    Raises:
        IndexError: an index outside of the table.
        ValueError, TypeError: arguments that do not fit together.
        NotImplementedError: `grad_into`, `row_mask`, `grad="sparse"` or a collection inside of `torch.func` transforms;
            all but the last also where the call is compiled.
    """
    ids, offsets, shape = read_indices("indices", indices)
    check_choices(grad, out_of_range)
    if isinstance(params, EmbeddingCollection) and goes_through_collection(params, ids, row_mask):
        if weights is not None:
            check_each("weights", weights, indices)
        flat = None if weights is None else weights.reshape(-1)
        out = through_collection(params, "params", ids, offsets, flat, out_of_range)
        return out.view(*shape[:-1], out.shape[1])
    table, sink = table_and_sink("params", params, indices, grad, grad_into, row_mask)
    flat = read_weights("weights", weights, indices, table)
    out = checked(
        lambda: gather_functions.gather_sum(table, flat, ids, offsets, out_of_range, sink), indices, table.shape[0]
    )
    open_for(sink)
    return out.view(*shape[:-1], table.shape[1])


def gather_dot(
    table: Tensor | EmbeddingCollection,
    x: Tensor,
    indices: Tensor,
    *,
    grad: Literal["dense", "sparse"] = "dense",
    grad_into: Tensor | None = None,
    row_mask: Tensor | None = None,
    out_of_range: Policy = "raise",
) -> Tensor:
    """The dot products of each vector of `x` with rows of a table.

    Equivalent to `torch.einsum("...kd,...d->...k", table[indices], x)`, summed in float32 at least.

    Args:
        table: as `params` of `gather_reduce_sum`.
        x: `[..., D]` of any float dtype. Its gradient, a sum of rows, is rounded to the table's on the way.
        indices: integers `[..., K]`, whose other dimensions are those of `x`.
        grad: as in `gather_reduce_sum`.
        grad_into: as in `gather_reduce_sum`.
        row_mask: as in `gather_reduce_sum`.
        out_of_range: as in `gather_reduce_sum`; absent rows give 0.

    Returns:
        `[..., K]` of the dtype that `table` and `x` promote to.

    Raises:
        IndexError, ValueError, TypeError, NotImplementedError: as `gather_reduce_sum`.
    """
    ids, offsets, shape = read_indices("indices", indices)
    check_choices(grad, out_of_range)
    rows, sink = table_and_sink("table", table, indices, grad, grad_into, row_mask)
    vectors = read_vectors("x", x, indices, rows.shape[1])
    out = checked(
        lambda: gather_functions.gather_dot(rows, vectors, ids, offsets, out_of_range, sink), indices, rows.shape[0]
    )
    open_for(sink)
    return out.to(torch.promote_types(rows.dtype, x.dtype)).view(shape)


def scatter_rows(
    indices: Tensor,
    weights: Tensor | None,
    grad: Tensor,
    num_rows: int,
    *,
    dtype: torch.dtype | None = None,
    out_of_range: Policy = "raise",
) -> Tensor:
    """Adds weighted vectors to rows of a table of zeros: what `gather_reduce_sum` is transposed to.

    Equivalent, with ones for `weights=None`, to

        values = weights[..., None] * grad[..., None, :]
        torch.zeros(num_rows, D).index_add(0, indices.flatten(), values.flatten(0, -2))

    but duplicates are summed in float32 at least, in a fixed order, and rounded once.

    Args:
        indices: integers `[..., K]`.
        weights: `[..., K]` of any float dtype.
        grad: `[..., D]` of any float dtype.
        num_rows: rows of the result.
        dtype: of the result; that of `grad` if None.
        out_of_range: as in `gather_reduce_sum`.

    Returns:
        `[num_rows, D]`.

    Raises:
        IndexError, ValueError, TypeError: as `gather_reduce_sum`.
    """
    ids, offsets, _ = read_indices("indices", indices)
    check_choices("dense", out_of_range)
    if num_rows < 0:
        raise ValueError(f"`num_rows` must be at least 0, got {num_rows}")
    kind = grad.dtype if dtype is None else dtype
    if kind not in FLOAT_TYPES:
        raise TypeError(f"`dtype` must be float32, float16, bfloat16 or float64, got {kind}")
    vectors = read_vectors("grad", grad, indices, None)
    flat = read_weights("weights", weights, indices, grad, kind)
    return checked(
        lambda: gather_functions.scatter_sum(vectors, flat, ids, offsets, num_rows, kind, out_of_range),
        indices, num_rows,
    )  # fmt: skip
