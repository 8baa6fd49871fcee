"""Stochastic gradient descent, with momentum if asked."""

# Triton code bears no annotations
# mypy: allow-untyped-defs

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._triton import tl, triton
from ._check import check_flag, check_interval
from .base import OWN_HYPER, Optimizer, Slot


@triton.jit
def sgd_rule(w, g, s0, s1, p_hyper, step, dim, mask):
    """The row rule: `w -= lr * g`."""
    lr = tl.load(p_hyper).to(tl.float32)
    return w - lr * g, s0, s1


@triton.jit
def momentum_rule(w, g, s0, s1, p_hyper, step, dim, mask):
    """The row rule: `m = μ m + g; w -= lr * m`, or `w -= lr * (μ m + g)` after Nesterov."""
    lr = tl.load(p_hyper).to(tl.float32)
    momentum = tl.load(p_hyper + 6).to(tl.float32)
    nesterov = tl.load(p_hyper + 7).to(tl.float32)
    s0 = momentum * s0 + g
    w = w - lr * ((1 - nesterov + nesterov * momentum) * s0 + nesterov * g)
    return w, s0, s1


@dataclass(frozen=True)
class SGD(Optimizer):
    """`w ← w - lr·g`; with momentum `m ← μ·m + g; w ← w - lr·m`, and Nesterov's `w ← w - lr·(μ·m + g)`.

    Equivalent to `torch.optim.SGD(lr, momentum=…, nesterov=…)` on the rows that were looked up; the momentum of the
    others waits. Without momentum there is no state.

    Args:
        momentum: μ, from 0 to 1.
        nesterov: look one step ahead; needs momentum.
    """

    learning_rate: float | Callable[[], float] = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    native: ClassVar[str | None] = "momentum"
    rule: ClassVar[Any] = momentum_rule
    slot_kinds: ClassVar[tuple[Literal["row", "element"], ...]] = ("element",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("momentum", self.momentum, "[0, 1]", "0.9 is usual, 0 is none")
        check_flag("nesterov", self.nesterov)
        if self.nesterov and self.momentum == 0:
            raise ValueError("`nesterov` needs a positive `momentum`, got 0: use `momentum=0.9`")

    def kernel_class(self) -> type[Optimizer]:
        return SGD if self.momentum else _PlainSGD

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("momenta", "element"),) if self.momentum else ()

    def own_hyper(self) -> tuple[float, ...]:
        return (self.momentum, float(self.nesterov)) if self.momentum else ()

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        momentum, nesterov = h[OWN_HYPER], h[OWN_HYPER + 1]
        m = momentum * slots[0] + g
        # the flag is 0 or 1, so these products choose one of the two forms exactly
        return w - h[0] * ((1 - nesterov + nesterov * momentum) * m + nesterov * g), (m,)


class _PlainSGD(SGD):
    """What `SGD` without momentum runs as."""

    native: ClassVar[str | None] = "sgd"
    rule: ClassVar[Any] = sgd_rule
    slot_kinds: ClassVar[tuple[Literal["row", "element"], ...]] = ()

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        return w - h[0] * g, ()
