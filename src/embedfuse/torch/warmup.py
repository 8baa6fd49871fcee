"""Compiles the GPU kernels of collections and their optimizers before training starts.

A kernel is compiled for facts that the host knows: types, widths, alignments, rules, and of sizes only on which side of
a few limits they lie. So a double of the collection, with the same features and tables of one row, takes a few steps
whose sizes lie on all sides: the host's own code asks for the kernels, and nothing of the user's is touched.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import FeatureConfig, TableConfig
from ..kernels.configs import SHORT_BAG, UpdateConfig
from ..plan import ROW_BASE, T_ROW_BASE
from .backends import device_errors, select
from .bag_checks import ID_TYPES
from .bags import Bags
from .collection import EmbeddingCollection
from .optimizer import FusedOptimizer
from .stepped_tables import optimizer_of


class Warmup(NamedTuple):
    """What `warmup` did.

    Attributes:
        kernels: how many were compiled, or found in Triton's cache on disk; 0 if this process had them all.
        seconds: how long it took.
    """

    kernels: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kernels} kernels in {self.seconds:.1f} s"


class _Wanted(NamedTuple):
    """What batches and steps will be like; see `warmup`."""

    weighted: tuple[bool, ...]  # none where all batches are single
    single: bool
    weights_grad: bool
    ids: torch.dtype
    clipping: bool
    grad_scaler: bool
    beside: tuple[int, int] | None


def warmup(
    model: nn.Module, optimizer: FusedOptimizer | None = None, *, weights: bool | None = None,
    weights_grad: bool | None = None, single: bool | None = None, ids: torch.dtype = torch.int64,
    clipping: bool = False, grad_scaler: bool = False, beside: tuple[int, int] | None = None,
) -> Warmup:  # fmt: skip
    """Compiles every GPU kernel that the collections of a model and their optimizers will need.

    Else the first batches wait for it, half a second for each kernel. Nothing changes: no row, state or step counter,
    no gradient that waits, no random number. Batch sizes and numbers of ids need not be said, as kernels do not depend
    on them. Tables that the Triton backend does not serve, such as those on a CPU, have nothing to compile.

    Args:
        model: a collection, or a module that contains some.
        optimizer: steps the tables. None finds the `FusedOptimizer` that was created last for them; without any, only
            the kernels of lookups are compiled (unless `update="autograd"`, which needs none).
        weights: whether batches have weights; None prepares for both.
        weights_grad: whether weights want gradients; None prepares for it.
        single: whether batches are tensors of ids, `[B]` or `[B, L]`, for all features, so that each bag has one id,
            and a mean of it is a sum; None prepares for both.
        ids: their type, torch.int64 or torch.int32.
        clipping: whether `optimizer.clip_grad_norm_` is called before each step.
        grad_scaler: whether a `torch.amp.GradScaler` makes the steps.
        beside: None if gradients come to the rows as tensors of their own. If `concatenated` rows become part of a
            tensor that has other columns, as in `torch.cat([dense, rows], 1)`: how many stand before and after them.

    Returns:
        The number of kernels, and the seconds it took.

    Raises:
        ValueError: no collection in `model`, or one that `optimizer` does not step.
        TypeError: `ids` of another type.
    """
    if ids not in ID_TYPES:
        raise TypeError(f"`ids` must be torch.int32 or torch.int64, got {ids!r}")
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    if not collections:
        raise ValueError("`model` must contain at least one EmbeddingCollection, got none")
    wanted = _Wanted(
        () if single else (False, True) if weights is None else (weights,), single is not False,
        weights_grad is not False, ids, clipping, grad_scaler, beside,
    )  # fmt: skip
    steppers = {collection: _stepper(collection, optimizer) for collection in collections}
    start = time.perf_counter()
    served = [collection for collection in collections if _is_compiled(collection)]
    if not served:
        return Warmup(0, time.perf_counter() - start)
    before = _compiled()
    with torch.inference_mode(False):
        for collection in served:
            for places in (False, True) if _has_places(collection) else (False,):
                _practise(*_double(collection, steppers[collection], places), wanted)
    return Warmup(len(_compiled() - before), time.perf_counter() - start)


def _stepper(collection: EmbeddingCollection, optimizer: FusedOptimizer | None) -> FusedOptimizer | None:
    if collection.update == "autograd":
        return None
    if optimizer is None:
        found = collection._ledger.optimizer()
        return found if isinstance(found, FusedOptimizer) else None
    if collection not in optimizer._collections:
        raise ValueError("`optimizer` must step the tables of `model`, got one of other collections: give its own")
    return optimizer


def _is_compiled(collection: EmbeddingCollection) -> bool:
    """Whether any of its tables are served by kernels that Triton compiles."""
    collection._settle()
    buffers = [group.arena.buffer for group in collection._groups]
    return any(select(buffer.device, buffer.dtype).name == "triton" for buffer in buffers)


# --- the double ----------------------------------------------------------------------------------------------------


def _double(
    collection: EmbeddingCollection, optimizer: FusedOptimizer | None, places: bool
) -> tuple[EmbeddingCollection, FusedOptimizer | None]:
    """The same collection with tables of one row, and its optimizer; `places`: with each `output_shape` a sequence."""
    small = {
        config: dataclasses.replace(
            config, vocabulary_size=1, initializer=0.0, optimizer=_rule(collection, optimizer, name)
        )
        for name, config in collection.table_configs.items()
    }
    double = EmbeddingCollection(
        [_small(leaf, small, places) for _, leaf in collection._leaves], None, collection.update,
        collection._groups[0].arena.buffer.device, collection.out_of_range, collection.grad,
    )  # fmt: skip
    for name, table in collection.tables.items():
        double.tables[name].requires_grad_(table.requires_grad)
    for number, copies, sequences, _ in list(double._launches):
        double._launch(number, copies, sequences, True)
    _number_rows_alike(double, collection)
    return double, None if optimizer is None else FusedOptimizer(double)


def _rule(collection: EmbeddingCollection, optimizer: FusedOptimizer | None, name: str) -> Any:
    if optimizer is None:
        return None
    # a schedule may count how often it is asked
    return dataclasses.replace(optimizer_of(collection, name, optimizer._given[1]), learning_rate=0.001)


def _small(leaf: FeatureConfig, small: dict[TableConfig, TableConfig], places: bool) -> FeatureConfig:
    length, default = leaf.max_sequence_length, None if leaf.default_id is None else 0
    if leaf.output_shape is not None:
        length = 0
        if places:
            length, default = 2, None
    return dataclasses.replace(
        leaf, table=small[leaf.table], default_id=default, max_sequence_length=length, output_shape=None,
        # so that negative ids are no bad ones
        validate_weights_and_indices=True,
    )  # fmt: skip


def _has_places(collection: EmbeddingCollection) -> bool:
    return any(leaf.output_shape is not None for _, leaf in collection._leaves)


def _number_rows_alike(double: EmbeddingCollection, collection: EmbeddingCollection) -> None:
    """Counts the double's rows up from where their numbers are as large as those of the collection."""
    shifts = []
    for own, real in zip(double._groups, collection._groups, strict=True):
        shifts.append(sum(rows for rows, _ in real.arena.shapes) - len(own.arena.shapes))
        own.arena.descriptors[:, T_ROW_BASE] += shifts[-1]
    for (number, *_), (_, launch, *_) in double._launches.items():
        launch.features[:, ROW_BASE] += shifts[number]
        if launch.cut is not None:
            launch.cut[:, T_ROW_BASE] += shifts[number]


# --- its steps -----------------------------------------------------------------------------------------------------


def _practise(double: EmbeddingCollection, optimizer: FusedOptimizer | None, wanted: _Wanted) -> None:
    """Steps of the double whose sizes lie on all sides of every limit that the host knows."""
    pooled = any(not leaf.max_sequence_length for _, leaf in double._leaves)
    buffer = double._groups[0].arena.buffer
    if len(double._leaves) > 1 and wanted.weighted:
        # in steps only of some forms of features
        select(buffer.device, torch.float32).join_offsets(torch.zeros((2, 2), dtype=torch.int64, device=buffer.device))
    learns = optimizer is not None or double.update == "autograd"
    with _reports_aside(double), torch.set_grad_enabled(learns):
        for number in sorted(_numbers(double)):
            for weighted in wanted.weighted if pooled else wanted.weighted[:1]:
                _step(double, optimizer, _inputs(double, number, weighted, wanted), wanted)
            # means of one id each are sums, of which other kernels are made
            if wanted.single and (not wanted.weighted or any(group.divides for group in double._groups)):
                for bags in {-(-number // len(group.members)) for group in double._groups}:
                    _step(double, optimizer, _single(double, bags, wanted), wanted)


def _numbers(double: EmbeddingCollection) -> set[int]:
    """Numbers of ids, one on each side of every limit."""
    found = {1}
    for group in double._groups:
        buffer = group.arena.buffer
        backend: Any = select(buffer.device, buffer.dtype)
        if backend.name != "triton":
            continue
        # imported here, since it needs Triton
        from .backends import summed_runs

        config: UpdateConfig = backend._update_config(max(dim for _, dim in group.arena.shapes))
        limits = (
            config.some, config.few, config.whole, config.long, config.chunk, config.chunk * config.fold,
            summed_runs.FEW,
        )  # fmt: skip
        copies = sum(double._leaves[member][1].max_sequence_length or 1 for member in group.members)
        found |= {limit + 1 for limit in (*limits, SHORT_BAG * copies)}
    return found


def _inputs(double: EmbeddingCollection, number: int, weighted: bool, wanted: _Wanted) -> list[Bags]:
    """A batch of so many ids in each group: row 0 once, and ids that do not count."""
    members = [[double._leaves[member][1] for member in group.members] for group in double._groups]
    bags = 1
    for mine in members:
        if all(leaf.max_sequence_length for leaf in mine):
            bags = max(bags, -(-number // sum(leaf.max_sequence_length for leaf in mine)))
    values: dict[int, Bags] = {}
    for group, mine in zip(double._groups, members, strict=True):
        left = max(number - bags * sum(leaf.max_sequence_length for leaf in mine), 1)
        for place, (member, leaf) in enumerate(zip(group.members, mine, strict=True)):
            count, is_pooled = int(place == 0), leaf.max_sequence_length == 0
            if is_pooled:
                # the first takes all
                count, left = left, 0
            values[member] = _bags(double, count, bags, weighted and is_pooled, wanted)
    return [values[member] for member in range(len(double._leaves))]


def _single(double: EmbeddingCollection, bags: int, wanted: _Wanted) -> list[Any]:
    """A batch of so many bags, of one id for features that are no sequences: row 0 once, and ids that do not count."""
    device = double._groups[0].arena.buffer.device
    ids = torch.full((bags,), -1, dtype=wanted.ids, device="cpu")
    ids[:1] = 0
    return [
        _bags(double, 1, bags, False, wanted) if leaf.max_sequence_length else ids.to(device)
        for _, leaf in double._leaves
    ]


def _bags(double: EmbeddingCollection, count: int, bags: int, weighted: bool, wanted: _Wanted) -> Bags:
    ids = torch.full((count,), -1, dtype=wanted.ids, device="cpu")
    ids[:1] = 0
    offsets = torch.full((bags + 1,), count, device="cpu")
    offsets[0] = 0
    weights = torch.ones(count, device="cpu") if weighted else None
    made = Bags(ids, offsets, weights).to(double._groups[0].arena.buffer.device)
    if made.weights is not None:
        made.weights.requires_grad_(wanted.weights_grad)
    return made


def _step(double: EmbeddingCollection, optimizer: FusedOptimizer | None, inputs: list[Any], wanted: _Wanted) -> None:
    outputs = _outputs(double, inputs, wanted.beside)
    trained = [output for output in outputs if output.requires_grad]
    if trained:
        torch.autograd.backward(trained, [torch.zeros_like(o, memory_format=torch.contiguous_format) for o in trained])
    # in "backward" mode the step was made
    if optimizer is None or not double._ledger.records:
        return
    scaler = torch.amp.GradScaler(outputs[0].device.type) if wanted.grad_scaler else None
    if scaler is not None:
        scaler.scale(torch.zeros(1, device=outputs[0].device))
    if wanted.clipping:
        if scaler is not None:
            scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)


def _outputs(double: EmbeddingCollection, inputs: list[Any], beside: tuple[int, int] | None) -> list[Tensor]:
    if beside is None:
        # past the hooks of modules
        found: list[Tensor] = double.forward(inputs)
        return found
    rows = double.concatenated(inputs)
    before, after = (rows.new_zeros(rows.shape[0], columns) for columns in beside)
    return [torch.cat([before, rows, after], 1)]


# --- what must not be seen, and what is counted --------------------------------------------------------------------


@contextlib.contextmanager
def _reports_aside(double: EmbeddingCollection) -> Iterator[None]:
    """Keeps the report of a bad id of an earlier lookup for the next one of the user's."""
    device = double._groups[0].arena.buffer.device
    if device.type != "cuda" or double.out_of_range != "raise":
        yield
        return
    word = device_errors._word(device)
    torch.cuda.synchronize(device)
    found = int(word.value[0])
    word.value[0] = 0
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        word.value[0] = found


def _compiled() -> set[Any]:
    """Handles of the kernels that this process has so far."""
    # imported here, since it needs Triton
    from .backends import cuda_source, launching

    return launching.Launcher.functions | cuda_source.loaded
