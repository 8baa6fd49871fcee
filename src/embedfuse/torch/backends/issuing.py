"""Who issues the launches of a batch: `Now` at once; `Trace` (`program.py`) writes them down for batches to come."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..native import NATIVE
from .cuda_source import driver_address
from .launching import HOST, Launcher, device_of, raw_stream
from .side_stream import side_of

launch: Any = getattr(NATIVE, "launch", None)


class Issuer(Protocol):
    """Pointers are as launchers take them."""

    device: int
    """Index, or HOST."""
    has_streams: bool
    """Whether there is a second stream."""

    def __call__(
        self, launcher: Launcher, grid: tuple[Any, ...], pointers: tuple[Any, ...], numbers: tuple[Any, ...],
        aside: bool = False,
    ) -> None:  # fmt: skip
        """Launches a kernel of Triton's; `aside`: on the second stream."""
        ...

    def own(self, function: int, blocks: Any, threads: int, arguments: tuple[Any, ...], together: bool = False) -> int:
        """Launches a kernel of ours; what the driver says, 0 if all is well. `together`: all blocks run at once."""
        ...

    def pointer(self, tensor: Any) -> Any:
        """The pointer to a tensor, or None to None."""
        ...

    def constant(self, tensor: Tensor) -> Any:
        """The pointer to a tensor that is the same for all batches."""
        ...

    def memory(self, size: Any, starts: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Any]:
        """An allocation of `size` bytes, once for a batch: pointers to its parts."""
        ...

    def tensor(self, number: Any, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """A tensor for PyTorch's own ops, and the pointer to it."""
        ...

    def kept(self, tensor: Tensor) -> Any:
        """The pointer to a tensor that PyTorch made."""
        ...

    def fork(self) -> None:
        """What is launched aside from now on waits for all launches so far."""
        ...

    def join(self) -> None:
        """What is launched from now on waits for all that was launched aside."""
        ...


class Now:
    """Launches at once, on the device of a tensor.

    What is allocated lives as long as this object does, which must be until all is issued.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._where = tensor.device
        self.device, self._pointer = device_of(tensor)
        self.has_streams = self.device != HOST
        self._tensors: list[Tensor] = []
        self._side: Any = None

    def __call__(
        self, launcher: Launcher, grid: tuple[Any, ...], pointers: tuple[Any, ...], numbers: tuple[Any, ...],
        aside: bool = False,
    ) -> None:  # fmt: skip
        """See `Issuer`."""
        launcher(grid, pointers, numbers, self.device, self._side.stream if aside else None)

    def own(self, function: int, blocks: Any, threads: int, arguments: tuple[Any, ...], together: bool = False) -> int:
        """See `Issuer`."""
        failed: int = launch(
            driver_address(), function, blocks, threads, raw_stream(self.device), arguments, together
        )  # fmt: skip
        return failed

    def pointer(self, tensor: Any) -> Any:
        """See `Issuer`."""
        return None if tensor is None else self._pointer(tensor)

    def constant(self, tensor: Tensor) -> Any:
        """See `Issuer`."""
        return self._pointer(tensor)

    def memory(self, size: Any, starts: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Any]:
        """See `Issuer`."""
        made = torch.empty(size, dtype=torch.uint8, device=self._where)
        self._tensors.append(made)
        if self.device != HOST:
            base = made.data_ptr()
            return [base + start for start in starts]
        ends = [*starts[1:], size]
        return [made[start:end].view(dtype) for start, end, dtype in zip(starts, ends, dtypes, strict=True)]

    def tensor(self, number: Any, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """See `Issuer`."""
        made = torch.empty(number, dtype=dtype, device=self._where)
        return made, self.kept(made)

    def kept(self, tensor: Tensor) -> Any:
        """See `Issuer`."""
        self._tensors.append(tensor)
        return self._pointer(tensor)

    def fork(self) -> None:
        """See `Issuer`."""
        self._side = side_of(self.device)
        self._side.fork()

    def join(self) -> None:
        """See `Issuer`."""
        self._side.join()
