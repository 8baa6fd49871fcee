"""Batches of calls of the primitives, as `torch.vmap` makes them, as one call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def in_front(size: int, tensor: Tensor, dim: int | None) -> Tensor:
    """With the batch dimension in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def together(size: int, tensor: Tensor | None, dim: int | None) -> Tensor | None:
    """What the calls are given, one behind the other."""
    return None if tensor is None else in_front(size, tensor, dim).flatten(0, 1)


def bags_of_all(info: Any, inputs: Sequence[Any], dims: Sequence[Any], rows: int | None) -> tuple[Tensor, Tensor]:
    """Ids (inputs[2]) and offsets (inputs[3]) of all calls as those of one; `rows` of each table if each has its own.

    Ids outside of a table stay outside of all.
    """
    size = info.batch_size
    ids, offsets = (in_front(size, inputs[at], dims[at]) for at in (2, 3))
    number = torch.arange(size, device=ids.device)[:, None]
    starts = (offsets[:, :-1] + number * ids.shape[1]).flatten()
    end = offsets.new_full((1,), size * ids.shape[1])
    if rows is not None:
        ids = torch.where((ids >= 0) & (ids < rows), ids.long() + number * rows, -1)
    return ids.flatten(), torch.cat([starts, end])


def tables_of_all(info: Any, table: Tensor, dim: int | None) -> tuple[Tensor, int | None]:
    """The tables of all calls as one, and the rows of each; None if they share one."""
    if dim is None:
        return table, None
    return table.movedim(dim, 0).flatten(0, 1), table.shape[0 if dim else 1]
