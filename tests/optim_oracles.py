"""What optimizers must do, told by others than their own `update`.

Three judges, for tests of every backend: `load_conformance()`, figures that TensorFlow made; the `torch` factory of a
`Case`, right where every row is looked up; and `Judge`, the formulas of the documentation once more, a row at a time in
float64.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embedfuse.optim import FTRL, SGD, Adagrad, AdagradMomentum, Adam, AdamW, Optimizer, RowWiseAdagrad

DATA = Path(__file__).parent / "data"

Row = np.ndarray  # float64 [D]; the state of a per="row" slot is [1]
TorchFactory = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """One optimizer to test; `torch` makes its equal, if torch has one, for tables whose rows are all looked up."""

    id: str
    optimizer: Optimizer
    torch: TorchFactory | None = None


def _cases() -> tuple[Case, ...]:
    betas = (0.8, 0.95)
    small = {"beta_1": betas[0], "beta_2": betas[1]}
    l1_l2: dict[str, Any] = {"l1_regularization_strength": 0.05, "l2_regularization_strength": 0.1}
    common: dict[str, Any] = {
        "clipvalue": (None, 0.5),
        "weight_decay_factor": 0.1,
        "clip_weight_min": -0.7,
        "clip_weight_max": 0.9,
    }
    by_rate = {**common, "multiply_weight_decay_factor_by_learning_rate": True}
    optim = torch.optim
    return (
        Case("sgd", SGD(0.1), lambda p: optim.SGD(p, lr=0.1)),
        Case("momentum", SGD(0.05, 0.9), lambda p: optim.SGD(p, lr=0.05, momentum=0.9)),
        Case("nesterov", SGD(0.05, 0.9, True), lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
        Case("adagrad", Adagrad(0.1), lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, eps=0)),
        Case("adagrad_epsilon", Adagrad(0.1, 0.0, 1e-3), lambda p: optim.Adagrad(p, lr=0.1, eps=1e-3)),
        Case("rowwise_adagrad", RowWiseAdagrad(0.1)),
        Case("rowwise_adagrad_start", RowWiseAdagrad(0.1, initial_accumulator_value=0.3, epsilon=1e-2)),
        Case("adam", Adam(0.01)),
        Case("adam_outside", Adam(0.01, epsilon=1e-2, sum_inside_sqrt=False)),
        Case("adam_inside", Adam(0.01, epsilon=1e-1, **small)),
        Case("adam_dense", Adam(0.01, epsilon=1e-3, lazy_adam=False)),
        Case(
            "adam_corrected",
            Adam(0.01, epsilon=1e-8, bias_correction=True),
            lambda p: optim.Adam(p, lr=0.01, eps=1e-8),
        ),
        Case(
            "adam_corrected_betas",
            Adam(0.01, 0.0, 0.95, 1e-2, bias_correction=True),
            lambda p: optim.Adam(p, lr=0.01, betas=(0.0, 0.95), eps=1e-2),
        ),
        Case(
            "adam_corrected_dense",
            Adam(0.01, epsilon=1e-8, bias_correction=True, lazy_adam=False),
            lambda p: optim.Adam(p, lr=0.01, eps=1e-8),
        ),
        Case("adamw", AdamW(0.01), lambda p: optim.AdamW(p, lr=0.01)),
        Case(
            "adamw_betas",
            AdamW(0.01, **small, epsilon=1e-2, weight_decay=0.5),
            lambda p: optim.AdamW(p, lr=0.01, betas=betas, eps=1e-2, weight_decay=0.5),
        ),
        Case("adamw_dense", AdamW(0.01, lazy_adam=False), lambda p: optim.AdamW(p, lr=0.01)),
        Case("ftrl", FTRL(0.1)),
        Case("ftrl_l1_l2", FTRL(0.1, **l1_l2, beta=0.5)),
        Case("ftrl_strong_l1", FTRL(0.1, l1_regularization_strength=3.0)),
        Case("ftrl_shrinkage", FTRL(0.1, l2_shrinkage_regularization_strength=0.1)),
        Case("ftrl_power", FTRL(0.1, learning_rate_power=-0.3, **l1_l2)),
        Case("ftrl_power_0", FTRL(0.1, learning_rate_power=0)),
        Case("ftrl_multiply", FTRL(0.1, **l1_l2, beta=0.5, multiply_linear_by_learning_rate=True)),
        Case("ftrl_zero", FTRL(0.1, initial_accumulator_value=0, allow_zero_accumulator=True)),
        Case("ftrl_zero_power", FTRL(0.1, -0.7, initial_accumulator_value=0, allow_zero_accumulator=True)),
        Case("adagrad_momentum", AdagradMomentum(0.05, epsilon=1e-2)),
        Case("adagrad_momentum_sum", AdagradMomentum(0.05, momentum=0.9, epsilon=0.1)),
        Case("adagrad_momentum_nesterov", AdagradMomentum(0.05, 0.9, True, 3, 0.9, 0.1)),
        Case("sgd_all", SGD(0.1, **common)),
        Case("momentum_all", SGD(0.1, 0.9, **by_rate)),
        Case("adagrad_all", Adagrad(0.1, **common)),
        Case("rowwise_adagrad_all", RowWiseAdagrad(0.1, **common)),
        Case("adam_all", Adam(0.05, **by_rate)),
        Case("adamw_all", AdamW(0.05, clipvalue=0.5, clip_weight_max=0.9)),
        Case("ftrl_all", FTRL(0.1, **common)),
        Case("adagrad_momentum_all", AdagradMomentum(0.1, 0.5, epsilon=0.1, **by_rate)),
        Case("adagrad_one_by_one", Adagrad(0.1, use_gradient_accumulation=False)),
        Case("rowwise_adagrad_one_by_one", RowWiseAdagrad(0.1, use_gradient_accumulation=False)),
        Case("adam_one_by_one", Adam(0.01, bias_correction=True, use_gradient_accumulation=False)),
    )


# --- the formulas of the documentation, a row at a time -------------------------------------------------------------


def _sgd(o: Any, w: Row, g: Row, state: dict[str, Row], rate: float, step: int) -> Row:
    if o.momentum == 0:
        return w - rate * g
    state["momenta"] = o.momentum * state["momenta"] + g
    direction = g + o.momentum * state["momenta"] if o.nesterov else state["momenta"]
    return w - rate * direction


def _adagrad(o: Any, w: Row, g: Row, state: dict[str, Row], rate: float, step: int) -> Row:
    state["accumulators"] = state["accumulators"] + g**2
    return w - rate * g / (np.sqrt(state["accumulators"]) + o.epsilon)


def _rowwise_adagrad(o: Any, w: Row, g: Row, state: dict[str, Row], rate: float, step: int) -> Row:
    state["accumulators"] = state["accumulators"] + math.fsum(float(x) ** 2 for x in g) / len(g)
    return w - rate * g / (math.sqrt(state["accumulators"].item()) + o.epsilon)


def _adam(o: Any, w: Row, g: Row, state: dict[str, Row], rate: float, step: int) -> Row:
    m = state["momenta"] = o.beta_1 * state["momenta"] + (1 - o.beta_1) * g
    v = state["velocities"] = o.beta_2 * state["velocities"] + (1 - o.beta_2) * g**2
    if isinstance(o, AdamW) or o.bias_correction:
        m, v = m / (1 - o.beta_1**step), v / (1 - o.beta_2**step)
        return w - rate * m / (np.sqrt(v) + o.epsilon)
    return w - rate * m / (np.sqrt(v + o.epsilon**2) if o.sum_inside_sqrt else np.sqrt(v) + o.epsilon)


def _ftrl(o: Any, w: Row, g: Row, state: dict[str, Row], rate: float, step: int) -> Row:
    p, l1, l2 = -o.learning_rate_power, o.l1_regularization_strength, o.l2_regularization_strength
    old = state["accumulators"]
    new = state["accumulators"] = old + g**2
    g = g + 2 * o.l2_shrinkage_regularization_strength * w
    if o.multiply_linear_by_learning_rate:
        z = state["linears"] + rate * g - (new**p - old**p) * w
        l1, denominator = rate * l1, new**p + o.beta + 2 * rate * l2
    else:
        z = state["linears"] + g - (new**p - old**p) / rate * w
        denominator = (new**p + o.beta) / rate + 2 * l2
    state["linears"] = z
    solved = [
        (max(-l1, min(l1, x)) - x) / d if d else 0.0 for x, d in zip(z.tolist(), denominator.tolist(), strict=True)
    ]
    return np.array(solved)


def _adagrad_momentum(o: Any, w: Row, g: Row, state: dict[str, Row], rate: float, step: int) -> Row:
    old = state["accumulators"]
    state["accumulators"] = old + g**2 if o.beta2 == 1 else o.beta2 * old + (1 - o.beta2) * g**2
    scaled = g * (state["accumulators"] + o.epsilon) ** (-1 / o.exponent)
    state["momenta"] = o.momentum * state["momenta"] + scaled
    return w - rate * (o.momentum * state["momenta"] + scaled if o.use_nesterov else state["momenta"])


FORMULAS = {
    SGD: _sgd,
    Adagrad: _adagrad,
    RowWiseAdagrad: _rowwise_adagrad,
    Adam: _adam,
    AdamW: _adam,
    FTRL: _ftrl,
    AdagradMomentum: _adagrad_momentum,
}


class Judge:
    """One table and its state in float64, and what a step makes of them.

    Attributes:
        table: `[V, D]`.
        slots: by name, `[V, D]` or `[V, 1]`.
        steps: number of steps made.
    """

    def __init__(self, optimizer: Optimizer, table: np.ndarray) -> None:
        self.optimizer = optimizer
        self.table = np.array(table, np.float64)
        rows, dim = self.table.shape
        self.slots = {
            slot.name: np.full((rows, dim if slot.per == "element" else 1), slot.initial, np.float64)
            for slot in optimizer.slots()
        }
        self.steps = 0

    def step(self, ids: Iterable[int], grads: np.ndarray, learning_rate: float | None = None) -> None:
        """One step, given one gradient row per id; an id may come more than once."""
        self.steps += 1
        rate = self.optimizer.current_learning_rate() if learning_rate is None else learning_rate
        contributions: dict[int, list[Row]] = {}
        for number, row in enumerate(ids):
            contributions.setdefault(int(row), []).append(np.asarray(grads[number], np.float64))
        if self.optimizer.dense:
            for row in range(len(self.table)):
                contributions.setdefault(row, []).append(np.zeros(self.table.shape[1]))
        for row, parts in contributions.items():
            for g in [np.sum(parts, axis=0)] if self.optimizer.use_gradient_accumulation else parts:
                self._row(row, g, rate)

    def _row(self, row: int, g: Row, rate: float) -> None:
        o: Any = self.optimizer
        if o.clipvalue is not None:
            low, high = o.clipvalue if isinstance(o.clipvalue, tuple) else (-o.clipvalue, o.clipvalue)
            g = np.maximum(g, -np.inf if low is None else low)
            g = np.minimum(g, np.inf if high is None else high)
        w = self.table[row]
        if o.weight_decay_factor:
            w = w * (1 - o.weight_decay_factor * (rate if o.multiply_weight_decay_factor_by_learning_rate else 1))
        if isinstance(o, AdamW):
            w = w * (1 - rate * o.weight_decay)
        state = {name: values[row] for name, values in self.slots.items()}
        w = FORMULAS[type(o)](o, w, g, state, rate, self.steps)
        w = w if o.clip_weight_min is None else np.maximum(w, o.clip_weight_min)
        self.table[row] = w if o.clip_weight_max is None else np.minimum(w, o.clip_weight_max)
        for name, values in state.items():
            self.slots[name][row] = values


# --- TensorFlow's figures -------------------------------------------------------------------------------------------

SLOT_NAMES = {"accumulator": "accumulators", "linear": "linears", "momentum": "momenta"}


@dataclass
class Conformance:
    """A table, some steps and what TensorFlow made of them, in float32."""

    id: str
    optimizer: Optimizer
    table: np.ndarray  # [V, D]
    steps: list[tuple[np.ndarray, np.ndarray]]  # ids [N], one gradient row per id [N, D]
    final_table: np.ndarray  # [V, D]
    final_slots: dict[str, np.ndarray] = field(default_factory=dict)  # [V, D] by the name of the slot


def load_conformance() -> list[Conformance]:
    """The cases of `data/optimizers.json`, which TensorFlow's own kernels computed."""
    loaded = json.loads((DATA / "optimizers.json").read_text())["cases"]
    return [
        Conformance(
            f"{number}-{case['optimizer']}",
            _optimizer(case["optimizer"], case["hyper"]),
            _array(case["table"]),
            [(_array(step["ids"], np.int64), _array(step["row_grads"])) for step in case["steps"]],
            _array(case["final_table"]),
            {SLOT_NAMES[name]: _array(values) for name, values in case["final_slots"].items()},
        )
        for number, case in enumerate(loaded)
    ]


def _array(stored: dict[str, Any], dtype: type = np.float32) -> np.ndarray:
    return np.array(stored["data"], dtype).reshape(stored["shape"])


def _optimizer(name: str, hyper: dict[str, Any]) -> Optimizer:
    if name in ("sgd", "momentum"):
        return SGD(**hyper)
    if name == "adagrad":
        return Adagrad(**hyper)
    assert name == "ftrl"
    strengths = {f"{short}_regularization_strength": hyper[short] for short in ("l1", "l2", "l2_shrinkage")}
    return FTRL(
        hyper["learning_rate"],
        hyper["learning_rate_power"],
        initial_accumulator_value=hyper["initial_accumulator_value"],
        **strengths,
    )


OPTIMIZERS = _cases()
