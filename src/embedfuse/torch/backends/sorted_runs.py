"""Ids of a batch → sorted runs of equal rows on the device: the first half of every op that sums gradients by row.

Launches: keys, sort, segments; a fixed number, whatever the number of tables, features and ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.configs import UpdateConfig
from ...kernels.runs import key_kernel, segment_kernel
from ...plan import FROZEN
from . import Csr
from .descriptor_facts import TableFacts

INT32 = 2**31 - 1
STEP = 4
"""Partial sums start at multiples of this many elements."""


@dataclass
class SortedRuns:
    """What `kernels/runs.py` writes, and scratch for partial sums; all on the device of the ids."""

    number: int  # N
    absent: int  # the key of ids that do not count
    keys: Tensor  # [N], sorted
    order: Tensor  # int64 [N]
    sources: Tensor  # [N]: element of `grad` where the gradient row of each sorted id starts
    coefficients: Tensor | None  # float32 [N], sorted
    starts: Tensor  # [blocks * (block + 1)]
    tags: Tensor  # int32, as starts
    rows: Tensor  # as starts
    first_sources: Tensor  # as starts
    counts: Tensor  # int32 [blocks]
    cuts: Tensor  # int32 [windows]
    partials: Tensor  # float32 [2 * windows, stride]
    folds: Tensor  # float32 [folds, stride]

    @property
    def stride(self) -> int:
        """Elements from one partial sum to the next."""
        return self.partials.shape[1]


def ceil_div(number: int, step: int) -> int:
    """`number / step`, rounded up."""
    return -(-number // step)


def _kind(largest: int) -> torch.dtype:
    return torch.int32 if largest <= INT32 else torch.int64


def sorted_runs(
    features: Tensor, tables: Tensor, facts: TableFacts, csr: Csr, scale: Tensor, grad: Tensor, config: UpdateConfig
) -> SortedRuns:  # fmt: skip
    """Sorts the ids of a batch by row.

    Args:
        features: descriptors, as `tables`.
        facts: of `tables`.
        scale: of each bag; empty for all ones.
        grad: the gradient whose rows will be summed; only its strides matter here.
        config: tile sizes.
    """
    number, device = csr.ids.shape[0], csr.ids.device
    total_bags, feature_count = csr.offsets.shape[0] - 1, features.shape[0]
    has_scale = scale.shape[0] != 0

    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    keys = empty(number, _kind(facts.rows))
    last_source = max(grad.shape[0] - 1, 0) * grad.stride(0) + max(grad.shape[1] - 1, 0) * grad.stride(1)
    sources = empty(number, _kind(last_source))
    coefficients = empty(number, torch.float32) if has_scale else csr.weights
    blocks = ceil_div(number, config.block)
    key_kernel[(blocks,)](
        features, tables, csr.ids, csr.offsets, csr.weights, scale if has_scale else None, keys, sources,
        coefficients if has_scale else None, number, csr.bags, total_bags, feature_count, facts.rows,
        grad.stride(0), grad.stride(1),
        HAS_WEIGHTS=csr.weights is not None, HAS_SCALE=has_scale, HAS_FROZEN=FROZEN in facts.rules, BLOCK=config.block,
        num_warps=4,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    windows = ceil_div(number, config.chunk)
    stride = ceil_div(facts.widest, STEP) * STEP
    segments = blocks * (config.block + 1)
    runs = SortedRuns(
        number=number,
        absent=facts.rows,
        keys=keys,
        order=order,
        sources=torch.empty_like(sources),
        coefficients=None if coefficients is None else empty(number, torch.float32),
        starts=empty(segments, _kind(number)),
        tags=empty(segments, torch.int32),
        rows=empty(segments, keys.dtype),
        first_sources=empty(segments, sources.dtype),
        counts=empty(blocks, torch.int32),
        cuts=empty(windows, torch.int32),
        partials=empty(2 * windows * stride, torch.float32).view(2 * windows, stride),
        folds=empty(ceil_div(windows, config.fold) * stride, torch.float32).view(-1, stride),
    )
    segment_kernel[(blocks,)](
        facts.owners, keys, order, sources, coefficients, runs.sources, runs.coefficients, runs.starts, runs.tags,
        runs.rows, runs.first_sources, runs.counts, runs.cuts, number, facts.rows, facts.owners.shape[0],
        HAS_COEFFICIENTS=coefficients is not None, CHUNK=config.chunk, BLOCK=config.block, num_warps=4,
    )  # fmt: skip
    return runs
