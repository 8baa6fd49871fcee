"""What becomes of a table's gradient, if no dense tensor: coalesced rows, a sum in a buffer, or a fused optimizer's.

Each takes what `scatter_sum` takes. None of them can be differentiated again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...optim import SGD
from ...plan import T_RULE, PlannedFeature, plan_group
from .. import ledger as ledgers
from .. import one_table
from ..backends import Csr, Update, accumulation_dtype, select


def refuse_second_derivative(grad: Tensor, weights: Tensor | None) -> None:
    """Raises where a gradient that is taken care of would be differentiated."""
    if torch.is_grad_enabled() and (grad.requires_grad or (weights is not None and weights.requires_grad)):
        raise NotImplementedError(
            'only dense table gradients can be differentiated again: use grad="dense" without `grad_into`, and a table '
            'that is no collection, or one with update="autograd"'
        )


class CoalescedRows:
    """The gradient as a `torch.sparse_coo` tensor of the distinct rows in the batch; counting them waits for a GPU."""

    def take(
        self, grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """See `Sink`."""
        refuse_second_derivative(grad, weights)
        inside = (ids >= 0) & (ids < shape[0])
        distinct, place = torch.unique(torch.where(inside, ids.long(), -1), return_inverse=True)
        absent = int(distinct.shape[0] > 0 and int(distinct[0]) < 0)
        distinct = distinct[absent:]
        values = grad.new_zeros((distinct.shape[0], shape[1]), dtype=dtype)
        if values.numel():
            # of the whole table, so that there is one descriptor and not one for each number of rows
            features = one_table.descriptor(grad.new_empty(1).expand(shape), "sum", 0, False)
            unscaled = grad.new_empty(0, dtype=accumulation_dtype(dtype))
            csr = Csr(place - absent, offsets, weights, offsets.shape[0] - 1)
            select(grad.device, dtype).row_grad(values.view(-1), features, csr, unscaled, grad)
        return torch.sparse_coo_tensor(distinct[None], values, shape, is_coalesced=True, check_invariants=False)

    def leave(self) -> None:
        """Nothing waits for it."""


@dataclass(frozen=True)
class IntoBuffer:
    """The gradient is added to `buffer` `[V, D]`, float32 or float64, in one pass over the rows in the batch."""

    buffer: Tensor

    def take(
        self, grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        """See `Sink`."""
        refuse_second_derivative(grad, weights)
        if not ids.shape[0] or not self.buffer.numel():
            return
        kind = self.buffer.dtype
        csr = Csr(ids, offsets, None if weights is None else weights.to(kind), offsets.shape[0] - 1)
        features, tables, hyper, steps = _adding(self.buffer)
        nothing = self.buffer.new_zeros(1)
        rules = [SGD().kernel_class()]
        flat = self.buffer.detach().view(-1)
        update = Update(flat, features, tables, rules, nothing, hyper, steps, at_random=False)
        with torch.no_grad():
            select(grad.device, kind).row_update(update, csr, nothing[:0], grad)

    def leave(self) -> None:
        """Nothing waits for it."""


_known: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor, Tensor, Tensor]] = {}


def _adding(buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Descriptors, hyper-parameters and step of a descent by the negative of the gradient: `w -= -1 * g`."""
    rows, dim = buffer.shape
    key = (rows, dim, buffer.device)
    if key not in _known:
        with torch.inference_mode(False):
            group = plan_group([(rows, dim)], [PlannedFeature(0, "sum", 0)])
            group.tables[0, T_RULE] = 0
            made = (
                torch.from_numpy(group.features), torch.from_numpy(group.tables),
                torch.tensor([(-1.0, *SGD().hyper(1.0)[1:])], dtype=torch.float64, device="cpu"),
                torch.ones(1, dtype=torch.int64, device="cpu"),
            )  # fmt: skip
            features, tables, hyper, steps = (tensor.to(buffer.device) for tensor in made)
            _known[key] = features, tables, hyper, steps
    return _known[key]


@dataclass(frozen=True)
class IntoLedger:
    """The gradient is left to a `FusedOptimizer`, as `update="step"` or `"backward"` says."""

    slot: ledgers.Slot

    def take(
        self, grad: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        """See `Sink`."""
        refuse_second_derivative(grad, weights)
        unscaled = grad.new_empty(0, dtype=accumulation_dtype(dtype))
        csr = Csr(ids, offsets, weights, offsets.shape[0] - 1)
        self.slot.ledger.add(ledgers.Record(self.slot.group, self.slot.launch, csr, unscaled, grad))

    def leave(self) -> None:
        """See `Sink`."""
        self.slot.ledger.closed(self.slot.group)
