"""Adagrad with momentum: the scaled gradient is gathered, and any root and a decaying accumulator may scale it."""

# Triton code bears no annotations
# mypy: allow-untyped-defs

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._triton import tl, triton
from ._check import SMALLEST, check_flag, check_interval
from .base import OWN_HYPER, Optimizer, Slot

LARGEST_LOG = 88.0
"""Just under the logarithm of the largest float32."""


@triton.jit
def accumulate(g, a, p_hyper):
    """`a + g²`, or with a decay `beta2` below 1 the running mean."""
    return tl.load(p_hyper + 9).to(tl.float32) * a + tl.load(p_hyper + 11).to(tl.float32) * (g * g)


@triton.jit
def move(w, scaled, m, p_hyper):
    """`m = μ m + scaled`, and the step along it."""
    lr = tl.load(p_hyper).to(tl.float32)
    momentum = tl.load(p_hyper + 6).to(tl.float32)
    nesterov = tl.load(p_hyper + 7).to(tl.float32)
    m = momentum * m + scaled
    w = w - lr * ((1 - nesterov + nesterov * momentum) * m + nesterov * scaled)
    return w, m


@triton.jit
def adagrad_momentum_rule(w, g, s0, s1, p_hyper, step, dim, mask):
    """The row rule for any root."""
    s0 = accumulate(g, s0, p_hyper)
    exponent = tl.load(p_hyper + 8)
    # in float64, where a power is exact enough
    shrunk = tl.exp2(-tl.log2(s0 + tl.load(p_hyper + 10)) / exponent)
    w, s1 = move(w, g * shrunk.to(tl.float32), s1, p_hyper)
    return w, s0, s1


@triton.jit
def root_adagrad_momentum_rule(w, g, s0, s1, p_hyper, step, dim, mask):
    """The row rule for the square root."""
    s0 = accumulate(g, s0, p_hyper)
    w, s1 = move(w, g / tl.sqrt_rn(s0 + tl.load(p_hyper + 10).to(tl.float32)), s1, p_hyper)
    return w, s0, s1


@dataclass(frozen=True)
class AdagradMomentum(Optimizer):
    """TensorFlow's `AdagradMomentum`.

    `a ← a + g²`, or with `beta2 < 1` `a ← beta2·a + (1 - beta2)·g²`; `s = g·(a + ε)^(-1/exponent)`; `m ← μ·m + s`;
    `w ← w - lr·m`, and Nesterov's `w ← w - lr·(μ·m + s)`.

    Args:
        momentum: μ, from 0 to 1.
        use_nesterov: look one step ahead.
        exponent: which root, > 0; 2 is Adagrad's.
        beta2: 1 for a sum of squares, less for a running mean.
        epsilon: > 0, added to `a`.
    """

    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2.0
    beta2: float = 1.0
    epsilon: float = 1e-10

    native: ClassVar[str | None] = "adagrad_momentum"
    rule: ClassVar[Any] = adagrad_momentum_rule
    slot_kinds: ClassVar[tuple[Literal["row", "element"], ...]] = ("element", "element")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("momentum", self.momentum, "[0, 1]", "0.9 is usual, 0 is none")
        check_flag("use_nesterov", self.use_nesterov)
        check_interval("exponent", self.exponent, "(0, inf)", "2 is usual")
        check_interval("beta2", self.beta2, "[0, 1]", "1 sums the squares")
        check_interval("epsilon", self.epsilon, f"[{SMALLEST}, inf)", "1e-10 is usual")
        if -math.log(self.epsilon) / self.exponent > LARGEST_LOG:
            raise ValueError(
                f"`epsilon ** (-1 / exponent)` must be finite in float32, got `epsilon={self.epsilon}` and "
                f"`exponent={self.exponent}`: use a larger `epsilon`"
            )

    def kernel_class(self) -> type[Optimizer]:
        return _RootAdagradMomentum if self.exponent == 2 else AdagradMomentum

    def slots(self) -> tuple[Slot, ...]:
        return Slot("accumulators", "element"), Slot("momenta", "element")

    def own_hyper(self) -> tuple[float, ...]:
        # here and not in the rule: in float32 1 - 0.999 is wrong in its fifth digit
        share = 1.0 if self.beta2 == 1 else 1 - self.beta2
        return (self.momentum, float(self.use_nesterov), self.exponent, self.beta2, self.epsilon, share)

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        a = _accumulate(g, slots[0], h)
        exponent, epsilon = h[OWN_HYPER + 2], h[OWN_HYPER + 4]
        w, m = _move(w, g * (a + epsilon) ** (-1 / exponent), slots[1], h)
        return w, (a, m)


class _RootAdagradMomentum(AdagradMomentum):
    """What `AdagradMomentum` with the square root runs as."""

    rule: ClassVar[Any] = root_adagrad_momentum_rule

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        a = _accumulate(g, slots[0], h)
        w, m = _move(w, g / xp.sqrt(a + h[OWN_HYPER + 4]), slots[1], h)
        return w, (a, m)


def _accumulate(g: Any, a: Any, h: Any) -> Any:
    return h[OWN_HYPER + 3] * a + h[OWN_HYPER + 5] * (g * g)


def _move(w: Any, scaled: Any, m: Any, h: Any) -> tuple[Any, Any]:
    momentum, nesterov = h[OWN_HYPER], h[OWN_HYPER + 1]
    m = momentum * m + scaled
    return w - h[0] * ((1 - nesterov + nesterov * momentum) * m + nesterov * scaled), m
