"""Zeros for gradients of large tables, without the pass over memory that writes them.

`torch.zeros` on a CPU writes every byte, most of which a gradient then leaves as it is. Fresh memory of the system is
zero already, and comes page by page as it is touched, by all threads at once; in large pages where there are such.
"""

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LEAST = 1 << 22
"""Bytes from which on this is worth a call to the system."""
LINE = 64
"""Bytes that rows are aligned to."""


def zero_pages(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`like.new_zeros(shape, dtype=dtype)`."""
    dtype = dtype or like.dtype
    size = dtype.itemsize
    for length in shape:
        size *= int(length)
    if like.device.type != "cpu" or type(like) not in (Tensor, torch.nn.Parameter) or size < LEAST:
        return like.new_zeros(shape, dtype=dtype)
    # NumPy asks for memory that is zero, and gets large pieces straight from the system
    raw = torch.from_numpy(np.zeros(size + LINE, np.uint8))
    with contextlib.suppress(ImportError):
        from ..cpu import prefer_large_pages

        prefer_large_pages(raw)
    shift = -raw.data_ptr() % LINE
    return raw[shift : shift + size].view(dtype).view(tuple(shape))
