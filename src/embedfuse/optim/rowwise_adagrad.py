"""Row-wise Adagrad: Adagrad with one accumulator a row, the mean of the squares: state of 1/dim the size."""

# Triton code bears no annotations
# mypy: allow-untyped-defs

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._triton import tl, triton
from .adagrad import check_accumulator
from .base import OWN_HYPER, Optimizer, Slot


@triton.jit
def rowwise_adagrad_rule(w, g, s0, s1, p_hyper, step, dim, mask):
    """The row rule: `a += Σ g² / dim; w -= lr / (√a + ε) * g`; the block must hold whole rows."""
    lr = tl.load(p_hyper).to(tl.float32)
    epsilon = tl.load(p_hyper + 6).to(tl.float32)
    square = tl.where(mask, g * g, 0.0)
    s0 = s0 + tl.sum(square, axis=1, keep_dims=True) / dim
    w = w - lr / (tl.sqrt_rn(s0) + epsilon) * g
    return w, s0, s1


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """`a ← a + mean(g²) over the row; w ← w - lr·g / (√a + ε)`, with one `a` a row.

    Equivalent to FBGEMM's exact row-wise Adagrad, and to `Adagrad` for tables of dim 1.

    Args:
        initial_accumulator_value: start of `a`, > 0 (or 0 with an `epsilon`).
        epsilon: added to the root.
    """

    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8

    native: ClassVar[str | None] = "rowwise_adagrad"
    rule: ClassVar[Any] = rowwise_adagrad_rule
    slot_kinds: ClassVar[tuple[Literal["row", "element"], ...]] = ("row",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_accumulator(self.initial_accumulator_value, self.epsilon)

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulators", "row", self.initial_accumulator_value),)

    def own_hyper(self) -> tuple[float, ...]:
        return (self.epsilon,)

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        a = slots[0] + xp.mean(g * g, axis=-1, keepdims=True)
        return w - h[0] / (xp.sqrt(a) + h[OWN_HYPER]) * g, (a,)
