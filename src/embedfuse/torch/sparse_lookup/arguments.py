"""The arguments of TensorFlow's sparse lookups: what they may be, and what is said if they are not."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...combiners import COMBINERS
from ..bag_arguments import FLOAT_TYPES
from ..bag_checks import check_jagged, check_same_lengths
from ..bags import Bags, SparseIds

STRATEGIES = ("div", "mod")


class Ids(NamedTuple):
    """Bags, and the sizes they come back in."""

    bags: Bags
    shape: tuple[int, ...]


def read_tables(name: str, given: Any) -> list[Tensor]:
    """One table or its shards as a list, checked; `name` is that of the argument."""
    # no union: the compiler of torch 2.9 knows none
    tables = list(given) if isinstance(given, (Sequence, torch.nn.ParameterList)) else [given]
    if given is None or not tables:
        raise ValueError(f"`{name}` must be a table or a list of its shards, got {given!r}")
    for table in tables:
        if not isinstance(table, Tensor):
            raise TypeError(f"`{name}` must hold tensors, got {type(table).__name__}: give a module's `.weight`")
        if table.dim() != 2:
            raise ValueError(f"`{name}` must hold tables [rows, dim], got shape {tuple(table.shape)}")
        if table.dtype not in FLOAT_TYPES:
            raise TypeError(f"`{name}` must be float32, float16, bfloat16 or float64, got {table.dtype}")
        if table.shape[1] != tables[0].shape[1]:
            raise ValueError(
                f"`{name}` must be shards of one width, got {tables[0].shape[1]} and {table.shape[1]}: look different "
                "tables up one by one, or in an EmbeddingCollection"
            )
        if table.dtype != tables[0].dtype:
            raise TypeError(f"`{name}` must be shards of one dtype, got {tables[0].dtype} and {table.dtype}")
    if tables[0].shape[1] == 0:
        raise ValueError(f"`{name}` must have at least one column, got shape {tuple(tables[0].shape)}")
    return tables


def read_strategy(value: Any) -> bool:
    """Whether ids are dealt out by remainder (`"mod"`); None means `"div"`."""
    if value not in (None, *STRATEGIES):
        hint = " (`mod_ev` is of DeepRec's dynamic tables)" if value == "mod_ev" else ""
        raise ValueError(f'`partition_strategy` must be "div", "mod" or None, got {value!r}{hint}')
    return bool(value == "mod")


def read_combiner(value: Any) -> str:
    """The combiner; None means the mean."""
    if value is None:
        return "mean"
    if value not in COMBINERS:
        raise ValueError(f"`combiner` must be one of {', '.join(COMBINERS)}, or None for mean, got {value!r}")
    return str(value)


def read_ids(name: str, ids: Any, weights: Any, most: int | None = None) -> Ids:
    """Ids and weights as bags; `name` is that of the argument, `most` the largest rank it may have."""
    if isinstance(ids, Bags):
        return Ids(_bags_with(name, ids, weights), (ids.offsets.shape[0] - 1,))
    if isinstance(ids, Tensor) and ids.is_nested:
        check_jagged(name, ids)
        given = weights
        if isinstance(weights, Tensor) and weights.is_nested:
            check_jagged("sparse_weights", weights)
            check_same_lengths("sparse_weights", weights, ids)
            given = weights.values()
        bags = Bags.from_nested(ids)
        return Ids(_bags_with(name, bags, given), (bags.offsets.shape[0] - 1,))
    if isinstance(ids, Tensor) and ids.layout == torch.sparse_coo:
        _check_rank(name, ids.shape)
        ids = SparseIds(ids._indices().t(), ids._values(), ids.shape)
    if not isinstance(ids, SparseIds):
        shown = f"a dense tensor of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(
            f"`{name}` must be SparseIds, Bags, a sparse COO tensor or a jagged nested tensor, got {shown}: use "
            "Bags.from_padded for a matrix of ids"
        )
    if most is not None and len(ids.dense_shape) > most:
        raise ValueError(
            f"`{name}` must have rank {most}, got dense_shape {ids.dense_shape}: fused_safe_embedding_lookup_sparse "
            "takes more"
        )
    return Ids(ids.to_bags(_flat_weights(ids, weights)), tuple(ids.dense_shape[:-1]))


def _check_rank(name: str, shape: Sequence[int]) -> None:
    if len(shape) < 2:
        raise ValueError(f"`{name}` must have rank 2 or more, got shape {tuple(shape)}: a bag is the last dimension")


def _bags_with(name: str, bags: Bags, weights: Any) -> Bags:
    if weights is None:
        return bags
    if bags.weights is not None:
        raise ValueError(f"`sparse_weights` must be None where `{name}` has weights of its own: give them once")
    if isinstance(weights, Bags):
        raise TypeError("`sparse_weights` must be a tensor with one weight for each id, got Bags")
    _check_weights(weights, bags.ids)
    return Bags(bags.ids, bags.offsets, weights)


def _flat_weights(ids: SparseIds, weights: Any) -> Tensor | None:
    if weights is None:
        return None
    if isinstance(weights, Tensor) and weights.layout == torch.sparse_coo:
        indices, given = weights._indices().t(), weights._values()
        if tuple(weights.shape) != ids.dense_shape or indices.shape != ids.indices.shape:
            raise ValueError(
                f"`sparse_weights` must have the shape and places of the ids, {ids.dense_shape} with "
                f"{ids.indices.shape[0]} ids, got {tuple(weights.shape)} with {indices.shape[0]}"
            )
        # on a GPU it would have to wait to know
        if indices.device.type == "cpu" and not torch.equal(indices, ids.indices):
            raise ValueError("`sparse_weights` must list its places in the order of the ids: do not coalesce only one")
        weights = given
    _check_weights(weights, ids.values)
    flat: Tensor = weights
    return flat


def _check_weights(weights: Any, ids: Tensor) -> None:
    if not isinstance(weights, Tensor) or not weights.dtype.is_floating_point:
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(
            f"`sparse_weights` must be a floating-point tensor or a sparse one, got {kind}: give a tensor of one "
            "weight for each id"
        )
    if weights.shape != ids.shape:
        raise ValueError(
            f"`sparse_weights` must have one weight for each of the {ids.shape[0]} ids, got shape "
            f"{tuple(weights.shape)}"
        )
    if weights.device != ids.device:
        raise ValueError(f"`sparse_weights` must be on the device of the ids, {ids.device}, got {weights.device}")
