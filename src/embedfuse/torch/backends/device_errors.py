"""Ids out of range on a GPU: kept on the device, reported at a later call, so that no lookup waits for the device.

Each device has one word that kernels write (`kernels/descriptors.py: report_bad_ids`). After a lookup that checks,
the word is copied to page-locked memory without waiting; the first later lookup that finds the copy done raises. So a
bad id is reported one or a few lookups late. `report(device, wait=True)` asks at once.
"""

from dataclasses import dataclass

import torch
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


@dataclass
class _Word:
    """The word of one device, its copy on the host, and the event that tells when the copy is done."""

    flag: Tensor
    copy: Tensor
    event: torch.cuda.Event
    pending: bool = False


_words: dict[torch.device, _Word] = {}


def decode(word: int) -> tuple[int, int] | None:
    """`(position, feature)` of the first bad id, or None; the reverse of what the kernels write."""
    if word == 0:
        return None
    return POSITION_LIMIT - (word >> FEATURE_BITS), word & (2**FEATURE_BITS - 1)


def _word(device: torch.device) -> _Word:
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    if device not in _words:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot hold the first lookup that checks its ids: run one before")
        _words[device] = _Word(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, pin_memory=True),
            torch.cuda.Event(),
        )
    return _words[device]


def flag(device: torch.device) -> Tensor:
    """The word that kernels of this device write."""
    return _word(device).flag


def report(device: torch.device, wait: bool = False) -> None:
    """Raises if an earlier lookup on `device` is known to have had a bad id; then forgets it.

    Args:
        wait: wait for the lookups issued so far, and look at all of them.

    Raises:
        LateBadId: with position and feature of the first bad id.
    """
    if torch.cuda.is_current_stream_capturing():
        # a graph may not be asked about; its replays write the word, and the next ordinary lookup reports
        return
    word = _word(device)
    if word.pending and (wait or word.event.query()):
        word.event.synchronize()
        word.pending = False
        _raise(word)
    if not word.pending:
        word.copy.copy_(word.flag, non_blocking=True)
        word.event.record(torch.cuda.current_stream(device))
        word.pending = True
        if wait:
            word.event.synchronize()
            word.pending = False
            _raise(word)


def _raise(word: _Word) -> None:
    found = decode(int(word.copy))
    if found is not None:
        word.flag.zero_()
        raise LateBadId(*found)
