"""A batch of features → the ids, offsets and weights of one launch.

Every feature is brought to the same form: `copies` blocks of `bags` bags each. A pooled feature is one block; a
sequence of L places, or a dense tensor `[B, L]`, is L blocks of bags of one, so that it rides in the same launch as
the rest.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import FeatureConfig, TableConfig
from ..plan import DROP_NEGATIVE_IDS, DROP_NONPOSITIVE_WEIGHTS, NO_DEFAULT, PlannedFeature, PlannedTable, plan_group
from .backends import select
from .backends.eager_sums import join_offsets
from .bag_checks import ID_TYPES, check_ids
from .bags import Bags, SparseIds
from .compiling import is_exporting
from .functions import is_watched


class Part(NamedTuple):
    """One feature of a batch. `offsets=None` means one id a bag."""

    ids: Tensor  # [n], block after block
    offsets: Tensor | None  # [bags + 1]; only where copies == 1
    weights: Tensor | None
    bags: int
    copies: int
    shape: tuple[int, ...]  # of the output, without dim
    is_sequence: bool = False  # with ids of -1 where a bag has no more
    inside: Tensor | None = None  # bool [bags, copies], of a sequence: which places are before the end of their bag


Assembled = tuple[Tensor, Tensor, Tensor | None, int]
"""All features of a launch: `ids [N]`, `offsets [F * B + 1]`, `weights [N]` or None, and B."""


Forms = tuple[tuple[int, ...], tuple[bool, ...], bool]
"""For each feature its copies, and whether they are places of a sequence; and whether all bags are of one id."""


@dataclass(eq=False)
class Launch:
    """The descriptors of one group for given forms of its features, on the device."""

    features: Tensor  # int64 [sum of copies, FEATURE_WIDTH]
    width: int
    normalised: bool
    has_defaults: bool
    cut: Tensor | None  # int64 [T, TABLE_WIDTH], if rows of any table are cut to a length
    is_single: bool  # whether ids, offsets and weights may be the caller's own tensors, there being nothing to join
    sequences: tuple[bool, ...]  # for each row of `features`, whether it is a place of a sequence
    described: tuple[np.ndarray, np.ndarray]  # `features` and `cut`, for the next device

    def move(self, device: Any) -> None:
        """Follows the tables to another device."""
        # a tensor made in inference mode could never be saved for a backward
        with torch.inference_mode(False):
            self.features = torch.from_numpy(self.described[0]).to(device)
            if self.cut is not None:
                self.cut = torch.from_numpy(self.described[1]).to(device)


def plan_launch(
    tables: Sequence[PlannedTable], planned: Sequence[PlannedFeature], copies: Sequence[int], device: Any,
    sequences: Sequence[bool] = (), one_each: bool = False,
) -> Launch:  # fmt: skip
    """Descriptors in which feature `f` appears `copies[f]` times in a row; `sequences[f]`: as places of a sequence.

    With `one_each` no bag has more than one id, nor any a weight: a mean is a sum then, and divides by nothing.
    """
    sequences = sequences or [False] * len(planned)
    formed = [
        replace(feature, combiner="sum", flags=DROP_NEGATIVE_IDS) if is_sequence
        else replace(feature, combiner="sum") if one_each else feature
        for feature, is_sequence in zip(planned, sequences, strict=True)
    ]  # fmt: skip
    group = plan_group(tables, [f for f, count in zip(formed, copies, strict=True) for _ in range(count)])
    is_cut = any(table.max_norm != math.inf for table in tables)
    has_defaults = any(feature.default_id != NO_DEFAULT for feature in planned)
    with torch.inference_mode(False):
        return Launch(
            torch.from_numpy(group.features).to(device),
            group.width,
            group.normalised,
            has_defaults,
            torch.from_numpy(group.tables).to(device) if is_cut else None,
            len(planned) == 1 and not has_defaults,
            tuple(is_sequence for is_sequence, count in zip(sequences, copies, strict=True) for _ in range(count)),
            (group.features, group.tables),
        )


def planned_feature(config: FeatureConfig, table: int) -> PlannedFeature:
    """What the engine must know of a feature of the collection."""
    combiner = config.effective_combiner
    flags = 0
    if config.validate_weights_and_indices:
        flags = DROP_NEGATIVE_IDS | (0 if combiner == "sum" else DROP_NONPOSITIVE_WEIGHTS)
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
    if isinstance(value, Tensor):
        if not value.is_nested:
            return _dense(name, config, value)
        value = Bags.from_nested(value)
    if isinstance(value, SparseIds):
        if length and len(value.dense_shape) == 2:
            return _sequence(_matrix_of_sparse(value, _folded(config, value.values), length))
        if length and not torch.compiler.is_compiling():
            warnings.warn(
                f"feature {name!r} ignores `max_sequence_length={length}`: sparse ids of {len(value.dense_shape)} "
                "dimensions are pooled over the last, as TensorFlow does. Give it sparse ids of 2 dimensions",
                stacklevel=2,
            )
        return _pooled(name, config, value.to_bags(), tuple(value.dense_shape[:-1]))
    if isinstance(value, Bags):
        if length:
            _refuse_weights(name, value)
            return _sequence(*_matrix_of_bags(value, _folded(config, value.ids), length))
        return _pooled(name, config, value, (value.offsets.shape[0] - 1,))
    raise TypeError(
        f"feature {name!r} must be Bags, SparseIds, an integer tensor or a jagged nested tensor, got "
        f"{type(value).__name__}: use Bags(ids, offsets), Bags.from_lists, .from_padded or .from_arrow"
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
                part = _sequence(*_matrix_of_bags(bags, _folded(config, bags.ids), product // count))
                return part._replace(shape=config.output_shape)
            raise ValueError(
                f"feature {name!r} has `output_shape={config.output_shape}` of {product} places, got {count} bags: the "
                "places must be the number of bags or a multiple of it"
            )
        shape = config.output_shape
    return Part(bags.ids, bags.offsets, bags.weights, count, 1, shape)


def _dense(name: str, config: FeatureConfig, ids: Tensor) -> Part:
    check_ids(name, ids)
    if config.max_sequence_length:
        raise ValueError(
            f"feature {name!r} has `max_sequence_length={config.max_sequence_length}`: give it Bags or SparseIds, "
            f"got a dense tensor of shape {tuple(ids.shape)}"
        )
    shape = tuple(ids.shape)
    if len(shape) == 1:
        return Part(ids, None, None, shape[0], 1, shape)
    count = shape[0] if shape else 1
    copies = 1
    for size in shape[1:]:
        copies *= size
    if copies != 1:
        ids = ids.reshape(count, copies).t()
    return Part(ids.reshape(-1), None, None, count, copies, shape)


def _sequence(matrix: Tensor, inside: Tensor | None = None) -> Part:
    """A place a copy. The launch drops negative ids, and with them the padding, whatever the feature says of them."""
    count, length = matrix.shape
    return Part(matrix.t().reshape(-1), None, None, count, length, (count, length), True, inside)


_TOP = 2**63 - 1


def _folded(config: FeatureConfig, ids: Tensor) -> Tensor:
    """Negative ids as huge ones, if they are to be out of range: in a sequence, negative ids are but padding."""
    return ids if config.validate_weights_and_indices else ids.long() & _TOP


def unfolded(value: int) -> int:
    """What `_folded` was given."""
    return value - _TOP - 1 if value > _TOP // 2 else value


def _matrix_of_bags(bags: Bags, ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` ids of each bag, `[B, length]`, and -1 after the bag's end; and which are before it."""
    place = torch.arange(length, device=bags.device)
    at = bags.offsets[:-1, None] + place
    inside = at < bags.offsets[1:, None]
    if is_exporting():
        # one more to read, so that the program serves no ids, too
        ids = torch.cat([ids, ids.new_full((1,), -1)])
    elif ids.shape[0] == 0:
        return ids.new_full((bags.offsets.shape[0] - 1, length), -1), inside
    return torch.where(inside, ids[at.clamp(max=ids.shape[0] - 1)], -1), inside


def _matrix_of_sparse(sparse: SparseIds, ids: Tensor, length: int) -> Tensor:
    """Ids at their column, -1 where there is none; columns from `length` on are left out."""
    count = sparse.dense_shape[0]
    matrix = ids.new_full((count, length + 1), -1)
    matrix[sparse.indices[:, 0], sparse.indices[:, 1].clamp(max=length)] = ids
    return matrix[:, :length]


def _refuse_weights(name: str, bags: Bags) -> None:
    if bags.weights is not None:
        raise ValueError(f"feature {name!r} is a sequence and takes no weights: scale its output rows instead")


def forms_of(parts: Sequence[Part]) -> Forms:
    """What a launch is planned by."""
    one_each = all(part.offsets is None for part in parts)
    return tuple([part.copies for part in parts]), tuple([part.is_sequence for part in parts]), one_each


def assemble(parts: Sequence[Part]) -> Assembled:
    """All features of a launch.

    A feature with fewer bags than the largest is filled up with empty ones.
    """
    bags = parts[0].bags
    if any(part.bags != bags for part in parts):
        bags = max(part.bags for part in parts)
    ids = [part.ids for part in parts]
    weights = _joined_weights(ids, [part.weights for part in parts])
    together = _joined_ids(ids)
    if all(part.offsets is None and part.bags == bags for part in parts):
        return together, _one_each(together), weights, bags
    rows: list[Tensor] = []
    for part in parts:
        if part.offsets is None:
            rows.extend([torch.arange(bags + 1, device=together.device).clamp(max=part.bags)] * part.copies)
        elif part.bags == bags:
            rows.append(part.offsets)
        else:
            rows.append(torch.cat([part.offsets, part.offsets[-1:].expand(bags - part.bags)]))
    return together, _joined_offsets(rows, together), weights, bags


def assemble_plain(values: Sequence[Any]) -> tuple[Assembled | None, bool]:
    """All features of a launch, if each is `Bags` or has one id a bag, and all have one number of bags; else None.

    And whether all bags are of one id.

    No feature may have a form of its own, as `max_sequence_length` gives it. There is no `Part` of each, since batches
    come often.
    """
    ids: list[Tensor] = []
    rows: list[Tensor | None] = []
    weights: list[Tensor | None] = []
    bags = -1
    for value in values:
        if type(value) is Bags:
            ids.append(value.ids)
            rows.append(value.offsets)
            weights.append(value.weights)
            count = value.offsets.shape[0] - 1
        elif type(value) is Tensor and value.dtype in ID_TYPES and value.dim() == 1 and _is_dense(value):
            ids.append(value)
            rows.append(None)
            weights.append(None)
            count = value.shape[0]
        else:
            return None, False
        if count != bags:
            if bags >= 0:
                return None, False
            bags = count
    given = [row for row in rows if row is not None]
    by_id = _joined_weights(ids, weights)
    join = None
    if ids[0].is_cuda and len(ids) > 1:
        join = getattr(select(ids[0].device, torch.float32), "join_bags", None)
    found = None if join is None else join(ids, rows, bags)
    if found is not None:
        return (*found, by_id, bags), not given
    together = _joined_ids(ids)
    if not given:
        return (together, _one_each(together), by_id, bags), True
    if len(given) < len(rows):
        single = torch.arange(bags + 1, device=together.device)
        given = [single if row is None else row for row in rows]
    return (together, _joined_offsets(given, together), by_id, bags), False


def as_kernels_want(batch: Assembled, weights_dtype: torch.dtype) -> Assembled:
    """The same without strides, and with weights of a type."""
    ids, offsets, weights, bags = batch
    if weights is not None:
        weights = weights.to(weights_dtype).contiguous()
    return ids.contiguous(), offsets.contiguous(), weights, bags


def _joined_ids(ids: list[Tensor]) -> Tensor:
    # int32 beside int64 makes int64
    return ids[0] if len(ids) == 1 else torch.cat(ids)


def _joined_weights(ids: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Tensor | None:
    kinds = {own.dtype for own in weights if own is not None}
    if not kinds:
        return None
    # which holds all of them, whatever the tables have; torch.cat refuses some beside each other
    kind = torch.float64 if torch.float64 in kinds else torch.float32
    made = [
        torch.ones_like(of, dtype=kind) if own is None else own.to(kind) for of, own in zip(ids, weights, strict=True)
    ]  # fmt: skip
    return made[0] if len(made) == 1 else torch.cat(made)


def _is_dense(ids: Tensor) -> bool:
    return ids.layout is torch.strided and not ids.is_nested


def _one_each(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[0] + 1, device=ids.device)


def _joined_offsets(rows: list[Tensor], ids: Tensor) -> Tensor:
    if len(rows) == 1:
        return rows[0]
    stacked = torch.stack(rows) if rows else torch.zeros((1, 1), dtype=torch.int64, device=ids.device)
    if is_watched(ids, stacked):
        return join_offsets(stacked)
    return select(ids.device, torch.float32).join_offsets(stacked)


def shaped(part: Part, piece: Tensor, dim: int) -> Tensor:
    """The columns of a feature as its output."""
    if part.copies == 1 and part.shape == (piece.shape[0],):
        return piece
    return piece[: part.bags].reshape(*part.shape, dim)


def without_fillers(rows: Tensor, offsets: Tensor, parts: Sequence[Part], bags: int) -> Tensor:
    """Prepared ids without the defaults of bags that only fill a feature up: nobody looked those rows up."""
    if all(part.bags == bags and part.inside is None for part in parts):
        return rows
    fillers = []
    for part in parts:
        if part.inside is None:
            padding = torch.zeros((part.copies, part.bags), dtype=torch.bool, device=rows.device)
        else:
            padding = ~part.inside.t()
        fillers.append(torch.nn.functional.pad(padding, (0, bags - part.bags), value=True).reshape(-1))
    # the default is the last of its bag
    at = offsets[1:] - 1
    return rows.index_put((at,), torch.where(torch.cat(fillers), -1, rows[at]))
