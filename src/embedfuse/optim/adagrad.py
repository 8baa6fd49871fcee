"""Adagrad: each element's step shrinks with the sum of its squared gradients (Duchi et al., 2011)."""

# Triton code bears no annotations
# mypy: allow-untyped-defs

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._triton import tl, triton
from ._check import SMALLEST, check_interval
from .base import OWN_HYPER, Optimizer, Slot


@triton.jit
def adagrad_rule(w, g, s0, s1, p_hyper, step, dim, mask):
    """The row rule: `a += g²; w -= lr * g / (√a + ε)`."""
    lr = tl.load(p_hyper).to(tl.float32)
    epsilon = tl.load(p_hyper + 6).to(tl.float32)
    s0 = s0 + g * g
    # lanes beside the row hold 0 / 0 otherwise
    w = w - lr * g / tl.where(mask, tl.sqrt_rn(s0) + epsilon, 1.0)
    return w, s0, s1


def check_accumulator(initial: float, epsilon: float) -> None:
    """Raises unless `√initial + epsilon` can divide."""
    check_interval("initial_accumulator_value", initial, "[0, inf)", "0.1 is usual")
    check_interval("epsilon", epsilon, "[0, inf)", "0 or 1e-8 is usual")
    if max(initial, epsilon) < float(SMALLEST):
        raise ValueError(
            f"`initial_accumulator_value` must be at least {SMALLEST}, or 0 with such an `epsilon`, got {initial} and "
            f"{epsilon}: the step of a row whose gradient is 0 would be 0 / 0; use `epsilon=1e-8`"
        )


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """`a ← a + g²; w ← w - lr·g / (√a + ε)`, with TensorFlow's defaults (no ε).

    Equivalent to `torch.optim.Adagrad(lr, initial_accumulator_value=…, eps=…)` on the rows that were looked up.

    Args:
        initial_accumulator_value: start of `a`, > 0 (or 0 with an `epsilon`).
        epsilon: added to the root.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 0.0

    native: ClassVar[str | None] = "adagrad"
    rule: ClassVar[Any] = adagrad_rule
    slot_kinds: ClassVar[tuple[Literal["row", "element"], ...]] = ("element",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_accumulator(self.initial_accumulator_value, self.epsilon)

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulators", "element", self.initial_accumulator_value),)

    def own_hyper(self) -> tuple[float, ...]:
        return (self.epsilon,)

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        a = slots[0] + g * g
        return w - h[0] * g / (xp.sqrt(a) + h[OWN_HYPER]), (a,)
