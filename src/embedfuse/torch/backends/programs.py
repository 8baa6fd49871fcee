"""The programs of batches of one kind, whose launches differ by numbers of ids and the like."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .descriptor_facts import WIDE_WORD
from .issuing import Now
from .launching import HOST, device_of, unwatched
from .program import Program, write_down

MOST = 64
"""Of a kind: numbers of ids have a dozen limits on whose sides launches differ."""


def run(programs: list[Program], given: tuple[Any, ...]) -> bool:
    """Launches, if there was such a batch before."""
    if programs and unwatched():
        for program in programs:
            if program(given):
                return True
    return False


def issued(
    programs: list[Program], given: Any, tensor: Tensor, issue: Callable[..., None], ask: Callable[..., None]
) -> Program | None:
    """Launches, on the current device, and returns the program that does it next time, if there can be one.

    Args:
        programs: those that are there; gets another one if none of them fits.
        given: tensors and numbers of the batch at hand, a named tuple.
        tensor: any on the device.
        issue: `issue(given, to)` issues the launches.
        ask: asks of `given` whatever else decides about them, beside its tensors' types and dimensions.
    """
    index, _ = device_of(tensor)
    if index == HOST or not unwatched():
        issue(given, Now(tensor))
        return None
    left_to_python = False
    for program in programs:
        done = program(given)
        if done:
            return program
        left_to_python |= done is None
    issue(given, Now(tensor))
    if left_to_python:
        return None
    written = write_down(given, index, issue, ask)
    if written is not None:
        if len(programs) >= MOST:
            programs.clear()
        programs.append(written)
    return written


def ask_contiguous(*vectors: Any) -> None:
    """Asks traced vectors, or None, whether they are contiguous."""
    for vector in vectors:
        if vector is not None and not vector.stride()[0] == 1:
            # one element is contiguous whatever the stride, but of it alone
            bool(vector.shape[0] > 1)


def ask_aligned(grad: Any, columns: int, itemsize: int) -> None:
    """Asks traced gradient rows for all that `grad_align` looks at."""
    row, column = grad.stride()
    if column == 1:
        aligned = 2
        while aligned <= min(columns, WIDE_WORD // itemsize):
            bool(row // aligned * aligned == row)
            aligned *= 2
