"""The table a primitive reads, and who gets its gradient: a tensor's `.grad`, a buffer, or a collection's optimizer."""

import torch
from torch import Tensor

from ...config import FeatureConfig
from .. import ledger as ledgers
from ..backends import Policy
from ..bags import Bags
from ..collection import EmbeddingCollection
from ..compiling import is_exporting
from ..functions import is_transformed, is_watched
from ..nest import rebuild
from .arguments import check_table, check_tensor
from .functions import Sink
from .masked import MaskedRows, check_row_mask
from .sinks import CoalescedRows, IntoBuffer, IntoLedger


def table_and_sink(
    name: str, given: Tensor | EmbeddingCollection, indices: Tensor, grad: str = "dense",
    buffer: Tensor | None = None, row_mask: Tensor | None = None,
) -> tuple[Tensor, Sink | None]:  # fmt: skip
    """The table, and the sink of its gradient unless that is dense."""
    sink: Sink | None = None
    if isinstance(given, EmbeddingCollection):
        if buffer is not None or grad != "dense":
            raise ValueError(
                f"`grad` and `grad_into` must be left out where `{name}` is a collection, whose `update` says it all"
            )
        table, sink = _of_collection(given, name, indices)
    else:
        table = given
    check_table(name, table, indices.device)
    if buffer is not None:
        _check_buffer(name, table, buffer, grad)
        sink = IntoBuffer(buffer)
    elif grad == "sparse":
        sink = CoalescedRows()
    if row_mask is not None:
        check_row_mask(row_mask, table)
        sink = MaskedRows(row_mask, sink)
    if sink is None or not _learns(table):
        return table, None
    _refuse_traced(name, table, indices)
    return table, sink


def _learns(table: Tensor) -> bool:
    # an exported program trains nothing
    return torch.is_grad_enabled() and table.requires_grad and not is_exporting()


def _refuse_traced(name: str, table: Tensor, indices: Tensor) -> None:
    if is_transformed() or is_watched(table, indices):
        raise NotImplementedError(
            f"inside of torch.func transforms and of torch.compile `{name}` can have dense gradients only: leave out "
            '`grad`, `grad_into` and `row_mask`, and use a tensor or a collection with update="autograd"'
        )


def goes_through_collection(given: Tensor | EmbeddingCollection, ids: Tensor, row_mask: Tensor | None) -> bool:
    """Whether a collection's own lookup must serve, which graphs can hold."""
    return (
        isinstance(given, EmbeddingCollection) and given.update != "autograd" and row_mask is None and is_watched(ids)
    )


def through_collection(
    collection: EmbeddingCollection, name: str, ids: Tensor, offsets: Tensor, weights: Tensor | None, policy: Policy
) -> Tensor:
    """Weighted sums of rows, `[bags, D]`, by the collection's own lookup."""
    _check_collection(collection, name)
    bags = rebuild(collection.features, iter([Bags(ids, offsets, weights)]))
    return collection._lookup(0, collection._parts(bags), policy)


def open_for(sink: Sink | None) -> None:
    """Tells the ledger of a lookup that has succeeded that its backward is to come; one that raises has none."""
    if isinstance(sink, MaskedRows):
        sink = sink.inner
    if isinstance(sink, IntoLedger):
        sink.slot.ledger.opened()


def _of_collection(
    collection: EmbeddingCollection, name: str, indices: Tensor
) -> tuple[Tensor, IntoLedger | None]:  # fmt: skip
    """The only table of a collection, and the sink of its gradient if the collection's optimizer is to have it.

    Asks the ledger, which may refuse; `open_for` tells it.
    """
    config = _check_collection(collection, name)
    table = collection.tables[config.table.name or ""]
    if collection.update == "autograd" or not _learns(table):
        return table, None
    _refuse_traced(name, table, indices)
    if not collection._groups[0].arena.is_whole():
        collection._link()
        table = collection.tables[config.table.name or ""]
    slot = ledgers.find(collection._launch(0, (1,), (False,))[0])
    assert slot is not None
    slot.ledger.check()
    return table, IntoLedger(slot)


def _check_collection(collection: EmbeddingCollection, name: str) -> FeatureConfig:
    """The feature of a collection of one.

    Raises:
        ValueError: a collection of more than one table or feature, or of another kind than plain sums of rows.
    """
    if len(collection._leaves) != 1:
        raise ValueError(
            f"`{name}` must be a tensor or a collection of one feature, got one of {len(collection._leaves)}"
        )
    config = collection._leaves[0][1]
    if config.effective_combiner != "sum" or config.max_sequence_length:
        raise ValueError(
            f'`{name}` must be a collection whose feature has combiner="sum" and no `max_sequence_length`, got '
            f"{config.effective_combiner!r} and {config.max_sequence_length}"
        )
    for option, value in (("max_norm", config.table.max_norm), ("default_id", config.default_id)):
        if value is not None:
            raise ValueError(
                f"`{name}` must be a collection of rows as they are, without `{option}`, got {value}: call the "
                "collection itself, with bags"
            )
    return config


def _check_buffer(name: str, table: Tensor, buffer: Tensor, grad: str) -> None:
    check_tensor("grad_into", buffer)
    if grad != "dense":
        raise ValueError(f"`grad` must be left out where `grad_into` is given, got {grad!r}")
    kinds = (torch.float32, torch.float64) if table.dtype != torch.float64 else (torch.float64,)
    if buffer.dtype not in kinds:
        raise TypeError(f"`grad_into` must be {kinds[0]} for tables of {table.dtype}, got {buffer.dtype}")
    if buffer.shape != table.shape or buffer.device != table.device or not buffer.is_contiguous():
        raise ValueError(
            f"`grad_into` must be contiguous, of the shape {tuple(table.shape)} and on the device {table.device} of "
            f"`{name}`, got {tuple(buffer.shape)} on {buffer.device}"
        )
