"""Adam: running means of the gradient and of its square (Kingma & Ba, 2015), in both flavours that are in use."""

# Triton code bears no annotations
# mypy: allow-untyped-defs

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._triton import tl, triton
from ._check import SMALLEST, check_betas, check_flag, check_interval, log_beta
from .base import OWN_HYPER, Optimizer, Slot

SMALLEST_INSIDE = "1.1e-19"
"""Lower bound of an epsilon that is squared: the root of `SMALLEST`."""


@triton.jit
def one_minus_exp(x):
    """`1 - exp(x)` for `x <= 0`, to a few units in the last place, in float32.

    Not in float64, for which most GPUs have few units: it could take longer than reading the row.
    """
    y = tl.maximum(x, -0.5)
    series = -y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7 * (1 + y / 8)))))))
    return tl.where(x > -0.5, series, 1 - tl.exp(x))


@triton.jit
def adam_rule(w, g, s0, s1, p_hyper, step, dim, mask):
    """The row rule: running means `m`, `v`; `w -= lr * m / √(v + ε²)`, or the corrected form with ε outside."""
    lr = tl.load(p_hyper).to(tl.float32)
    beta_1 = tl.load(p_hyper + 6)
    beta_2 = tl.load(p_hyper + 7)
    epsilon = tl.load(p_hyper + 8).to(tl.float32)
    corrected = tl.load(p_hyper + 9).to(tl.float32)
    inside = tl.load(p_hyper + 10).to(tl.float32)
    log_beta_1 = tl.load(p_hyper + 11).to(tl.float32)
    log_beta_2 = tl.load(p_hyper + 12).to(tl.float32)
    time = step.to(tl.float32)
    correction_1 = 1 - corrected + corrected * one_minus_exp(time * log_beta_1)
    correction_2 = 1 - corrected + corrected * one_minus_exp(time * log_beta_2)
    # `1 - beta` before rounding: in float32 1 - 0.999 is wrong in its fifth digit
    s0 = beta_1.to(tl.float32) * s0 + (1 - beta_1).to(tl.float32) * g
    s1 = beta_2.to(tl.float32) * s1 + (1 - beta_2).to(tl.float32) * (g * g)
    root = tl.sqrt_rn(s1 + inside * epsilon * epsilon) * (1 / tl.sqrt_rn(correction_2))
    w = w - lr / correction_1 * s0 / (root + (1 - inside) * epsilon)
    return w, s0, s1


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, in the flavour of TensorFlow's embedding engines unless `bias_correction` asks for the textbook one.

    `m ← β₁m + (1-β₁)g; v ← β₂v + (1-β₂)g²`, then with the defaults `w ← w - lr·m / √(v + ε²)`,
    with `sum_inside_sqrt=False` `w ← w - lr·m / (√v + ε)`,
    and with `bias_correction=True` `w ← w - lr·(m / (1-β₁ᵗ)) / (√(v / (1-β₂ᵗ)) + ε)`, where t counts the table's steps.
    The last is equivalent to `torch.optim.Adam(lr, betas, eps)` where every row is looked up, and, where not, to that
    (not lazy) or to `torch.optim.SparseAdam` (lazy) but for ε, which SparseAdam adds before the correction,
    `(√v + ε) / √(1-β₂ᵗ)`: where gradients are tiny, the steps differ.

    Args:
        beta_1: decay rate of the mean of g, in [0, 1).
        beta_2: decay rate of the mean of g², in [0, 1).
        epsilon: > 0, keeps the division finite.
        lazy_adam: leave rows that were not looked up alone; False moves the whole table every step, as if their
            gradient were 0, and needs `use_gradient_accumulation`.
        sum_inside_sqrt: where ε stands; without effect with `bias_correction`, which has it outside.
        bias_correction: divide the means by the weight they have gathered so far.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    lazy_adam: bool = True
    sum_inside_sqrt: bool = True
    bias_correction: bool = False

    native: ClassVar[str | None] = "adam"
    rule: ClassVar[Any] = adam_rule
    slot_kinds: ClassVar[tuple[Literal["row", "element"], ...]] = ("element", "element")

    def __post_init__(self) -> None:
        for name in ("lazy_adam", "sum_inside_sqrt", "bias_correction"):
            check_flag(name, getattr(self, name))
        super().__post_init__()
        check_betas(self.beta_1, self.beta_2)
        # its square must not be 0 in float32
        smallest = SMALLEST_INSIDE if self.sum_inside_sqrt and not self.bias_correction else SMALLEST
        check_interval("epsilon", self.epsilon, f"[{smallest}, inf)", "1e-7 is usual")

    @property
    def dense(self) -> bool:
        return not self.lazy_adam

    def slots(self) -> tuple[Slot, ...]:
        return Slot("momenta", "element"), Slot("velocities", "element")

    def own_hyper(self) -> tuple[float, ...]:
        inside = self.sum_inside_sqrt and not self.bias_correction
        flags = float(self.bias_correction), float(inside)
        return (self.beta_1, self.beta_2, self.epsilon, *flags, log_beta(self.beta_1), log_beta(self.beta_2))

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        beta_1, beta_2, epsilon, corrected, inside, log_beta_1, log_beta_2 = (h[OWN_HYPER + i] for i in range(7))

        # whatever torch.set_default_device says; arrays of NumPy 1 are nowhere in particular
        there = {"device": w.device} if hasattr(w, "device") else {}

        def one_minus_power(log: Any, exponent: Any) -> Any:
            """`1 - exp(log) ** exponent`, exact to the last digits even where `exp(log)` is nearly 1."""
            return -xp.expm1(xp.asarray(exponent * log, dtype=w.dtype, **there))

        m = beta_1 * slots[0] + one_minus_power(log_beta_1, 1) * g
        v = beta_2 * slots[1] + one_minus_power(log_beta_2, 1) * (g * g)
        # the flags are 0 or 1, so these products choose one of the two forms exactly
        correction_1 = 1 - corrected + corrected * one_minus_power(log_beta_1, step)
        correction_2 = 1 - corrected + corrected * one_minus_power(log_beta_2, step)
        root = xp.sqrt(v + inside * epsilon * epsilon) / xp.sqrt(correction_2)
        return w - h[0] / correction_1 * m / (root + (1 - inside) * epsilon), (m, v)
