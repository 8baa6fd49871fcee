"""First values of a table."""

import math
from typing import Any

import torch
from torch import Tensor

from ..config import TableConfig


def initialize(table: Tensor, config: TableConfig) -> None:
    """Fills `table` as `config.initializer` says.

    Raises:
        ValueError: an array of another shape.
    """
    wanted = config.initializer
    with torch.no_grad():
        if wanted is None:
            deviation = 1 / math.sqrt(config.dim)
            torch.nn.init.trunc_normal_(table, 0.0, deviation, -2 * deviation, 2 * deviation)
        elif isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
            table.fill_(wanted)
        elif callable(wanted) and not isinstance(wanted, Tensor):
            made = wanted(table)
            if made is not None and made is not table:
                _copy(table, made, config)
        else:
            _copy(table, wanted, config)


def tensor_of(values: Any, like: Tensor) -> Tensor:
    """Numbers of any kind as a tensor, whatever torch's default type and device are; a tensor as it is."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values, dtype=like.dtype, device="cpu")


def _copy(table: Tensor, values: Any, config: TableConfig) -> None:
    values = tensor_of(values, table)
    if values.shape != table.shape:
        raise ValueError(
            f"`initializer` of table {config.name!r} must have shape {tuple(table.shape)}, got {tuple(values.shape)}"
        )
    table.copy_(values)
