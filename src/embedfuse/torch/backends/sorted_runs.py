"""Ids of a batch → sorted runs of equal rows on the device: the first half of every op that sums gradients by row.

Launches: keys, sort, segments; a fixed number, whatever the number of tables and features. Few ids are sorted by one
launch, many by PyTorch's.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...kernels.configs import UpdateConfig
from ...kernels.runs import key_kernel, rank_kernel, segment_kernel
from ...plan import FROZEN
from . import Csr
from .descriptor_facts import TableFacts
from .launching import launch

INT32 = 2**31 - 1
STEP = 4
"""Partial sums start at multiples of this many elements."""
RANKED = 16
"""Keys that one program of `rank_kernel` puts in their places."""
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


@lru_cache(maxsize=64)
def _layout(
    number: int, widest: int, blocks: int, windows: int, scaled: bool, weighted: bool, key: torch.dtype,
    source: torch.dtype, config: UpdateConfig,
) -> list[tuple[torch.dtype, int, list[str], list[int]]]:  # fmt: skip
    """The tensors that a batch of so many ids needs, type by type: elements of all, their names and sizes."""
    segments = blocks * (config.block + 1)
    stride = ceil_div(widest, STEP) * STEP
    position = _kind(segments)
    wanted = {
        "position_sources": (number, source), "sources": (number, source), "first_sources": (segments, source),
        "starts": (segments, position), "tags": (segments, torch.int32), "rows": (segments, key),
        "counts": (blocks, torch.int32), "list_counts": (2, torch.int32), "long": (number // config.long, position),
        "cuts": (windows, position), "cut_tables": (windows, torch.int32),
        "position_coefficients": (number if scaled else 0, torch.float32),
        "coefficients": (number if scaled or weighted else 0, torch.float32),
        "partials": (2 * windows * stride, torch.float32),
        "folds": (ceil_div(windows, config.fold) * stride, torch.float32),
    }  # fmt: skip
    layout = []
    for dtype in dict.fromkeys(dtype for _, dtype in wanted.values()):
        names = [name for name, (_, other) in wanted.items() if other == dtype]
        sizes = [ceil_div(wanted[name][0], ALIGNMENT) * ALIGNMENT for name in names]
        layout.append((dtype, sum(sizes), names, sizes))
    return layout


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
    key_kind = _kind(facts.rows)
    made: dict[str, Tensor] = {}
    # one allocation for each type, since each takes the host a while
    for dtype, size, names, sizes in _layout(
        number, facts.widest, blocks, windows, has_scale, csr.weights is not None, key_kind, _kind(last_source), config
    ):
        whole = torch.empty(size, dtype=dtype, device=csr.ids.device)
        made.update(zip(names, whole.split_with_sizes(sizes), strict=True))
    sources, coefficients = made.pop("position_sources"), made.pop("position_coefficients")
    # by itself: what was sorted need not be kept
    keys = torch.empty(number, dtype=key_kind, device=csr.ids.device)
    launch(
        key_kernel, (ceil_div(number, config.keys),), (
            features, tables, csr.ids, csr.offsets, csr.weights, scale if has_scale else None, keys, sources,
            coefficients if has_scale else None, made["list_counts"],
        ), (number, csr.bags, total_bags, feature_count, facts.rows, grad.stride(0), grad.stride(1)), 4, {
            "HAS_WEIGHTS": csr.weights is not None, "HAS_SCALE": has_scale,
            "HAS_FROZEN": learners_only and FROZEN in facts.rules, "BLOCK": config.keys,
        },
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True) if number > config.few else ranked(keys)
    unsorted = coefficients if has_scale else csr.weights
    sorted_coefficients = made.pop("coefficients")
    runs = SortedRuns(
        number, facts.rows, blocks, windows, ceil_div(facts.widest, STEP) * STEP, keys, order,
        coefficients=None if unsorted is None else sorted_coefficients, **made,
    )  # fmt: skip
    launch(
        segment_kernel, (blocks,), (
            facts.owners, keys, order, sources, unsorted, runs.sources, runs.coefficients, runs.starts, runs.tags,
            runs.rows, runs.first_sources, runs.counts, runs.list_counts, runs.long, runs.cuts, runs.cut_tables,
        ), (number, facts.rows, facts.owners.shape[0]), 4, {
            "HAS_COEFFICIENTS": unsorted is not None, "CHUNK": config.chunk, "LONG": config.long,
            "BLOCK": config.block,
        },
    )  # fmt: skip
    return runs


def ranked(keys: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.sort(keys, stable=True)` in one launch, for few keys."""
    number = keys.shape[0]
    found, order = torch.empty_like(keys), torch.empty(number, dtype=torch.int64, device=keys.device)
    launch(rank_kernel, (ceil_div(number, RANKED),), (keys, found, order), (number,), 4, {"ROWS": RANKED, "BLOCK": 256})
    return found, order
