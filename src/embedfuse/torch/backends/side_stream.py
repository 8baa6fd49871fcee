"""A second stream of a device, for kernels that wait for memory while others move it."""

import threading
from typing import Any

import torch

from ..native import NATIVE
from .cuda_source import driver_address
from .launching import raw_stream


class Side:
    """A stream beside the current one, of this thread, for work that need not wait for its neighbours."""

    def __init__(self, device: int) -> None:
        self.device = device
        # its few programs are to be under way before the many of the other stream
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._ready, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._current = torch.cuda.current_stream(device)
        # the same for C++
        self.beside: Any = None
        if NATIVE is not None:
            for event in (self._ready, self._done):
                # PyTorch makes it now
                event.record(self.stream)
            handles = self.stream.cuda_stream, self._ready.cuda_event, self._done.cuda_event
            self.beside = NATIVE.Beside(
                *handles, driver_address("cuEventRecord"), driver_address("cuStreamWaitEvent")
            )  # fmt: skip

    def fork(self) -> torch.cuda.Stream:
        """What is issued to the stream from now on waits for all that was issued to the current one so far."""
        if self._current.cuda_stream != raw_stream(self.device):
            # torch makes a new object in each call, slowly
            self._current = torch.cuda.current_stream(self.device)
        self._ready.record(self._current)
        self.stream.wait_event(self._ready)
        return self.stream

    def join(self) -> None:
        """The stream current at `fork` waits for all issued to this one, so that tensors of both may be freed."""
        self._done.record(self.stream)
        self._current.wait_event(self._done)


_sides = threading.local()


def side_of(device: int) -> Side:
    """The side stream of a device, one for each thread, whose events no other thread records."""
    if not hasattr(_sides, "known"):
        _sides.known = {}
    sides: dict[int, Side] = _sides.known
    if device not in sides:
        sides[device] = Side(device)
    return sides[device]
