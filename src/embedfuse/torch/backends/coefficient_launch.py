"""The launch of the gradient of weights, as `lookup_launch.py` has that of lookups."""

from typing import Any, NamedTuple

import torch

from ...kernels.coefficient_grad import coefficient_grad_kernel
from ...kernels.configs import coefficient_config
from .descriptor_facts import FeatureFacts, rows_align
from .issuing import Issuer
from .launching import launcher
from .lookup_launch import is_short
from .program import Program
from .programs import ask_aligned, ask_contiguous, issued
from .summed_runs import grad_align


class CoefficientBatch(NamedTuple):
    """All that the gradient of weights reads and writes, and the numbers that it takes."""

    table: Any
    features: Any
    ids: Any
    offsets: Any
    weights: Any
    scale: Any  # None if no bag is divided
    grad: Any
    out: Any
    bags: Any


class Coefficients:
    """Gradients of the weights of batches of one `features` tensor.

    Args:
        facts: of the features.
    """

    def __init__(self, facts: FeatureFacts) -> None:
        self.programs: list[Program] = []
        self._facts = facts

    def __call__(self, batch: CoefficientBatch) -> None:
        """Launches, on the current device. Ids, offsets and weights are contiguous, of the kernels' types."""
        facts, table, grad = self._facts, batch.table, batch.grad
        short = is_short(batch)
        config = coefficient_config(facts.widest, short, table.element_size())
        weighted, normalised = batch.weights is not None, batch.scale is not None
        made = launcher(
            coefficient_grad_kernel, config.warps, {
                "HAS_WEIGHTS": weighted, "NORMALISED": normalised, "CLIPPED": facts.clipped,
                "ALIGN": rows_align(facts.starts, table.dtype), "GRAD_ALIGN": grad_align(facts.columns, grad),
                "DIM_ALIGN": facts.dims, "ROWS": config.lanes, "BLOCK_D": config.block_d,
            }, (
                table.dtype, torch.int64, batch.ids.dtype, torch.int64, torch.float32 if weighted else None,
                torch.float32 if normalised else None, grad.dtype, torch.float32,
            ), config.registers,
        )  # fmt: skip

        def issue(given: CoefficientBatch, to: Issuer) -> None:
            row, column = given.grad.stride()
            pointers = tuple(map(to.pointer, given[:8]))
            to(made, (given.features.shape[0] * given.bags,), pointers, (given.bags, row, column))

        def ask(given: CoefficientBatch) -> None:
            bool(is_short(given)), bool(given.bags > 0)
            ask_contiguous(given.ids, given.offsets, given.weights, given.scale)
            ask_aligned(given.grad, facts.columns, grad.dtype.itemsize)

        issued(self.programs, batch, table, issue, ask)
