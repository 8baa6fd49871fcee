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
from .launching import launch

INT32 = 2**31 - 1
STEP = 4
"""Partial sums start at multiples of this many elements."""
ALIGNMENT = 32
"""As do tensors that share an allocation."""


@dataclass
class SortedRuns:
    """What `kernels/runs.py` writes, and scratch for partial sums; all on the device of the ids.

    Tensors may be longer than said.
    """

    number: int  # N
    absent: int  # the key of ids that do not count
    blocks: int  # of sorted keys
    windows: int  # of CHUNK ids
    stride: int  # elements from one partial sum to the next
    keys: Tensor  # [N], sorted
    order: Tensor  # int64 [N]
    sources: Tensor  # [N]: element of `grad` where the gradient row of each sorted id starts
    coefficients: Tensor | None  # float32 [N], sorted
    starts: Tensor  # [blocks * (block + 1)]
    tags: Tensor  # int32, as starts
    rows: Tensor  # as starts
    first_sources: Tensor  # as starts
    counts: Tensor  # int32 [blocks]
    list_counts: Tensor  # int32 [2]: how many there are of the next
    long: Tensor  # the places of long segments in `starts`, in any order
    cuts: Tensor  # [windows]: the edges where runs are first cut, in any order
    cut_tables: Tensor  # int32 [windows]: their tables
    partials: Tensor  # float32 [2 * windows * stride]
    folds: Tensor  # float32 [folds * stride]


def ceil_div(number: int, step: int) -> int:
    """`number / step`, rounded up."""
    return -(-number // step)


def _kind(largest: int) -> torch.dtype:
    return torch.int32 if largest <= INT32 else torch.int64


def _empty(device: torch.device, wanted: dict[str, tuple[int, torch.dtype]]) -> dict[str, Tensor]:
    """Tensors of at least so many elements; one allocation for each type, since the host waits for each."""
    made: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(dtype for _, dtype in wanted.values()):
        names = [name for name, (_, other) in wanted.items() if other == dtype]
        sizes = [ceil_div(wanted[name][0], ALIGNMENT) * ALIGNMENT for name in names]
        whole = torch.empty(sum(sizes), dtype=dtype, device=device)
        made.update(zip(names, whole.split_with_sizes(sizes), strict=True))
    return made


def sorted_runs(
    features: Tensor, tables: Tensor, facts: TableFacts, csr: Csr, scale: Tensor, grad: Tensor, config: UpdateConfig,
    learners_only: bool,
) -> SortedRuns:  # fmt: skip
    """Sorts the ids of a batch by row.

    Args:
        features: descriptors, as `tables`.
        facts: of `tables`.
        scale: of each bag; empty for all ones.
        grad: the gradient whose rows will be summed; only its strides matter here.
        config: tile sizes.
        learners_only: leave out the tables that are FROZEN.
    """
    number, total_bags, feature_count = csr.ids.shape[0], csr.offsets.shape[0] - 1, features.shape[0]
    has_scale = scale.shape[0] != 0
    last_source = max(grad.shape[0] - 1, 0) * grad.stride(0) + max(grad.shape[1] - 1, 0) * grad.stride(1)
    blocks, windows = ceil_div(number, config.block), ceil_div(number, config.chunk)
    stride = ceil_div(facts.widest, STEP) * STEP
    segments = blocks * (config.block + 1)
    key_kind, source_kind, position_kind = _kind(facts.rows), _kind(last_source), _kind(segments)
    made = _empty(csr.ids.device, {
        "sources": (number, source_kind), "sorted sources": (number, source_kind),
        "first sources": (segments, source_kind), "starts": (segments, position_kind), "tags": (segments, torch.int32),
        "rows": (segments, key_kind), "counts": (blocks, torch.int32), "list counts": (2, torch.int32),
        "long": (number // config.long, position_kind), "cuts": (windows, position_kind),
        "cut tables": (windows, torch.int32),
        "coefficients": (number if has_scale else 0, torch.float32),
        "sorted coefficients": (number if has_scale or csr.weights is not None else 0, torch.float32),
        "partials": (2 * windows * stride, torch.float32),
        "folds": (ceil_div(windows, config.fold) * stride, torch.float32),
    })  # fmt: skip
    # by itself: what is sorted need not be kept
    keys = torch.empty(number, dtype=key_kind, device=csr.ids.device)
    sources, coefficients = made["sources"], made["coefficients"] if has_scale else csr.weights
    launch(
        key_kernel, (ceil_div(number, config.keys),), (
            features, tables, csr.ids, csr.offsets, csr.weights, scale if has_scale else None, keys, sources,
            coefficients if has_scale else None, made["list counts"],
        ), (number, csr.bags, total_bags, feature_count, facts.rows, grad.stride(0), grad.stride(1)), 4, {
            "HAS_WEIGHTS": csr.weights is not None, "HAS_SCALE": has_scale,
            "HAS_FROZEN": learners_only and FROZEN in facts.rules, "BLOCK": config.keys,
        },
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    runs = SortedRuns(
        number, facts.rows, blocks, windows, stride, keys, order, made["sorted sources"],
        None if coefficients is None else made["sorted coefficients"], made["starts"], made["tags"], made["rows"],
        made["first sources"], made["counts"], made["list counts"], made["long"], made["cuts"], made["cut tables"],
        made["partials"], made["folds"],
    )  # fmt: skip
    launch(
        segment_kernel, (blocks,), (
            facts.owners, keys, order, sources, coefficients, runs.sources, runs.coefficients, runs.starts, runs.tags,
            runs.rows, runs.first_sources, runs.counts, runs.list_counts, runs.long, runs.cuts, runs.cut_tables,
        ), (number, facts.rows, facts.owners.shape[0]), 4, {
            "HAS_COEFFICIENTS": coefficients is not None, "CHUNK": config.chunk, "LONG": config.long,
            "BLOCK": config.block,
        },
    )  # fmt: skip
    return runs
