"""Ids out of range on a GPU: reported at a later call, so that no lookup waits for the device.

Each device has one word in page-locked memory of the host, which kernels write directly (`kernels/descriptors.py:
report_bad_bags`) and the host reads like any other. A lookup that checks looks at the word after its launch; so a bad
id is reported by that lookup or one of the next. `report(device, wait=True)` waits for the device first.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

POSITION_LIMIT = 2**40 - 1
FEATURE_BITS = 20


class LateBadId(IndexError):
    """An id of an earlier lookup was outside its table: treated as absent there, and reported now.

    Attributes:
        position: its place in the ids of its lookup (of all features of one storage type).
        feature: the number of its feature in that lookup.
    """

    def __init__(self, position: int, feature: int) -> None:
        super().__init__(
            f"ids must lie inside their table: an earlier lookup had one outside at position {position} of its ids, of "
            f"feature number {feature}; it counted as absent. Look the batch up on the CPU to see it, or clean the ids"
        )
        self.position, self.feature = position, feature


class _Word(NamedTuple):
    """The word of one device: as its kernels see it, and as the host does."""

    flag: Tensor
    value: NDArray[np.int64]


class _Memory:
    """Eight bytes that a CUDA device can reach, for `torch.as_tensor`."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<i8", "data": (address, False), "version": 3}


_words: dict[torch.device, _Word] = {}


def decode(word: int) -> tuple[int, int] | None:
    """`(position, feature)` of the first bad id, or None; the reverse of what the kernels write."""
    if word == 0:
        return None
    return POSITION_LIMIT - (word >> FEATURE_BITS), word & (2**FEATURE_BITS - 1)


def _word(device: torch.device) -> _Word:
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    word = _words.get(device)
    if word is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot hold the first lookup that checks its ids: run one before")
        locked = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        # the array keeps the memory
        word = _words[device] = _Word(torch.as_tensor(_Memory(locked.data_ptr()), device=device), locked.numpy())
    return word


def flag(device: torch.device) -> Tensor:
    """The word that kernels of this device write."""
    return _word(device).flag


def reported(device: torch.device) -> Tensor:
    """The same; raises first what earlier kernels wrote, see `report`."""
    report(device)
    return flag(device)


def report(device: torch.device, wait: bool = False) -> None:
    """Raises if an earlier lookup on `device` is known to have had a bad id; then forgets it.

    Args:
        wait: wait for all that was issued to the device so far.

    Raises:
        LateBadId: with position and feature of the first bad id.
    """
    word = _word(device)
    if wait:
        torch.cuda.synchronize(device)
    found = decode(int(word.value[0]))
    # a capture must go on; the next ordinary lookup reports
    if found is not None and not torch.cuda.is_current_stream_capturing():
        word.value[0] = 0
        raise LateBadId(*found)
