"""How a bag of weighted rows becomes one row: `out = scale · Σ wᵢ eᵢ`, with `scale = 1 / (Σ wᵢᵖ)^q`.

A combiner is the pair (p, q), so kernels, gradients and sharding handle a new one without change: add a line to
`COMBINERS`. `1 / 0` counts as 0, so an empty bag, or one whose weights cancel, gives exact zeros. Max or attention
pooling is not linear in the rows and hence no combiner.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Combiner:
    """`scale = (Σ w**moment) ** (-power / 2)`; with `power` 0 the sum is taken as it is."""

    moment: int
    power: int


COMBINERS = {
    "sum": Combiner(moment=0, power=0),
    "mean": Combiner(moment=1, power=2),  # divides by the sum of the weights, as TensorFlow does
    "sqrtn": Combiner(moment=2, power=1),
    "mean_by_count": Combiner(moment=0, power=2),  # divides by the number of ids, as FBGEMM does
}


def scale_of(total: Any, power: int, xp: Any) -> Any:
    """`total ** (-power / 2)`, and 0 where `total` is 0."""
    safe = xp.where(total == 0, xp.ones_like(total), total)
    root = safe if power == 2 else xp.sqrt(safe)
    return xp.where(total == 0, xp.zeros_like(total), 1 / root)
