"""The part of the host's work that is C++ (`kernels/launch.cpp`), and how it reads PyTorch's tensors."""

from typing import Any

import torch
from torch import Tensor

try:
    from ..kernels import _launch
except ImportError:
    # a source tree whose C++ was not compiled
    _launch = None  # type: ignore[assignment]

NATIVE: Any = _launch
"""The module; None where it was not compiled."""
ADDRESS, TYPE, SIZES, STEPS = 0, 1, 2, 4
"""Fields of a tensor: `kernels/tensors.h`."""
FIELDS = 6
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""By which C++ reads tensors in a few nanoseconds; PyTorch has it since 2.10."""
_CODES = {torch.bool: 6, torch.bfloat16: 4, torch.uint8: 1}
"""Of types in DLPack, but for integers, 0, and other floats, 2."""


def fields_of(tensor: Tensor) -> tuple[int, ...]:
    """What C++ sees of a tensor, where there is no exchange."""
    dtype, where, count = tensor.dtype, tensor.device, tensor.dim()
    code = _CODES.get(dtype, 2 if dtype.is_floating_point else 0)
    described = (where.type == "cuda") + 1, where.index or 0, count, code, 8 * dtype.itemsize
    kind = 0
    for number, base in zip(described, (1, 4096, 256, 256, 256), strict=True):
        kind = kind * base + number
    shape, steps = ((*found[:2], 0, 0)[:2] for found in (tensor.shape, tensor.stride()))
    return tensor.data_ptr(), kind, *shape, *steps


if NATIVE is not None:
    NATIVE.learn_tensors(EXCHANGE, Tensor, fields_of)
