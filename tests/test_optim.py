"""The optimizers as array arithmetic, in NumPy and PyTorch, against judges that do not share their code."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from optim_oracles import OPTIMIZERS, Case, Conformance, Judge, load_conformance

from embedfuse import optim
from embedfuse.optim import (
    FTRL,
    HYPER_WIDTH,
    MAX_SLOTS,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    AdamW,
    Optimizer,
    RowWiseAdagrad,
    apply_rule,
    from_description,
    resolve,
)

each_case = pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.id)
ARITHMETIC = {
    "numpy64": (np, np.float64, 1e-12),
    "numpy32": (np, np.float32, 2e-5),
    "torch64": (torch, torch.float64, 1e-12),
    "torch32": (torch, torch.float32, 2e-5),
}
FORMS = ("numbers", "columns", "vector")
each_arithmetic = pytest.mark.parametrize("arithmetic", ARITHMETIC)


class Table:
    """A table stepped through `apply_rule`, as a backend would: the rows of the batch go in, new ones come out.

    Hyper-parameters and step come in the `form` that a backend likes: plain numbers, `[U, 1]` columns as for rows of
    several tables, or a float64 vector and a count that are torch tensors.
    """

    def __init__(
        self, optimizer: Optimizer, table: np.ndarray, arithmetic: str = "numpy64", form: str = "numbers"
    ) -> None:
        self.optimizer, self.form = optimizer, form
        self.xp, self.dtype, _ = ARITHMETIC[arithmetic]
        self.table = self._array(table)
        rows, dim = table.shape
        self.slots = [
            self._array(np.full((rows, dim if slot.per == "element" else 1), slot.initial))
            for slot in optimizer.slots()
        ]
        self.steps = 0

    def _array(self, values: Any) -> Any:
        return self.xp.asarray(np.asarray(values), dtype=self.dtype) + 0

    def step(self, ids: np.ndarray, grads: np.ndarray) -> None:
        self.steps += 1
        hyper = self.optimizer.hyper(self.optimizer.current_learning_rate())
        if self.optimizer.use_gradient_accumulation:
            rows, places = np.unique(ids, return_inverse=True)
            if self.optimizer.dense:
                rows, places = np.arange(len(self.table)), ids
            summed = np.zeros((len(rows), grads.shape[1]))
            np.add.at(summed, places, grads)
            self._rows(rows, summed, hyper)
        else:
            for row, grad in zip(ids, grads, strict=True):
                self._rows(np.array([row]), grad[None], hyper)

    def _rows(self, rows: np.ndarray, grads: np.ndarray, hyper: tuple[float, ...]) -> None:
        rows = rows if self.xp is np else torch.from_numpy(rows)
        h: Any = hyper
        step: Any = self.steps
        if self.form == "vector":
            h, step = torch.tensor(hyper, dtype=torch.float64), torch.tensor(self.steps)
        if self.form == "columns":
            h = [self._array(np.full((len(rows), 1), value)) for value in hyper]
            step = self.xp.zeros((len(rows), 1), dtype=self.xp.int64) + step
        w, slots = apply_rule(
            self.optimizer.kernel_class(),
            self.table[rows],
            self._array(grads),
            tuple(slot[rows] for slot in self.slots),
            h,
            step,
            self.xp,
        )
        assert w.dtype == self.dtype and all(new.dtype == self.dtype for new in slots)
        self.table[rows] = w
        for slot, new in zip(self.slots, slots, strict=True):
            slot[rows] = new


def random_steps(
    rows: int, dim: int, count: int, seed: int = 0
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """A table and `count` batches with duplicate and absent rows."""
    random = np.random.default_rng(seed)
    table = random.normal(size=(rows, dim)).astype(np.float32)
    batches = [random.integers(rows, size=rows) for _ in range(count)]
    return table, [(ids, random.normal(size=(rows, dim)).astype(np.float32)) for ids in batches]


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=tolerance, atol=tolerance)


# --- judges ---------------------------------------------------------------------------------------------------------


@each_arithmetic
@each_case
def test_follows_the_formulas(case: Case, arithmetic: str) -> None:
    table, batches = random_steps(rows=6, dim=3, count=5)
    judge, forms = Judge(case.optimizer, table), FORMS if "torch" in arithmetic else FORMS[:2]
    ours = [Table(case.optimizer, table, arithmetic, form) for form in forms]
    for ids, grads in batches:
        for side in (judge, *ours):
            side.step(ids, grads)
    tolerance = ARITHMETIC[arithmetic][2]
    for side in ours:
        assert_close(side.table, judge.table, tolerance)
        for slot, found in zip(case.optimizer.slots(), side.slots, strict=True):
            assert_close(found, judge.slots[slot.name], tolerance)


@pytest.mark.parametrize("arithmetic", ["numpy32", "torch32", "judge"])
@pytest.mark.parametrize("case", load_conformance(), ids=lambda case: case.id)
def test_same_as_tensorflow(case: Conformance, arithmetic: str) -> None:
    if arithmetic == "judge":
        ours: Any = Judge(case.optimizer, case.table)
    else:
        ours = Table(case.optimizer, case.table, arithmetic)
    for ids, grads in case.steps:
        ours.step(ids, grads)
    slots = ours.slots
    if not isinstance(slots, dict):
        slots = {slot.name: values for slot, values in zip(case.optimizer.slots(), slots, strict=True)}
    assert_close(ours.table, case.final_table, 1e-5)
    assert slots.keys() == case.final_slots.keys()
    for name, values in case.final_slots.items():
        assert_close(slots[name], values, 1e-5)


@pytest.mark.parametrize(
    ("optimizer", "weight", "state"),
    [
        (SGD(0.1), 0.8, ()),
        (Adagrad(0.1), 0.901227, (4.1,)),
        (Adam(0.1), 0.683772, (0.2, 0.004)),
        (AdagradMomentum(0.1, 0.9, True, 3, 0.9, 0.1), 0.521230, (0.4, 2.519842)),
        (FTRL(0.1), 0.745053, (4.1, -15.086179)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Optimizer) else "",
)
def test_one_step_of_tensorflow_engines(optimizer: Optimizer, weight: float, state: tuple[float, ...]) -> None:
    ours = Table(optimizer, np.ones((1, 1)))
    ours.step(np.array([0]), np.full((1, 1), 2.0))
    assert ours.table.item() == pytest.approx(weight, abs=1e-6)
    assert [slot.item() for slot in ours.slots] == pytest.approx(state, abs=1e-6)


@pytest.mark.parametrize("arithmetic", ["numpy32", "torch32", "torch64"])
@pytest.mark.parametrize("case", [case for case in OPTIMIZERS if case.torch], ids=lambda case: case.id)
def test_same_as_torch_over_100_steps(case: Case, arithmetic: str) -> None:
    random = np.random.default_rng(1)
    table = random.normal(size=(4, 3)).astype(np.float32)
    parameter = torch.from_numpy(table.astype(np.float64) if arithmetic.endswith("64") else table.copy())
    assert case.torch is not None
    theirs = case.torch([parameter.requires_grad_()])
    ours = Table(case.optimizer, table, arithmetic)
    ids = np.array([2, 0, 1, 3])
    for _ in range(100):
        grads = random.normal(size=table.shape).astype(np.float32)
        grads[0, 0] = 0
        ours.step(ids, grads)
        parameter.grad = torch.from_numpy(grads[np.argsort(ids)]).to(parameter.dtype)
        theirs.step()
    assert_close(ours.table, parameter.detach(), 1e-5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("optimizer", "factory"),
    [
        (Adam(0.01, epsilon=1e-8, bias_correction=True), lambda p: torch.optim.SparseAdam(p, lr=0.01, eps=1e-8)),
        (Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, eps=0)),
        (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    ],
    ids=["adam", "adagrad", "sgd"],
)
def test_same_as_torch_with_sparse_gradients(
    optimizer: Optimizer, factory: Callable[..., torch.optim.Optimizer]
) -> None:
    table, batches = random_steps(rows=9, dim=3, count=100)
    parameter = torch.from_numpy(table.copy()).requires_grad_()
    theirs, ours = factory([parameter]), Table(optimizer, table, "torch32")
    for ids, grads in batches:
        ours.step(ids[:4], grads[:4])
        indices, values = torch.from_numpy(ids[None, :4]), torch.from_numpy(grads[:4])
        parameter.grad = torch.sparse_coo_tensor(indices, values, table.shape, check_invariants=True)
        theirs.step()
    assert_close(ours.table, parameter.detach(), 1e-5)


@pytest.mark.parametrize("name", ["adam_corrected_dense", "adamw_dense"])
def test_dense_steps_are_those_of_torch(name: str) -> None:
    case = next(case for case in OPTIMIZERS if case.id == name)
    table, batches = random_steps(rows=5, dim=2, count=20)
    parameter = torch.from_numpy(table.copy()).requires_grad_()
    assert case.torch is not None and case.optimizer.dense
    theirs, ours = case.torch([parameter]), Table(case.optimizer, table, "torch32")
    for ids, grads in batches:
        ours.step(ids[:2], grads[:2])
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.index_add_(0, torch.from_numpy(ids[:2]), torch.from_numpy(grads[:2]))
        theirs.step()
    assert_close(ours.table, parameter.detach(), 1e-5)


def test_rowwise_adagrad_is_adagrad_where_a_row_is_one_number() -> None:
    table, batches = random_steps(rows=6, dim=1, count=5)
    rowwise, plain = Table(RowWiseAdagrad(0.1), table), Table(Adagrad(0.1, 0, 1e-8), table)
    for ids, grads in batches:
        rowwise.step(ids, grads)
        plain.step(ids, grads)
    assert_close(rowwise.table, plain.table, 1e-14)


# --- the steps that all share ---------------------------------------------------------------------------------------


def test_order_of_operations() -> None:
    """Clip the gradient, decay, step, clamp: with any other order one of these numbers is another."""
    common: dict[str, Any] = {"clipvalue": 2.0, "weight_decay_factor": 0.5, "clip_weight_max": 0.35}
    ours = Table(SGD(0.1, **common), np.array([[1.0, 0.9]]))
    ours.step(np.array([0, 0]), np.array([[7.0, 0.2], [3.0, 0.3]]))
    # 1.0 * 0.5 - 0.1 * 2 (ten is clipped to 2), and 0.9 * 0.5 - 0.1 * 0.5 is clamped to 0.35
    assert_close(ours.table, [[0.3, 0.35]], 1e-15)
    adagrad = Table(Adagrad(0.1, **common), np.array([[1.0]]))
    adagrad.step(np.array([0, 0]), np.array([[7.0], [-8.0]]))
    # the sum is clipped, not the parts, and decay is no gradient: it leaves the accumulator alone
    assert adagrad.slots[0].item() == pytest.approx(1.1)


def test_clips_an_infinite_gradient() -> None:
    ours = Table(SGD(0.1, clipvalue=2.0), np.ones((1, 2)), "torch32")
    ours.step(np.array([0]), np.array([[math.inf, -math.inf]]))
    assert_close(ours.table, [[0.8, 1.2]], 1e-6)


def test_decay_by_the_learning_rate() -> None:
    optimizer = SGD(0.5, weight_decay_factor=0.1, multiply_weight_decay_factor_by_learning_rate=True)
    ours = Table(optimizer, np.ones((2, 1)))
    ours.step(np.array([0]), np.zeros((1, 1)))
    assert_close(ours.table, [[0.95], [1.0]], 1e-15)


@each_case
@each_arithmetic
def test_gradients_of_zero_are_harmless(case: Case, arithmetic: str) -> None:
    table = np.array([[0.0, 0.6, -0.5]])
    ours = Table(case.optimizer, table, arithmetic)
    for _ in range(3):
        ours.step(np.array([0, 0]), np.zeros((2, 3)))
        assert np.isfinite(np.asarray(ours.table)).all()
        assert all(np.isfinite(np.asarray(slot)).all() for slot in ours.slots)
    decays = case.optimizer.decay(0.1) > 0
    if not decays and not isinstance(case.optimizer, FTRL):
        assert_close(ours.table, table, 1e-7)


def test_smallest_epsilons_are_harmless() -> None:
    for optimizer in (Adam(epsilon=1.1e-19), Adam(epsilon=1.2e-38, sum_inside_sqrt=False), AdamW(epsilon=1.2e-38)):
        ours = Table(optimizer, np.ones((1, 1)), "torch32")
        ours.step(np.array([0]), np.zeros((1, 1)))
        assert ours.table.item() == pytest.approx(1, abs=1e-4)


def test_bias_correction_is_exact_late_and_with_a_long_memory() -> None:
    """`1 - beta ** t` in float32 arithmetic would be wrong in its third digit here."""
    optimizer = Adam(0.1, 0.9, 0.99999, bias_correction=True)
    table, _ = random_steps(rows=1, dim=4, count=0)
    judge, ours = Judge(optimizer, table), Table(optimizer, table, "torch32")
    for steps in (0, 10, 10_000, 3_000_000):
        judge.steps = ours.steps = steps
        for side in (judge, ours):
            side.step(np.array([0]), np.full((1, 4), 0.5))
    assert_close(ours.table, judge.table, 1e-6)
    assert_close(ours.slots[1], judge.slots["velocities"], 1e-6)


@pytest.mark.parametrize("arithmetic", ["numpy32", "torch32"])
@pytest.mark.parametrize("optimizer", [Adam(), AdagradMomentum(beta2=0.999)], ids=["adam", "adagrad_momentum"])
def test_first_means_are_exact(optimizer: Optimizer, arithmetic: str) -> None:
    """They are `(1 - beta) * g²`, small numbers that a float32 `1 - 0.999` would spoil."""
    table = np.ones((1, 1))
    judge = Judge(optimizer, table)
    judge.step([0], np.full((1, 1), 0.7))
    for form in FORMS if "torch" in arithmetic else FORMS[:2]:
        ours = Table(optimizer, table, arithmetic, form)
        ours.step(np.array([0]), np.full((1, 1), 0.7))
        for slot, found in zip(optimizer.slots(), ours.slots, strict=True):
            np.testing.assert_allclose(np.asarray(found), judge.slots[slot.name], rtol=1e-6)


def test_ftrl_makes_exact_zeros() -> None:
    table, batches = random_steps(rows=4, dim=3, count=4)
    ours = Table(FTRL(0.1, l1_regularization_strength=100.0), table, "torch32")
    for ids, grads in batches:
        ours.step(ids, grads)
    touched = np.unique(np.concatenate([ids for ids, _ in batches]))
    assert (np.asarray(ours.table)[touched] == 0).all()


def test_ftrl_with_a_learning_rate_of_zero() -> None:
    rates = iter([0.1, 0.0])
    survives = FTRL(lambda: next(rates), multiply_linear_by_learning_rate=True)
    ours = Table(survives, np.ones((1, 1)))
    for _ in range(2):
        ours.step(np.array([0]), np.ones((1, 1)))
    assert np.isfinite(ours.table).all()
    with pytest.raises(ValueError, match=r"`learning_rate` must be positive in FTRL.*multiply_linear"):
        FTRL(lambda: 0.0).hyper(0.0)


# --- learning rates -------------------------------------------------------------------------------------------------


def test_learning_rate_may_be_a_function() -> None:
    calls: list[float] = []

    def ramp() -> float:
        calls.append(1.0 - 0.05 * len(calls))
        return calls[-1]

    optimizer = SGD(ramp)
    assert calls == []
    ours = Table(optimizer, np.zeros((1, 1)))
    for number in range(10):
        ours.step(np.array([0]), np.ones((1, 1)))
        assert len(calls) == number + 1
        assert ours.table.item() == pytest.approx(-sum(calls))


def test_a_schedule_gone_wrong_never_reaches_the_table() -> None:
    for value in (math.nan, math.inf, -0.1):
        with pytest.raises(ValueError, match=r"`learning_rate` must be a number in .*schedule"):
            Adagrad(lambda: 0.1).hyper(value)


# --- what an optimizer says of itself -------------------------------------------------------------------------------


@each_case
def test_parts_agree(case: Case) -> None:
    optimizer = case.optimizer
    kernel = optimizer.kernel_class()
    assert isinstance(optimizer, kernel.__mro__[1] if kernel.__name__.startswith("_") else kernel)
    assert kernel.slot_kinds == tuple(slot.per for slot in optimizer.slots())
    assert len(kernel.slot_kinds) <= MAX_SLOTS
    # a native rule is optional: without one, CPU rows go through `update`
    assert kernel.rule is not None
    hyper = optimizer.hyper(optimizer.current_learning_rate())
    assert len(hyper) == HYPER_WIDTH and all(type(value) is float for value in hyper)


def test_native_names_and_own_hyper() -> None:
    """The native engine reads these numbers by position."""
    log_1, log_2 = math.log(0.9), math.log(0.999)
    expected: list[tuple[Optimizer, str, tuple[float, ...]]] = [
        (SGD(), "sgd", ()),
        (SGD(momentum=0.9, nesterov=True), "momentum", (0.9, 1)),
        (Adagrad(epsilon=0.5), "adagrad", (0.5,)),
        (RowWiseAdagrad(), "rowwise_adagrad", (1e-8,)),
        (Adam(), "adam", (0.9, 0.999, 1e-7, 0, 1, log_1, log_2)),
        (Adam(sum_inside_sqrt=False), "adam", (0.9, 0.999, 1e-7, 0, 0, log_1, log_2)),
        (Adam(bias_correction=True), "adam", (0.9, 0.999, 1e-7, 1, 0, log_1, log_2)),
        (Adam(beta_1=0), "adam", (0, 0.999, 1e-7, 0, 1, -1e4, log_2)),
        (AdamW(), "adamw", (0.9, 0.999, 1e-8, 1, 0, log_1, log_2)),
        (FTRL(0.1, -0.4, 1, 2, 3, l2_shrinkage_regularization_strength=4), "ftrl", (0.4, 1, 2, 3, 0, 4)),
        (FTRL(multiply_linear_by_learning_rate=True), "ftrl", (0.5, 0, 0, 0, 1, 0)),
        (AdagradMomentum(0.1, 0.9, True, 3, 0.8, 0.1), "adagrad_momentum", (0.9, 1, 3, 0.8, 0.1, 1 - 0.8)),
        (AdagradMomentum(), "adagrad_momentum", (0, 0, 2, 1, 1e-10, 1)),
    ]
    for optimizer, native, own in expected:
        assert optimizer.kernel_class().native == native
        assert optimizer.own_hyper() == own
    assert AdamW(weight_decay=0.2).hyper(0.5)[3] == pytest.approx(0.1)


def test_slots() -> None:
    described = {
        name: [(slot.name, slot.per, slot.initial) for slot in optimizer().slots()]
        for name, optimizer in optim.OPTIMIZERS.items()
    }
    adam = [("momenta", "element", 0.0), ("velocities", "element", 0.0)]
    assert described == {
        "SGD": [],
        "Adagrad": [("accumulators", "element", 0.1)],
        "RowWiseAdagrad": [("accumulators", "row", 0.0)],
        "Adam": adam,
        "AdamW": adam,
        "FTRL": [("accumulators", "element", 0.1), ("linears", "element", 0.0)],
        "AdagradMomentum": [("accumulators", "element", 0.0), ("momenta", "element", 0.0)],
    }
    assert [slot.name for slot in SGD(momentum=0.5).slots()] == ["momenta"]


def test_positions_are_those_of_tensorflow() -> None:
    assert Adam(0.1, 0.8, 0.9, 1e-3) == Adam(learning_rate=0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-3)
    assert Adagrad(0.1, 0.2) == Adagrad(learning_rate=0.1, initial_accumulator_value=0.2)
    assert FTRL(0.1, -0.4) == FTRL(learning_rate=0.1, learning_rate_power=-0.4)
    assert len({SGD(), SGD(0.01), Adagrad()}) == 2
    with pytest.raises(AttributeError):
        SGD().learning_rate = 0.1  # type: ignore[misc]


@each_case
def test_description_round_trip(case: Case) -> None:
    description = case.optimizer.describe()
    assert description["name"] == type(case.optimizer).__name__
    assert from_description(description) == case.optimizer
    assert from_description(json.loads(json.dumps(description))) == case.optimizer


def test_description_is_plain() -> None:
    description = SGD(lambda: 0.25, clipvalue=(None, np.float32(0.5)), weight_decay_factor=np.float64(0.5)).describe()
    assert json.loads(json.dumps(description))["clipvalue"] == [None, 0.5]
    assert from_description(description) == SGD(0.25, clipvalue=(None, 0.5), weight_decay_factor=0.5)
    assert from_description({"name": "Adam"}) == Adam()
    with pytest.raises(ValueError, match=r"`name` must be one of SGD, .*, got 'Lion'"):
        from_description({"name": "Lion"})
    with pytest.raises(ValueError, match="arguments of SGD only, got beta_1"):
        from_description({"name": "SGD", "beta_1": 0.9})


def test_resolve() -> None:
    own = SGD(0.3)
    assert resolve(own) is own and resolve(None) is None
    assert [resolve(word) for word in ("sgd", "adagrad", "adam", "ftrl")] == [SGD(), Adagrad(), Adam(), FTRL()]
    for word, hint in (("Adam", "embedfuse.Adam()"), ("adamw", "embedfuse.AdamW()"), ("lion", "embedfuse.Adagrad()")):
        with pytest.raises(ValueError, match=f"'sgd', 'adagrad', 'adam', 'ftrl', got '{word}'.*{re.escape(hint)}"):
            resolve(word)
    foreign: Any = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(TypeError, match=r"got torch\.optim\.SGD: use an object such as embedfuse.SGD\(\)"):
        resolve(foreign)
    a_class: Any = Adam
    with pytest.raises(TypeError, match=r"got the class Adam: write Adam\(\)"):
        resolve(a_class)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SGD(-0.1), "`learning_rate` must be a number in"),
        (lambda: SGD(math.nan), "`learning_rate` must be a number in"),
        (lambda: SGD(math.inf), "`learning_rate` must be a number in"),
        (lambda: SGD("0.1"), "`learning_rate` must be a number in .* got '0.1'"),
        (lambda: SGD(True), "`learning_rate` must be a number in"),
        (lambda: SGD(clipvalue=-1.0), "`clipvalue` must not be an empty range, got -1.0"),
        (lambda: SGD(clipvalue=(2, 1)), r"`clipvalue` must not be an empty range, got \(2, 1\)"),
        (lambda: SGD(clipvalue=(1, 2, 3)), "`clipvalue` must be a number or a pair"),
        (lambda: SGD(clipvalue=[1, 2]), r"`clipvalue` must be a number in .*use a number or \(low, high\)"),
        (lambda: SGD(clipvalue=math.nan), "`clipvalue` must be a number in"),
        (lambda: SGD(clipvalue=0, use_gradient_accumulation=False), "`use_gradient_accumulation` must be True with"),
        (lambda: SGD(clipvalue=(None, 1), use_gradient_accumulation=False), "set it to True"),
        (lambda: SGD(use_gradient_accumulation=1), "`use_gradient_accumulation` must be a bool"),
        (lambda: SGD(clip_weight_min=1, clip_weight_max=0), "`clip_weight_min` must not exceed"),
        (lambda: SGD(clip_weight_max=math.nan), "`clip_weight_max` must be a number"),
        (lambda: SGD(weight_decay_factor=-0.1), "`weight_decay_factor` must be a number in"),
        (lambda: SGD(multiply_weight_decay_factor_by_learning_rate=0.1), "_by_learning_rate` must be a bool"),
        (lambda: SGD(momentum=1.1), "`momentum` must be a number in"),
        (lambda: SGD(0.1, True), "`momentum` must be a number in"),
        (lambda: SGD(momentum=0.9, nesterov=1), "`nesterov` must be a bool"),
        (lambda: SGD(nesterov=True), "`nesterov` needs a positive `momentum`"),
        (lambda: Adagrad(initial_accumulator_value=-0.1), "`initial_accumulator_value` must be a number in"),
        (lambda: Adagrad(initial_accumulator_value=0), "`initial_accumulator_value` must be at least"),
        (lambda: Adagrad(initial_accumulator_value=0, epsilon=1e-40), "`initial_accumulator_value` must be at least"),
        (lambda: Adagrad(epsilon=-1e-8), "`epsilon` must be a number in"),
        (lambda: RowWiseAdagrad(epsilon=0), "`initial_accumulator_value` must be at least"),
        (lambda: RowWiseAdagrad(epsilon=-1), "`epsilon` must be a number in"),
        (lambda: Adam(beta_1=1), "`beta_1` must be a number in .* got 1"),
        (lambda: Adam(beta_2=1.5), "`beta_2` must be a number in .* got 1.5"),
        (lambda: Adam(beta_2=-0.1), "`beta_2` must be a number in"),
        (lambda: Adam(epsilon=0), "`epsilon` must be a number in"),
        (lambda: Adam(epsilon=1e-20), "`epsilon` must be a number in"),
        (lambda: Adam(lazy_adam=None), "`lazy_adam` must be a bool"),
        (lambda: Adam(sum_inside_sqrt=2), "`sum_inside_sqrt` must be a bool"),
        (lambda: Adam(bias_correction=1), "`bias_correction` must be a bool"),
        (lambda: Adam(lazy_adam=False, use_gradient_accumulation=False), "must be True with dense steps"),
        (lambda: AdamW(lazy_adam=False, use_gradient_accumulation=False), "must be True with dense steps"),
        (lambda: AdamW(beta_1=-1), "`beta_1` must be a number in"),
        (lambda: AdamW(epsilon=0), "`epsilon` must be a number in"),
        (lambda: AdamW(weight_decay=-0.1), "`weight_decay` must be a number in"),
        (lambda: AdamW(weight_decay_factor=0.1), "`weight_decay_factor` must not be set on AdamW"),
        (lambda: AdamW(lazy_adam=1), "`lazy_adam` must be a bool"),
        (lambda: FTRL(0), "`learning_rate` must be positive in FTRL"),
        (lambda: FTRL(learning_rate_power=0.5), "`learning_rate_power` must be a number in"),
        (lambda: FTRL(l1_regularization_strength=-1), "`l1_regularization_strength` must be a number in"),
        (lambda: FTRL(l2_regularization_strength=-1), "`l2_regularization_strength` must be a number in"),
        (lambda: FTRL(l2_shrinkage_regularization_strength=-1), "`l2_shrinkage_regularization_strength` must be a"),
        (lambda: FTRL(beta=-1), "`beta` must be a number in"),
        (lambda: FTRL(initial_accumulator_value=0), "`initial_accumulator_value` .*`allow_zero_accumulator=True`"),
        (lambda: FTRL(initial_accumulator_value=-1, allow_zero_accumulator=True), "`initial_accumulator_value`"),
        (lambda: FTRL(multiply_linear_by_learning_rate=0), "`multiply_linear_by_learning_rate` must be a bool"),
        (lambda: FTRL(allow_zero_accumulator=0), "`allow_zero_accumulator` must be a bool"),
        (lambda: AdagradMomentum(momentum=-0.1), "`momentum` must be a number in"),
        (lambda: AdagradMomentum(use_nesterov=1), "`use_nesterov` must be a bool"),
        (lambda: AdagradMomentum(exponent=0), "`exponent` must be a number in"),
        (lambda: AdagradMomentum(beta2=1.1), "`beta2` must be a number in"),
        (lambda: AdagradMomentum(epsilon=0), "`epsilon` must be a number in"),
        (lambda: AdagradMomentum(exponent=0.1), r"`epsilon \*\* \(-1 / exponent\)` must be finite"),
    ],
)  # fmt: skip
def test_refuses(build: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_accepts() -> None:
    SGD(np.float32(0.1), clipvalue=(None, None), clip_weight_min=-math.inf)
    SGD(0, clipvalue=0, weight_decay_factor=0)
    FTRL(0, multiply_linear_by_learning_rate=True)
    RowWiseAdagrad(initial_accumulator_value=0.1, epsilon=0)


def test_imports_neither_torch_nor_needs_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import embedfuse.optim as optim; "
        "assert 'torch' not in sys.modules; optim.Adam()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
