"""A learning rate that is a function decides, and says so to a scheduler that writes beside it."""

import copy
import warnings

import pytest
import torch
from plain import batch_for, three_features
from torch.optim.lr_scheduler import LinearLR, StepLR

import embedfuse
from embedfuse.torch import FusedOptimizer

WARNING = r'`learning_rate` of SGD is a function.*"lr" in `param_groups`.*For schedulers give a number'


def made(update="step"):
    """A collection with a rate of its own for each table, the first one a function, and its optimizer."""
    rates = {"now": 1.0}
    tables = {"items": embedfuse.SGD(lambda: rates["now"]), "cities": embedfuse.SGD(0.5)}
    collection = three_features(update=update, **tables)
    return collection, FusedOptimizer(collection), rates


def train(collection, optimizer, seed=0):
    sum(out.sum() for out in collection(batch_for(collection, 3, seed)).values()).backward()
    optimizer.step()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_scheduler_beside_a_function_is_told_once(update):
    collection, optimizer, rates = made(update)
    scheduler = StepLR(optimizer, 1, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(collection, optimizer)
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.05])
    rates["now"] = 0.75
    with pytest.warns(UserWarning, match=WARNING) as told:
        for seed in range(3):
            train(collection, optimizer, seed)
            scheduler.step()
    assert len([one for one in told if "learning_rate" in str(one.message)]) == 1
    train(collection, optimizer)
    # the function decides for its table, the scheduler for the other
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.75, 0.5e-4])


def test_a_scheduler_that_starts_elsewhere_is_told_at_the_first_step():
    collection, optimizer, _ = made()
    LinearLR(optimizer, 0.5)
    with pytest.warns(UserWarning, match=WARNING):
        train(collection, optimizer)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("update", ["step", "backward"])
def test_nobody_is_told_without_a_scheduler(update):
    collection, optimizer, rates = made(update)
    for step in range(3):
        rates["now"] = 1 / (1 + step)
        train(collection, optimizer, step)
        assert optimizer.param_groups[0]["lr"] == rates["now"]


@pytest.mark.filterwarnings("error")
def test_nobody_is_told_after_loading():
    collection, optimizer, rates = made()
    train(collection, optimizer)
    rates["now"] = 0.25
    train(collection, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    other, resumed, _ = made()
    other.load_state_dict(collection.state_dict())
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 0.25
    train(other, resumed)
    assert resumed.param_groups[0]["lr"] == 1.0
    twin, stepped = copy.deepcopy((collection, optimizer))
    train(twin, stepped)


def test_schedulers_write_again_after_loading():
    collection, optimizer, _ = made()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler = StepLR(optimizer, 1, 0.1)
    train(collection, optimizer)
    scheduler.step()
    with pytest.warns(UserWarning, match=WARNING):
        train(collection, optimizer)


@pytest.mark.filterwarnings("error")
def test_numbers_are_left_to_schedulers():
    collection = three_features()
    optimizer = FusedOptimizer(collection)
    scheduler = StepLR(optimizer, 1, 0.1)
    for _ in range(2):
        train(collection, optimizer)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert torch.isfinite(collection.tables["items"]).all()
