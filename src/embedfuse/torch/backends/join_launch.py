"""The launch that joins the offsets of features, as `lookup_launch.py` has that of lookups."""

from typing import Any, NamedTuple

import torch

from ...kernels.configs import ceil_div
from ...kernels.join_offsets import join_offsets_kernel
from .issuing import Issuer
from .launching import launcher
from .program import Program
from .programs import issued

JOINED = 512
"""Bags of one program."""
AHEAD = 128
"""Features whose ends are read at a time."""


class JoinBatch(NamedTuple):
    """What is read and written."""

    offsets: Any  # [F, B + 1], contiguous
    out: Any


class Joins:
    """Joins the offsets of any features."""

    def __init__(self) -> None:
        self.programs: list[Program] = []

    def __call__(self, batch: JoinBatch) -> None:
        """Launches, on the current device."""
        made = launcher(join_offsets_kernel, 4, {"BAGS": JOINED, "AHEAD": AHEAD}, (torch.int64, torch.int64))

        def issue(given: JoinBatch, to: Issuer) -> None:
            features, bags = given.offsets.shape[0], given.offsets.shape[1] + -1
            pointers = to.pointer(given.offsets), to.pointer(given.out)
            to(made, (features * ceil_div(bags, JOINED),), pointers, (features, bags))

        def ask(given: JoinBatch) -> None:
            (features, places), (row, column) = given.offsets.shape, given.offsets.stride()
            bool(features > 0), bool(places > 1), bool(column == 1)
            if not row == places:
                # one row is contiguous whatever its step, but of it alone
                bool(features > 1)

        issued(self.programs, batch, batch.out, issue, ask)
