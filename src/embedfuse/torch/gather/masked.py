"""Tables of which only some rows learn, as when a memory is fine-tuned slot by slot."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import check_tensor
from .bodies import scatter_sum
from .functions import Sink
from .sinks import refuse_second_derivative


@dataclass(frozen=True)
class MaskedRows:
    """Rows where `mask`, bool `[V]`, is False get no gradient. That of the others `inner` takes, or it is dense."""

    mask: Tensor
    inner: Sink | None

    def take(
        self, grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor | None:
        """See `Sink`."""
        refuse_second_derivative(grad, weights)
        if shape[0]:
            inside = (ids >= 0) & (ids < shape[0])
            learns = inside & self.mask[torch.where(inside, ids, 0)]
            # absent for the gradient alone
            ids = torch.where(learns, ids, -1)
        if self.inner is not None:
            return self.inner.take(grad, weights, ids, offsets, shape, dtype)
        return scatter_sum(grad, weights, ids, offsets, shape[0], dtype, "drop")

    def leave(self) -> None:
        """See `Sink`."""
        if self.inner is not None:
            self.inner.leave()


def check_row_mask(mask: Tensor, table: Tensor) -> None:
    """Raises unless `mask` is bool `[V]` on the device of the table."""
    check_tensor("row_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"`row_mask` must be bool, True for rows that learn, got {mask.dtype}")
    if mask.shape != table.shape[:1] or mask.device != table.device:
        raise ValueError(
            f"`row_mask` must be [{table.shape[0]}], one for each row of the table, on {table.device}, got "
            f"{list(mask.shape)} on {mask.device}"
        )
