"""AdamW: Adam with bias correction, and weight decay apart from the gradient (Loshchilov & Hutter, 2019)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ._check import SMALLEST, check_betas, check_flag, check_interval, log_beta
from .adam import Adam, adam_rule
from .base import Optimizer, Slot


@dataclass(frozen=True)
class AdamW(Optimizer):
    """`w ← w - lr·λ·w`, then `Adam(bias_correction=True)`.

    Equivalent to `torch.optim.AdamW(lr, betas, eps, weight_decay)` where every row is looked up or `lazy_adam=False`;
    lazy, rows that were not looked up neither move nor decay.

    Args:
        beta_1: decay rate of the mean of g, in [0, 1).
        beta_2: decay rate of the mean of g², in [0, 1).
        epsilon: > 0, added to the root.
        weight_decay: λ ≥ 0, times the learning rate; instead of `weight_decay_factor`.
        lazy_adam: leave rows that were not looked up alone; False moves the whole table every step.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    lazy_adam: bool = True

    native: ClassVar[str | None] = "adamw"
    rule: ClassVar[Any] = adam_rule
    slot_kinds: ClassVar[tuple[Literal["row", "element"], ...]] = ("element", "element")

    def __post_init__(self) -> None:
        check_flag("lazy_adam", self.lazy_adam)
        super().__post_init__()
        check_betas(self.beta_1, self.beta_2)
        check_interval("epsilon", self.epsilon, f"[{SMALLEST}, inf)", "1e-8 is usual")
        check_interval("weight_decay", self.weight_decay, "[0, inf)", "0.01 is usual, 0 is none")
        if self.weight_decay_factor:
            raise ValueError(
                f"`weight_decay_factor` must not be set on AdamW, got {self.weight_decay_factor}: "
                "use `weight_decay`, which is multiplied by the learning rate"
            )

    @property
    def dense(self) -> bool:
        return not self.lazy_adam

    def decay(self, learning_rate: float) -> float:
        return learning_rate * self.weight_decay

    def slots(self) -> tuple[Slot, ...]:
        return Slot("momenta", "element"), Slot("velocities", "element")

    def own_hyper(self) -> tuple[float, ...]:
        return (self.beta_1, self.beta_2, self.epsilon, 1.0, 0.0, log_beta(self.beta_1), log_beta(self.beta_2))

    update = staticmethod(Adam.update)
