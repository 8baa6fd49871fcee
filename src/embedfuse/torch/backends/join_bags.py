"""Ids and offsets of several features → those of a launch, by `kernels/cuda/join_bags.cu`.

PyTorch takes three launches for it, and the host longer for each of them than for a lookup.
"""

import torch
from torch import Tensor

from ..native import EXCHANGE, NATIVE
from .cuda_source import NoCompiler, check_launch, driver_address, functions_of
from .launching import HOST, current_device, device_of, raw_stream

SOURCE = "join_bags.cu"
THREADS, ITEMS = 256, 4
"""Of a block, and of a thread."""
MOST: int = 0 if NATIVE is None else NATIVE.MOST_JOINED
"""Features of a launch."""
_functions: dict[tuple[int, int], int] = {}
"""Handles by device and bytes of an id; 0 where there can be none."""


def join_bags(ids: list[Tensor], offsets: list[Tensor | None], bags: int) -> tuple[Tensor, Tensor] | None:
    """All ids, and the offsets of all features' bags.

    Equals `torch.cat(ids)` and offsets to which the number of ids before the feature is added.

    Args:
        ids: of each feature, int32 or int64 `[N]`.
        offsets: of each feature, int64 `[bags + 1]`; None for one id a bag.
        bags: of a feature.

    Returns:
        None, and nothing is launched, where only PyTorch can.
    """
    first = ids[0]
    index, _ = device_of(first)
    # where Python must read the tensors, PyTorch is as quick
    if index == HOST or len(ids) > MOST or EXCHANGE is None or current_device() != index:
        return None
    function = _functions.get((index, first.itemsize))
    if function is None:
        function = _function(index, first.itemsize)
    if not function:
        return None
    together = first.new_empty(sum([one.shape[0] for one in ids]))
    ends = torch.empty(len(ids) * bags + 1, dtype=torch.int64, device=first.device)
    failed = NATIVE.join_bags(
        driver_address(), function, ids, offsets, together, ends, bags, THREADS * ITEMS, THREADS, raw_stream(index)
    )
    if failed < 0:
        return None
    check_launch(SOURCE, failed)
    return together, ends


def _function(index: int, size: int) -> int:
    if torch.cuda.is_current_stream_capturing():
        # the driver loads nothing then
        return 0
    constants = {"MOST": MOST, "BYTES": size, "THREADS": THREADS, "ITEMS": ITEMS}
    try:
        (handle,) = functions_of(SOURCE, ["join_bags"], constants, index)
    except NoCompiler:
        handle = 0
    _functions[index, size] = handle
    return handle
