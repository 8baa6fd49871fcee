"""`FusedOptimizer.step` with hooks and under a profiler, as torch's own optimizers."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from embedfuse import SGD, FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer


@pytest.fixture
def stepped():
    collection = EmbeddingCollection(FeatureConfig(TableConfig(5, 2, 0.0, combiner="sum")), SGD(1.0))
    optimizer = FusedOptimizer(collection)
    collection(Bags.from_lists([[1, 1], [2]])).sum().backward()
    return collection, optimizer


def rows(collection):
    (table,) = collection.tables.values()
    return table.detach()[:, 0].tolist()


def test_own_hooks_run_before_and_after(stepped):
    collection, optimizer = stepped
    seen = []
    handles = [
        optimizer.register_step_pre_hook(lambda mine, args, kwargs: seen.append((mine, "before", rows(collection)[1]))),
        optimizer.register_step_post_hook(lambda mine, args, kwargs: seen.append((mine, "after", rows(collection)[1]))),
    ]
    optimizer.step()
    assert seen == [(optimizer, "before", 0.0), (optimizer, "after", -2.0)]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 2


def test_hooks_of_all_optimizers_run(stepped):
    _, optimizer = stepped
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert seen == ["before", "after"]


def test_a_hook_may_replace_the_closure(stepped):
    collection, optimizer = stepped
    optimizer.register_step_pre_hook(lambda mine, args, kwargs: ((mine, lambda: 7.0), {}))
    assert optimizer.step() == 7.0
    assert rows(collection) == [0.0, -2.0, -1.0, 0.0, 0.0]


def test_hooks_get_the_arguments_as_they_were_given(stepped):
    _, optimizer = stepped
    seen = []
    optimizer.register_step_pre_hook(lambda mine, args, kwargs: seen.append((args[1:], dict(kwargs))))
    closure = lambda: 1.0  # noqa: E731
    assert optimizer.step() is None and optimizer.step(closure) == 1.0 and optimizer.step(closure=closure) == 1.0
    assert seen == [((), {}), ((closure,), {}), ((), {"closure": closure})]
    optimizer.register_step_pre_hook(lambda mine, args, kwargs: (args, {**kwargs, "closure": lambda: 3.0}))
    assert optimizer.step() == 3.0


def test_profilers_see_the_step(stepped):
    _, optimizer = stepped
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#FusedOptimizer.step" in {event.key for event in profile.key_averages()}


def test_schedulers_notice_that_it_stepped(stepped, recwarn):
    _, optimizer = stepped
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not [one for one in recwarn if "lr_scheduler" in str(one.message)]
