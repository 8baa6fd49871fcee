"""`FusedOptimizer`: scaling and clipping between backwards, states of several models, and steps that fail."""

import copy
import math

import pytest
import torch
from test_breaks_training import column, made, one, rows

from embedfuse import SGD, Adagrad, Adam, FeatureConfig, TableConfig
from embedfuse.torch import EmbeddingCollection, FusedOptimizer, load, save

# --- factors belong to the gradients that waited --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clipping_then_another_backward(dtype):
    table = TableConfig(10, 2, combiner="sum", initializer=0.0, dtype=dtype, name="t")
    collection = EmbeddingCollection({"t": FeatureConfig(table)}, SGD(1.0))
    optimizer = FusedOptimizer(collection)
    plain = torch.nn.Parameter(torch.zeros(10, 2))

    def backward(row, factor):
        (collection({"t": torch.tensor([row])})["t"].float().sum() * factor).backward()
        (plain[row].sum() * factor).backward()

    def clip(most):
        expected = torch.nn.utils.clip_grad_norm_([plain], most)
        torch.testing.assert_close(optimizer.clip_grad_norm_(most), expected, rtol=1e-2, atol=1e-2)

    backward(1, 8.0)
    clip(1.0)
    backward(2, 0.5)
    backward(1, 0.25)
    clip(0.75)
    backward(3, 2.0)
    torch.optim.SGD([plain], 1.0).step()
    optimizer.step()
    torch.testing.assert_close(collection.tables["t"].float(), plain, rtol=1e-2, atol=1e-2)
    # nothing of it is left
    collection({"t": torch.tensor([9])})["t"].sum().backward()
    optimizer.step()
    assert column(collection)[9] == -1


def test_unscaling_then_another_backward():
    collection, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(collection({"t": one})["t"].sum()).backward()
    scaler.unscale_(optimizer)
    collection({"t": torch.tensor([2])})["t"].sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert column(collection) == rows(r1=-1, r2=-1)
    # and if it finds an infinity, nothing moves and nothing waits
    scaler.scale(collection({"t": one})["t"].sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert column(collection) == rows(r1=-1, r2=-1)
    collection({"t": one})["t"].sum().backward()
    optimizer.step()
    assert column(collection) == rows(r1=-2, r2=-1)


@pytest.mark.parametrize(
    "act",
    [
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False),
        lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1.0),
        lambda parameters: [p.grad.mul_(0.5) for p in parameters if p.grad is not None],
        lambda parameters: [p.grad.norm() for p in parameters if p.grad is not None],
    ],
)
def test_clipping_by_torch_is_refused(act):
    collection, optimizer = made()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    collection({"t": one})["t"].sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_norm_"):
        act(parameters)
    repr(optimizer), repr(parameters)
    optimizer.step()
    assert column(collection) == rows(r1=-1)


# --- a step that fails changes nothing ------------------------------------------------------------------------------


def test_a_failing_step_changes_nothing():
    tables = [TableConfig(10, 2, combiner="sum", initializer=0.0, dtype=d) for d in ("float32", "float64")]
    collection = EmbeddingCollection(
        [FeatureConfig(tables[0]), FeatureConfig(tables[1], name="second")], optimizer=Adagrad(1.0)
    )
    optimizer = FusedOptimizer(collection)
    other = EmbeddingCollection([FeatureConfig(tables[0])], optimizer=SGD(1.0))
    both = FusedOptimizer(torch.nn.ModuleList([collection, other]))
    del optimizer
    before = copy.deepcopy(both.state_dict()["state"])
    sum(out.sum() for out in [*collection([one, one]), *other([one])]).backward()
    rate = both.param_groups[1]["lr"]
    both.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match="learning_rate"):
        both.step()
    assert not any(table.any() for table in [*collection.tables.values(), *other.tables.values()])
    torch.testing.assert_close(both.state_dict()["state"], before)
    both.param_groups[1]["lr"] = rate
    both.step()
    assert all(table[1].all() for table in [*collection.tables.values(), *other.tables.values()])


# --- states of several models, by name ------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, optimizer=None):
        super().__init__()
        table = TableConfig(10, 2, combiner="sum", initializer=0.0, name="t")
        self.embeddings = EmbeddingCollection({"t": FeatureConfig(table)}, optimizer or Adagrad(1.0))


def test_two_models_of_one_class_have_states_of_their_own(tmp_path):
    models = [Model(), Model()]
    optimizer = FusedOptimizer(*models)
    models[1].embeddings({"t": one})["t"].sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert set(state) == {"0.embeddings.t", "1.embeddings.t"}
    assert state["0.embeddings.t"]["accumulators"][1, 0] == pytest.approx(0.1)
    assert state["1.embeddings.t"]["accumulators"][1, 0] == pytest.approx(1.1)
    save(tmp_path, {}, {"o": optimizer})
    fresh = FusedOptimizer(Model(), Model())
    load(tmp_path, {}, {"o": fresh})
    torch.testing.assert_close(fresh.state_dict()["state"], state)
    # where names differ, no number is needed
    assert set(FusedOptimizer(Model()).state_dict()["state"]) == {"t"}


def test_learning_rates_are_loaded_by_table():
    def build(order):
        features = {name: FeatureConfig(TableConfig(10, 2, name=name, optimizer=rule)) for name, rule in order}
        return FusedOptimizer(EmbeddingCollection(features))

    first = build([("a", Adagrad(0.1)), ("b", Adagrad(0.2)), ("c", SGD(0.3))])
    torch.optim.lr_scheduler.StepLR(first, 10)
    for group, rate in zip(first.param_groups, (1.0, 2.0, 3.0), strict=True):
        group["lr"] = rate
    saved = copy.deepcopy(first.state_dict())
    other = build([("c", SGD(0.5)), ("b", Adagrad(0.2)), ("a", Adagrad(0.1, initial_accumulator_value=0.5))])
    other.load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [3.0, 2.0, 1.0]
    assert [group["initial_lr"] for group in other.param_groups] == [0.3, 0.2, 0.1]
    # hyper-parameters are those of the code, learning rates those of the checkpoint
    assert other._optimizers[2].initial_accumulator_value == 0.5
    together = build([(name, rule) for name, rule in (("a", Adagrad(0.1)), ("b", Adagrad(0.1)), ("c", SGD(0.3)))])
    before = copy.deepcopy(together.state_dict()["state"])
    with pytest.raises(ValueError, match=r"'a' and 'b'.*got 1\.0 and 2\.0"):
        together.load_state_dict(saved)
    torch.testing.assert_close(together.state_dict()["state"], before)
    assert [group["lr"] for group in together.param_groups] == [0.1, 0.3]
    with pytest.raises(ValueError, match=r"got Adagrad for table 'a'.*SGD"):
        build([("a", SGD(0.1)), ("b", Adagrad(0.1)), ("c", SGD(0.3))]).load_state_dict(saved)


def test_states_of_earlier_versions_are_loaded_by_position():
    _, first = made(Adagrad(1.0))
    first.param_groups[0]["lr"] = 0.25
    saved = copy.deepcopy(first.state_dict())
    del saved["param_groups"][0]["tables"]
    _, second = made(Adagrad(1.0))
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == 0.25
    with pytest.raises(ValueError, match="which tables"):
        second.load_state_dict({**saved, "param_groups": []})


def test_state_after_a_conversion_is_saved_and_loaded():
    collection, optimizer = made(Adam(0.1))
    collection({"t": one})["t"].sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    collection.double()
    optimizer.load_state_dict(saved)
    slots = optimizer.state[collection.tables["t"]]
    assert all(slots[slot].dtype == torch.float64 for slot in slots if slot != "step")
    assert all(torch.equal(slots[slot].float(), value) for slot, value in saved["state"]["t"].items() if slot != "step")
    assert int(optimizer.state_dict()["state"]["t"]["step"]) == 1
