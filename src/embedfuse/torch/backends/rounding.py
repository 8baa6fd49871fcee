"""Stochastic rounding to 16 bits, in PyTorch: what the native engine and the kernels do, bit for bit.

A float32 is cut off after a random number has been added to the bits that go, so that it is rounded up with the
probability of the share that it lies above the lower neighbour. The random number is a hash of seed, step and element:
no generator to keep, and a resumed run repeats it.
"""

import torch
from torch import Tensor

from ...optim.base import ROUNDING_SEED

BITS = {torch.bfloat16: 16, torch.float16: 13}
SEED_FACTOR, STEP_FACTOR = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def rounded(values: Tensor, dtype: torch.dtype, hyper: Tensor, step: Tensor, rows: Tensor) -> Tensor:
    """`values` as `dtype`: at random where `hyper` has a seed, else to the nearest.

    Args:
        values: float32 `[U, D]`.
        dtype: of the table.
        hyper: float64 `[HYPER_WIDTH]` of the table.
        step: number of the step, int64 scalar.
        rows: int64 `[U]`, numbers of the rows in the table.
    """
    if dtype not in BITS:
        return values.to(dtype)
    width = values.shape[1]
    element = rows[:, None] * width + torch.arange(width, device=values.device)
    seed = hyper[ROUNDING_SEED].to(torch.int64)
    low = (1 << BITS[dtype]) - 1
    bits = values.view(torch.int32) + (_hash(element, seed, step) & low).to(torch.int32)
    cut = (bits & ~low).view(torch.float32)
    chosen = torch.where((seed != 0) & torch.isfinite(values), cut, values)
    return chosen.to(dtype)


def _hash(element: Tensor, seed: Tensor, step: Tensor) -> Tensor:
    x = element + seed * _signed(SEED_FACTOR) + step * _signed(STEP_FACTOR)
    x = (x ^ _shifted(x, 30)) * _signed(FIRST_FACTOR)
    x = (x ^ _shifted(x, 27)) * _signed(SECOND_FACTOR)
    return x ^ _shifted(x, 31)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shifted(x: Tensor, places: int) -> Tensor:
    """Right shift that brings in zeros, which PyTorch has for unsigned numbers only."""
    return (x >> places) & ((1 << (64 - places)) - 1)
