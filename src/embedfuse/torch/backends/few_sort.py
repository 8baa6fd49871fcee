"""Sorts few row numbers by `kernels/few_keys.py`, in one launch or two."""

from typing import Any

import torch

from ...kernels.configs import ceil_div
from ...kernels.few_keys import merge_kernel, rank_kernel
from .issuing import Issuer
from .launching import launcher

RANKED = 16
"""Keys that one program puts in their places."""


class FewSort:
    """A stable sort of few keys: one launch for up to `whole` of them, else two.

    Args:
        key: type of the keys.
        position: type of the positions.
        whole: so many are compared with all others.
        window: more are sorted by windows of so many first, a power of two of at least `RANKED`.
    """

    def __init__(self, key: torch.dtype, position: torch.dtype, whole: int, window: int) -> None:
        self._whole, self._window, small = whole, window, torch.int32
        tiles = {"ROWS": RANKED, "BLOCK": 256}
        self._rank_all = launcher(rank_kernel, 4, tiles, (key, key, position))
        self._rank = launcher(rank_kernel, 4, tiles, (key, key, small))
        self._merge = launcher(
            merge_kernel, 4, {"WINDOW": window, "ROWS": RANKED, "WINDOWS": 32},
            (key, small, key, position),
        )  # fmt: skip

    def __call__(self, number: Any, keys: tuple[Any, Any], order: Any, beside: Any, to: Issuer) -> Any:
        """Sorts; pointers as launchers take them.

        Args:
            number: of keys, at least 1.
            keys: the keys, which are lost, and memory for as many.
            order: gets their positions.
            beside: memory for as many int32.
            to: who issues the launches.

        Returns:
            Which of `keys` holds the sorted ones.
        """
        grid = (ceil_div(number, RANKED),)
        if number <= self._whole:
            to(self._rank_all, grid, (*keys, order), (number, grid[0] * RANKED))
            return keys[1]
        to(self._rank, grid, (*keys, beside), (number, self._window))
        to(self._merge, grid, (keys[1], beside, keys[0], order), (number,))
        return keys[0]
