"""TensorFlow's sparse lookups, with DeepRec's signatures and TensorFlow's numbers, each in one gather."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...combiners import COMBINERS
from ...config import check_default_id, check_max_norm
from ...plan import DROP_NEGATIVE_IDS, DROP_NONPOSITIVE_WEIGHTS, NO_DEFAULT
from .. import one_table
from ..backends import BadId, accumulation_dtype
from ..functions import is_transformed, is_watched
from ..prepare import prepared
from . import spread
from .arguments import Ids, read_combiner, read_ids, read_strategy, read_tables
from .shards import Question, sharded_lookup


def fused_safe_embedding_lookup_sparse(
    embedding_weights: Tensor | Sequence[Tensor],
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str | None = "mean",
    default_id: int | None = None,
    name: str | None = None,
    partition_strategy: str | None = "div",
    max_norm: float | None = None,
    prune: bool = True,
) -> Tensor:
    """Rows of a table, weighted and pooled; what is not valid is left out, and an empty bag gives zeros or a default.

    The value and both gradients of `tf.compat.v1.nn.safe_embedding_lookup_sparse`. With one id a bag and no options
    this is `embedding_weights[ids] * weights[:, None]`; in full:

        keep = (ids >= 0) & ((weights > 0) | (combiner == "sum"))         # if prune
        rows = table[ids[keep]]                                           # an empty bag: table[default_id], weight 1
        rows = rows * (max_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)
        sum = zeros(B, D).index_add(0, bag[keep], rows * weights[keep, None])
        out = sum | sum / Σw | sum / √Σw²                                 # "sum" | "mean" | "sqrtn", and 0 / 0 = 0

    Args:
        embedding_weights: the table `[V, D]`, or its shards `[rows, D]`, of any float dtype. Shards may differ in size
            (their real sizes count) and lie on different devices.
        sparse_ids: `SparseIds` or a `torch.sparse_coo_tensor` of ids, of shape `[d0, …, K]` and entries in any order;
            `Bags`; or a jagged nested tensor.
        sparse_weights: one weight an id, in the order of the ids, of any float dtype: a tensor, or a sparse tensor of
            the ids' places. None for ones.
        combiner: "mean", "sum" or "sqrtn"; None is "mean".
        default_id: the row an empty bag gives, with weight 1; it gets its gradient. None gives zeros.
        name: not used; TensorFlow's name of the operation.
        partition_strategy: how ids are dealt out to shards: "div" (or None), one after the other, or "mod", id `i` to
            shard `i % P`.
        max_norm: rows longer than this are cut to it before they are weighted. None takes them as they are.
        prune: leave out negative ids, and, unless the combiner is "sum", ids whose weight is not positive. If False a
            negative id is an error and every weight counts.

    Returns:
        `[d0, …, D]`, of the table's dtype: every bag of the shape has a row, trailing empty ones too.

    Raises:
        TypeError, ValueError: an argument that is not as said.
        IndexError: an id outside the table; on a GPU at a later call, see `docs/semantics.md`.

    Example:
        >>> table = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        >>> ids = SparseIds(torch.tensor([[0, 0], [0, 1], [2, 0]]), torch.tensor([2, 0, -1]), (3, 2))
        >>> fused_safe_embedding_lookup_sparse(table, ids, combiner="sum")
        tensor([[ 4., 40.],
                [ 0.,  0.],
                [ 0.,  0.]])
    """
    tables = read_tables("embedding_weights", embedding_weights)
    ids = read_ids("sparse_ids", sparse_ids, sparse_weights)
    if not isinstance(prune, bool):
        raise TypeError(f"`prune` must be True or False, got {prune!r}")
    return _look_up(tables, ids, combiner, default_id, partition_strategy, max_norm, prune)


def fused_embedding_lookup_sparse(
    params: Tensor | Sequence[Tensor],
    sp_ids: Any,
    sparse_weights: Any = None,
    partition_strategy: str | None = None,
    name: str | None = None,
    combiner: str | None = None,
    max_norm: float | None = None,
    default_id: int | None = None,
    prune_invalid_ids: bool = False,
    blocknums: Any = None,
) -> Tensor:
    """`fused_safe_embedding_lookup_sparse` for ids of rank 2, which by default leaves nothing out.

    Where TensorFlow's `embedding_lookup_sparse` gives no row for trailing empty bags, this gives zeros.

    Args:
        params: as `embedding_weights` there.
        sp_ids: as `sparse_ids` there, of rank 2.
        sparse_weights: as there.
        partition_strategy: as there; None is "div".
        name: not used.
        combiner: as there; None is "mean".
        max_norm: as there.
        default_id: as there.
        prune_invalid_ids: as `prune` there.
        blocknums: must be None; it belongs to tables of dynamic dimension, which this library does not have yet.

    Returns:
        `[B, D]`.

    Raises:
        TypeError, ValueError, IndexError: as there.
    """
    if blocknums is not None:
        raise ValueError(
            "`blocknums` must be None: it says how many blocks of a dynamic-dimension table to read, and `params` are "
            "plain tables"
        )
    if not isinstance(prune_invalid_ids, bool):
        raise TypeError(f"`prune_invalid_ids` must be True or False, got {prune_invalid_ids!r}")
    tables = read_tables("params", params)
    ids = read_ids("sp_ids", sp_ids, sparse_weights, most=2)
    return _look_up(tables, ids, combiner, default_id, partition_strategy, max_norm, prune_invalid_ids)


def _look_up(
    tables: list[Tensor], given: Ids, combiner: str | None, default_id: int | None, strategy: str | None,
    max_norm: float | None, prune: bool,
) -> Tensor:  # fmt: skip
    pooling, modulo = read_combiner(combiner), read_strategy(strategy)
    sizes = tuple(table.shape[0] for table in tables)
    check_max_norm(max_norm)
    check_default_id(default_id, sum(sizes))
    bags = given.bags
    ids, offsets, weights = bags.ids.contiguous(), bags.offsets.contiguous(), bags.weights
    flags = DROP_NEGATIVE_IDS if prune else 0
    if weights is not None:
        if prune and pooling != "sum":
            flags |= DROP_NONPOSITIVE_WEIGHTS
        weights = weights.to(accumulation_dtype(tables[0].dtype)).contiguous()
    devices = {spread.home_of(table) for table in tables}
    if len(devices) == 1 and ids.device not in devices:
        raise ValueError(f"the ids must be on the device of the table, {tables[0].device}, got {ids.device}: move them")
    question = Question(
        sizes, tables[0].shape[1], modulo, pooling, flags, math.inf if max_norm is None else float(max_norm),
        NO_DEFAULT if default_id is None else int(default_id),
    )  # fmt: skip
    _check_default_shard(question)
    try:
        if len(devices) > 1:
            out = spread.spread_lookup(question, tables, ids, offsets, weights)
        elif len(tables) > 1 and not (is_watched(*tables, ids, weights) or is_transformed()):
            out = sharded_lookup(question, [table.contiguous() for table in tables], ids, offsets, weights)
        else:
            out = _in_one(question, _joined(tables, modulo), ids, offsets, weights)
    except BadId as error:
        raise IndexError(_bad_id(question, ids, offsets, error.position)) from None
    return out if given.shape == (out.shape[0],) else out.reshape(*given.shape, question.dim)


def _joined(tables: list[Tensor], modulo: bool) -> Tensor:
    """Shards as one table, for calls that are traced; by remainder only where they are of TensorFlow's sizes."""
    if len(tables) == 1:
        return tables[0].contiguous()
    if not modulo:
        return torch.cat(tables)
    total, count = sum(table.shape[0] for table in tables), len(tables)
    for number, table in enumerate(tables):
        if table.shape[0] != len(range(number, total, count)):
            raise NotImplementedError(
                f"traced lookups need shards of the sizes that {total} rows dealt out by remainder have, got "
                f"{table.shape[0]} rows in shard {number} of {count}: call them uncompiled"
            )
    most = tables[0].shape[0]
    padded = [torch.nn.functional.pad(table, (0, 0, 0, most - table.shape[0])) for table in tables]
    return torch.stack(padded, 1).reshape(most * count, -1)[:total]


def _in_one(question: Question, table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    watched = is_watched(table, ids, weights)
    about = (table, question.combiner, question.flags, watched, question.max_norm, question.default_id)
    features = one_table.descriptor(*about)
    ready, ends, moved = prepared(features, ids, offsets, weights, offsets.shape[0] - 1, "raise", 0)
    cut = None if question.max_norm == math.inf else one_table.descriptor(*about, table=True)
    normalised = COMBINERS[question.combiner].power != 0
    return one_table.pooled(table, features, ready, ends, moved, normalised, "drop", watched, cut)


def _check_default_shard(question: Question) -> None:
    """By remainder, and with shards of other sizes than TensorFlow's, some numbers below the total have no row."""
    if question.modulo and question.default_id != NO_DEFAULT:
        count = len(question.sizes)
        rows = question.sizes[question.default_id % count]
        if question.default_id // count >= rows:
            raise ValueError(
                f"`default_id` must be a row of the table, got {question.default_id}, which is row "
                f"{question.default_id // count} of shard {question.default_id % count} of {rows} rows"
            )


def _bad_id(question: Question, ids: Tensor, offsets: Tensor, position: int) -> str:
    bag, value = int(torch.searchsorted(offsets, position, right=True)) - 1, int(ids[position])
    hint = "clean the ids or enlarge the table"
    if value < 0:
        hint = "prune negative ids (`prune`, `prune_invalid_ids`) or clean them"
    elif value < sum(question.sizes):
        hint = f"shard {value % len(question.sizes)} is too short for it"
    return (
        f"ids must lie in [0, {sum(question.sizes)}), the rows of all shards, got {value} in bag {bag}, at position "
        f"{position} of the ids: {hint}"
    )
