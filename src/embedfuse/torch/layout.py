"""A batch of features → the ids, offsets and weights of one launch.

Every feature is brought to the same form: `copies` blocks of `bags` bags each. A pooled feature is one block; a
sequence of L places, or a dense tensor `[B, L]`, is L blocks of bags of one, so that it rides in the same launch as
the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import FeatureConfig, TableConfig
from ..plan import DROP_NEGATIVE_IDS, DROP_NONPOSITIVE_WEIGHTS, NO_DEFAULT, PlannedFeature, PlannedTable, plan_group
from .backends import select
from .backends.eager_sums import join_offsets
from .bags import Bags, SparseIds, check_ids
from .functions import is_watched


class Part(NamedTuple):
    """One feature of a batch. `offsets=None` means one id a bag."""

    ids: Tensor  # [n], block after block
    offsets: Tensor | None  # [bags + 1]; only where copies == 1
    weights: Tensor | None
    bags: int
    copies: int
    shape: tuple[int, ...]  # of the output, without dim


@dataclass(frozen=True)
class Launch:
    """The descriptors of one group for given numbers of copies, on the device."""

    features: Tensor  # int64 [sum of copies, FEATURE_WIDTH]
    width: int
    normalised: bool
    has_defaults: bool
    cut: Tensor | None  # int64 [T, TABLE_WIDTH], if rows of any table are cut to a length


def plan_launch(
    tables: Sequence[PlannedTable], planned: Sequence[PlannedFeature], copies: Sequence[int], device: Any
) -> Launch:
    """Descriptors in which feature `f` appears `copies[f]` times in a row."""
    repeated = [feature for feature, count in zip(planned, copies, strict=True) for _ in range(count)]
    group = plan_group(tables, repeated)
    is_cut = any(table.max_norm != math.inf for table in tables)
    return Launch(
        torch.from_numpy(group.features).to(device),
        group.width,
        group.normalised,
        any(feature.default_id != NO_DEFAULT for feature in planned),
        torch.from_numpy(group.tables).to(device) if is_cut else None,
    )


def planned_feature(config: FeatureConfig, table: int) -> PlannedFeature:
    """What the engine must know of a feature of the collection."""
    combiner = config.effective_combiner
    flags = 0
    if config.validate_weights_and_indices:
        flags = DROP_NEGATIVE_IDS | (0 if combiner == "sum" else DROP_NONPOSITIVE_WEIGHTS)
    if config.max_sequence_length:
        combiner, flags = "sum", DROP_NEGATIVE_IDS
    return PlannedFeature(table, combiner, flags, NO_DEFAULT if config.default_id is None else config.default_id)


def planned_table(config: TableConfig) -> PlannedTable:
    """What the engine must know of a table of the collection."""
    max_norm = math.inf if config.max_norm is None else float(config.max_norm)
    return PlannedTable(config.vocabulary_size, config.dim, max_norm)


def part_of(name: str, config: FeatureConfig, value: Any) -> Part:
    """Reads one feature of a batch; `name` is for messages.

    Raises:
        TypeError: a value that is no `Bags`, `SparseIds`, integer tensor or jagged nested tensor.
        ValueError: a dense tensor or weights for a sequence feature, or an `output_shape` that does not fit.
    """
    length = config.max_sequence_length if config.output_shape is None else 0
    if isinstance(value, Tensor) and value.is_nested:
        value = Bags.from_nested(value)
    if isinstance(value, SparseIds):
        if length and len(value.dense_shape) == 2:
            return _sequence(_matrix_of_sparse(value, length))
        return _pooled(name, config, value.to_bags(), tuple(value.dense_shape[:-1]))
    if isinstance(value, Bags):
        if length:
            _refuse_weights(name, value)
            return _sequence(_matrix_of_bags(value, length))
        return _pooled(name, config, value, (value.offsets.shape[0] - 1,))
    if isinstance(value, Tensor):
        check_ids(name, value)
        if config.max_sequence_length:
            raise ValueError(
                f"feature {name!r} has `max_sequence_length={config.max_sequence_length}`: give it Bags or SparseIds, "
                f"got a dense tensor of shape {tuple(value.shape)}"
            )
        return _dense(value)
    raise TypeError(
        f"feature {name!r} must be Bags, SparseIds, an integer tensor or a jagged nested tensor, got "
        f"{type(value).__name__}: use Bags.from_lists, .from_padded or .from_arrow"
    )


def _pooled(name: str, config: FeatureConfig, bags: Bags, shape: tuple[int, ...]) -> Part:
    # not len(): it would fix the batch size in a compiled graph
    count = bags.offsets.shape[0] - 1
    if config.output_shape is not None:
        product = 1
        for size in config.output_shape:
            product *= size
        if product != count:
            if product > count > 0 and product % count == 0:
                _refuse_weights(name, bags)
                part = _sequence(_matrix_of_bags(bags, product // count))
                return part._replace(shape=config.output_shape)
            raise ValueError(
                f"feature {name!r} has `output_shape={config.output_shape}` of {product} places, got {count} bags: the "
                "places must be the number of bags or a multiple of it"
            )
        shape = config.output_shape
    return Part(bags.ids, bags.offsets, bags.weights, count, 1, shape)


def _dense(ids: Tensor) -> Part:
    shape = tuple(ids.shape)
    count = shape[0] if shape else 1
    copies = 1
    for size in shape[1:]:
        copies *= size
    if copies != 1:
        ids = ids.reshape(count, copies).t()
    return Part(ids.reshape(-1), None, None, count, copies, shape)


def _sequence(matrix: Tensor) -> Part:
    count, length = matrix.shape
    return Part(matrix.t().reshape(-1), None, None, count, length, (count, length))


def _matrix_of_bags(bags: Bags, length: int) -> Tensor:
    """The first `length` ids of each bag, `[B, length]`, and -1 after the bag's end."""
    place = torch.arange(length, device=bags.device)
    at = bags.offsets[:-1, None] + place
    inside = at < bags.offsets[1:, None]
    if bags.ids.shape[0] == 0:
        return bags.ids.new_full((bags.offsets.shape[0] - 1, length), -1)
    return torch.where(inside, bags.ids[at.clamp(max=bags.ids.shape[0] - 1)], -1)


def _matrix_of_sparse(ids: SparseIds, length: int) -> Tensor:
    """Ids at their column, -1 where there is none; columns from `length` on are left out."""
    count = ids.dense_shape[0]
    matrix = ids.values.new_full((count, length + 1), -1)
    matrix[ids.indices[:, 0], ids.indices[:, 1].clamp(max=length)] = ids.values
    return matrix[:, :length]


def _refuse_weights(name: str, bags: Bags) -> None:
    if bags.weights is not None:
        raise ValueError(f"feature {name!r} is a sequence and takes no weights: scale its output rows instead")


def assemble(parts: Sequence[Part], weights_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """All features of a launch as `ids [N]`, `offsets [F * B + 1]`, `weights [N]` or None, and B.

    A feature with fewer bags than the largest is filled up with empty ones.
    """
    bags = parts[0].bags
    if any(part.bags != bags for part in parts):
        bags = max(part.bags for part in parts)
    parts = [part if part.bags == bags or part.copies == 1 else _fill_up(part, bags) for part in parts]
    kinds = {part.ids.dtype for part in parts}
    kind = torch.int64 if len(kinds) > 1 else parts[0].ids.dtype
    pieces = [part.ids if part.ids.dtype == kind else part.ids.to(kind) for part in parts]
    ids = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)
    weights = None
    if any(part.weights is not None for part in parts):
        given = [
            torch.ones_like(part.ids, dtype=weights_dtype) if part.weights is None else part.weights.to(weights_dtype)
            for part in parts
        ]
        weights = given[0].contiguous() if len(given) == 1 else torch.cat(given)
    return ids, _offsets(parts, bags, ids), weights, bags


def _offsets(parts: Sequence[Part], bags: int, ids: Tensor) -> Tensor:
    if all(part.offsets is None and part.bags == bags for part in parts):
        return torch.arange(ids.shape[0] + 1, device=ids.device)
    if len(parts) == 1 and parts[0].offsets is not None:
        return parts[0].offsets
    rows: list[Tensor] = []
    for part in parts:
        if part.offsets is None:
            rows.extend([torch.arange(bags + 1, device=ids.device).clamp(max=part.bags)] * part.copies)
        elif part.bags == bags:
            rows.append(part.offsets)
        else:
            rows.append(torch.cat([part.offsets, part.offsets[-1:].expand(bags - part.bags)]))
    stacked = torch.stack(rows)
    if is_watched(ids):
        return join_offsets(stacked)
    return select(ids.device, torch.float32).join_offsets(stacked)


def without_fillers(rows: Tensor, offsets: Tensor, parts: Sequence[Part], bags: int) -> Tensor:
    """Prepared ids without the defaults of bags that only fill a feature up: nobody looked those rows up."""
    fillers, first = [], 0
    for part in parts:
        for _ in range(part.copies):
            if part.bags != bags:
                fillers.append(torch.arange(first + part.bags, first + bags, device=rows.device))
            first += bags
    # the default is the last of its bag
    return rows.index_fill(0, offsets[torch.cat(fillers) + 1] - 1, -1)


def _fill_up(part: Part, bags: int) -> Part:
    ids = part.ids.reshape(part.copies, part.bags)
    missing = ids.new_full((part.copies, bags - part.bags), -1)
    return part._replace(ids=torch.cat([ids, missing], 1).reshape(-1), bags=bags)
