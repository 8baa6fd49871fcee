"""FTRL-proximal: follow the regularised leader, with exact zeros under L1 (McMahan et al., 2013)."""

# Triton code bears no annotations
# mypy: allow-untyped-defs

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .._triton import tl, triton
from ._check import SMALLEST, check_flag, check_interval
from .base import OWN_HYPER, Optimizer, Slot


@triton.jit
def power(base, exponent):
    """`base ** exponent` in float64, for `base >= 0`, `exponent >= 0`; `0 ** 0` is 1."""
    base = base.to(tl.float64)
    positive = tl.exp2(exponent * tl.log2(tl.where(base > 0, base, 1.0)))
    return tl.where(base > 0, positive, (exponent == 0).to(tl.float64))


@triton.jit
def solve(w, g, z, old_power, new_power, p_hyper):
    """The closed form of the new row: `z += g - (new_power - old_power) * w / lr; w = N / D`."""
    lr = tl.load(p_hyper).to(tl.float32)
    l1 = tl.load(p_hyper + 7).to(tl.float32)
    l2 = tl.load(p_hyper + 8).to(tl.float32)
    beta = tl.load(p_hyper + 9).to(tl.float32)
    multiply = tl.load(p_hyper + 10).to(tl.float32)
    shrinkage = tl.load(p_hyper + 11).to(tl.float32)
    scale = multiply * lr + 1 - multiply
    rate = (1 - multiply) * lr + multiply
    z = z + scale * (g + 2 * shrinkage * w) - ((new_power - old_power) / rate).to(tl.float32) * w
    bound = scale * l1
    numerator = tl.minimum(tl.maximum(z, -bound), bound) - z
    denominator = ((new_power + beta) / rate).to(tl.float32) + 2 * scale * l2
    w = tl.where(denominator == 0, 0.0, numerator / tl.where(denominator == 0, 1.0, denominator))
    return w, z


@triton.jit
def ftrl_rule(w, g, s0, s1, p_hyper, step, dim, mask):
    """The row rule for any power."""
    exponent = tl.load(p_hyper + 6)
    a = s0 + g * g
    w, s1 = solve(w, g, s1, power(s0, exponent), power(a, exponent), p_hyper)
    return w, a, s1


@triton.jit
def root_ftrl_rule(w, g, s0, s1, p_hyper, step, dim, mask):
    """The row rule for the power 1/2."""
    a = s0 + g * g
    w, s1 = solve(w, g, s1, tl.sqrt_rn(s0), tl.sqrt_rn(a), p_hyper)
    return w, a, s1


@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-proximal with TensorFlow's parameters.

    With `p = -learning_rate_power`, `a' = a + g²` and `δ = a'^p - a^p`:

        z ← z + g + 2·shrinkage·w - δ·w / lr
        w ← (clip(z, -l1, l1) - z) / ((a'^p + beta) / lr + 2·l2)       0 where the denominator is 0

    and with `multiply_linear_by_learning_rate` the same with z, numerator and denominator times `lr`, which needs no
    division by `lr`. A row is computed anew from z, not moved: looked up for the first time with gradient 0, it
    becomes 0. Equivalent to TensorFlow's `FtrlV2` kernels and to its embedding engines.

    Args:
        learning_rate_power: -p, at most 0; -0.5 is Adagrad's square root.
        l1_regularization_strength: ≥ 0; makes small weights exactly 0.
        l2_regularization_strength: ≥ 0.
        beta: ≥ 0, as in the paper; the same as `beta / (2 * learning_rate)` more L2.
        initial_accumulator_value: start of `a`, > 0, or 0 with `allow_zero_accumulator`.
        multiply_linear_by_learning_rate: keep `lr * z` instead of `z`; for learning rates that come near 0.
        allow_zero_accumulator: accept 0 as the start of `a`.
        l2_shrinkage_regularization_strength: ≥ 0; L2 on the gradient instead of the weight.
    """

    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False
    l2_shrinkage_regularization_strength: float = 0.0

    native: ClassVar[str | None] = "ftrl"
    rule: ClassVar[Any] = ftrl_rule
    slot_kinds: ClassVar[tuple[Literal["row", "element"], ...]] = ("element", "element")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_interval("learning_rate_power", self.learning_rate_power, "(-inf, 0]", "-0.5 is usual")
        for prefix in ("l1", "l2", "l2_shrinkage"):
            name = f"{prefix}_regularization_strength"
            check_interval(name, getattr(self, name), "[0, inf)", "0 is none")
        check_interval("beta", self.beta, "[0, inf)", "0 is none")
        check_flag("multiply_linear_by_learning_rate", self.multiply_linear_by_learning_rate)
        check_flag("allow_zero_accumulator", self.allow_zero_accumulator)
        if not (self.allow_zero_accumulator and self.initial_accumulator_value == 0):
            way_out = "0.1 is usual; 0 needs `allow_zero_accumulator=True`"
            check_interval("initial_accumulator_value", self.initial_accumulator_value, f"[{SMALLEST}, inf)", way_out)
        if not callable(self.learning_rate):
            self._check_positive(self.learning_rate)

    def _check_positive(self, learning_rate: float) -> None:
        if learning_rate == 0 and not self.multiply_linear_by_learning_rate:
            raise ValueError(
                "`learning_rate` must be positive in FTRL, which divides by it, got 0: "
                "use `multiply_linear_by_learning_rate=True`"
            )

    def kernel_class(self) -> type[Optimizer]:
        return _RootFTRL if self.learning_rate_power == -0.5 else FTRL

    def slots(self) -> tuple[Slot, ...]:
        return Slot("accumulators", "element", self.initial_accumulator_value), Slot("linears", "element")

    def own_hyper(self) -> tuple[float, ...]:
        strengths = self.l1_regularization_strength, self.l2_regularization_strength
        multiply = float(self.multiply_linear_by_learning_rate)
        shrinkage = self.l2_shrinkage_regularization_strength
        return (-self.learning_rate_power, *strengths, self.beta, multiply, shrinkage)

    def hyper(self, learning_rate: float) -> tuple[float, ...]:
        self._check_positive(learning_rate)
        return super().hyper(learning_rate)

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        exponent = h[OWN_HYPER]
        a = slots[0] + g * g
        w, z = _solve(w, g, slots[1], slots[0] ** exponent, a**exponent, h, xp)
        return w, (a, z)


class _RootFTRL(FTRL):
    """What `FTRL` with the power 1/2 runs as: a square root is quicker than a power, and correctly rounded."""

    rule: ClassVar[Any] = root_ftrl_rule

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        a = slots[0] + g * g
        w, z = _solve(w, g, slots[1], xp.sqrt(slots[0]), xp.sqrt(a), h, xp)
        return w, (a, z)


def _solve(w: Any, g: Any, z: Any, old_power: Any, new_power: Any, h: Any, xp: Any) -> tuple[Any, Any]:
    """The new `w` and `z`, from the powers of the accumulator before and after."""
    lr = h[0]
    l1, l2, beta, multiply, shrinkage = (h[OWN_HYPER + i] for i in range(1, 6))
    # the flag is 0 or 1: z, numerator and denominator are held times `scale`
    scale = multiply * lr + (1 - multiply)
    rate = (1 - multiply) * lr + multiply
    z = z + scale * (g + 2 * shrinkage * w) - (new_power - old_power) / rate * w
    numerator = xp.clip(z, -scale * l1, scale * l1) - z
    denominator = (new_power + beta) / rate + 2 * scale * l2
    # only where all gradients so far were 0
    empty = denominator == 0
    w = xp.where(empty, xp.zeros_like(z), numerator / xp.where(empty, xp.ones_like(z), denominator))
    return w, z
