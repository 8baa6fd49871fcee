"""What broke the functions of memory layers once: kinds of collections, refused calls, strides, places in messages."""

import math
import threading
from typing import Any

import pytest
import torch

import embedfuse
from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import (
    Bags,
    EmbeddingCollection,
    FusedOptimizer,
    expert_lookup,
    gather_dot,
    gather_reduce_sum,
    grouped_gather_sum,
    product_topk,
    use_backend,
)
from embedfuse.torch.backends.descriptor_facts import feature_facts


def made(update: Any = "step", feature: Any = None, **table: Any) -> EmbeddingCollection:
    config = TableConfig(5, 4, 1.0, combiner="sum", name="t", **table)
    return EmbeddingCollection(FeatureConfig(config, **(feature or {})), embedfuse.SGD(1.0), update=update)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("table", "feature", "message"),
    [({"max_norm": 0.5}, {}, "without `max_norm`, got 0.5"), ({}, {"default_id": 2}, "without `default_id`, got 2")],
)
def test_rows_that_are_not_as_they_lie_are_refused(table: Any, feature: Any, message: str, compiled: bool) -> None:
    collection = made(feature=feature, **table)
    FusedOptimizer(collection)
    torch._dynamo.reset()
    function: Any = torch.compile(gather_reduce_sum, backend="eager") if compiled else gather_reduce_sum
    with pytest.raises(Exception, match=message):
        function(collection, torch.tensor([[0]]))


def test_a_compiled_call_keeps_its_own_policy() -> None:
    collection = made()
    optimizer = FusedOptimizer(collection)
    torch._dynamo.reset()
    run = torch.compile(lambda ids, policy: gather_reduce_sum(collection, ids, out_of_range=policy), backend="eager")
    assert run(torch.tensor([[0, 9]]), "drop").tolist() == [[1.0] * 4]
    with pytest.raises(IndexError):
        run(torch.tensor([[0, 9]]), "raise")
    assert optimizer is not None


@pytest.mark.parametrize(
    "refused",
    [
        lambda c: gather_reduce_sum(c, torch.tensor([[0, 9]])),
        lambda c: gather_reduce_sum(c, torch.tensor([[0, 1]]), torch.ones(2, 2)),
        lambda c: gather_dot(c, torch.ones(1, 3), torch.tensor([[0, 1]])),
        lambda c: grouped_gather_sum(c, torch.tensor([[0, 9]])),
        lambda c: expert_lookup(torch.ones(1, 4), c, c, torch.tensor([[0, 1]]), torch.ones(1, 1)),
    ],
)
def test_a_refused_call_leaves_a_collection_free(refused: Any) -> None:
    collection = made("backward")
    optimizer = FusedOptimizer(collection)
    with pytest.raises((IndexError, ValueError)):
        refused(collection)
    gather_reduce_sum(collection, torch.tensor([[0, 1]])).sum().backward()
    assert collection.tables["t"][:, 0].tolist() == [0, 0, 1, 1, 1]
    assert optimizer is not None


def test_an_optimizer_may_step_inside_of_a_compiled_function() -> None:
    collection = made()
    optimizer = FusedOptimizer(collection)
    collection(Bags(torch.tensor([0]), torch.tensor([0, 1]))).sum().backward()
    torch._dynamo.reset()

    def run(x: Any) -> Any:
        optimizer.step()
        optimizer.zero_grad()
        return x + 1

    compiled = torch.compile(run, backend="eager")
    assert compiled(torch.ones(1)).tolist() == [2]
    assert collection.tables["t"][:2, 0].tolist() == [0, 1]
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    compiled(torch.ones(1))
    assert seen == [1]


@pytest.mark.parametrize("gated", [False, True])
def test_experts_of_strided_and_absent_indices(backend: Any, device: Any, gated: bool) -> None:
    x, scores = torch.randn(2, 4, device=device), torch.rand(2, 3, device=device)
    table = torch.randn(5, 4, device=device)
    indices = torch.tensor([[0, 1], [2, 3], [1, 0]], device=device).t()
    gate = table if gated else None
    got = expert_lookup(x, table, table, indices, scores, gate=gate)
    torch.testing.assert_close(got, expert_lookup(x, table, table, indices.contiguous(), scores, gate=gate))
    absent = torch.full((2, 3), -1, device=device)
    given = scores.requires_grad_()
    huge = torch.full((2, 4), math.inf, device=device)
    out = expert_lookup(huge, table, table, absent, given, gate=gate, out_of_range="drop")
    out.sum().backward()
    assert not out.any() and given.grad is not None and not given.grad.any()


def test_groups_of_small_integers_and_places_in_messages(backend: Any, device: Any) -> None:
    table = torch.randn(5, 4, device=device)
    small = torch.tensor([[0, 3]], dtype=torch.int16, device=device)
    groups = torch.zeros(1, 2, dtype=torch.int64, device=device)
    out = grouped_gather_sum(table, small, None, groups)
    torch.testing.assert_close(out, (table[0] + table[3])[None, None])
    if torch.device(device).type == "cuda":
        # reported by a later call, without the place
        return
    bad = torch.tensor([[0, 99, 1], [2, 3, 4]])
    for weights in (None, torch.ones(2, 2, 3)):
        with pytest.raises(IndexError, match=r"\[0, 5\), the rows of the table, got 99 at indices\[0, 1\]"):
            grouped_gather_sum(table, bad, weights, torch.tensor([[1, 0, 0], [0, 1, 1]]), 2)
        # in the second bag, each of whose indices has a place for every slice
        with pytest.raises(IndexError, match=r"got 99 at indices\[1, 1\]"):
            grouped_gather_sum(table, bad.flip(0), weights, torch.tensor([[0, 1, 1], [1, 0, 0]]), 2)
    with pytest.raises(ValueError, match="`out_of_range` must be one of"):
        grouped_gather_sum(table, small, out_of_range="raize")  # type: ignore[arg-type]


def test_one_score_of_any_stride() -> None:
    with use_backend("cpu"):
        scores, ids = product_topk(torch.arange(3.0)[None, 1::2], torch.tensor([[1.0, 2.0]]), 1)
    assert scores.tolist() == [[3.0]] and ids.tolist() == [[1]]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t, i: gather_reduce_sum([1.0], i), "params"),
        (lambda t, i: gather_reduce_sum(t, i, [1.0]), "weights"),
        (lambda t, i: gather_reduce_sum(t, i, row_mask=[True]), "row_mask"),
        (lambda t, i: gather_reduce_sum(t, i, grad_into=[1.0]), "grad_into"),
        (lambda t, i: gather_dot(t, [1.0], i), "x"),
        (lambda t, i: grouped_gather_sum(t, i, None, [0]), "groups"),
        (lambda t, i: grouped_gather_sum(t, i, [0]), "weights"),
        (lambda t, i: expert_lookup([1.0], t, t, i, torch.ones(1, 2)), "x"),
        (lambda t, i: expert_lookup(torch.ones(1, 4), t, t, i, [1.0]), "scores"),
    ],
)
def test_what_is_no_tensor_is_named(call: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be a tensor, got list"):
        call(torch.randn(5, 4), torch.tensor([[0, 1]]))


@pytest.mark.parametrize("name", ["x", "scores"])
def test_experts_take_floats_only(name: str) -> None:
    table = torch.randn(5, 4)
    given = {"x": torch.ones(1, 4), "scores": torch.ones(1, 2)}
    given[name] = given[name].long()
    with pytest.raises(TypeError, match=f"`{name}` must be float32"):
        expert_lookup(given["x"], table, table, torch.tensor([[0, 1]]), given["scores"])
    with pytest.raises(ValueError, match="`out_of_range` must be one of"):
        expert_lookup(given["x"], table, table, torch.tensor([[0, 1]]), given["scores"], out_of_range="bogus")  # type: ignore[arg-type]


def test_threads_may_meet_new_descriptors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from embedfuse.plan import PlannedFeature, plan_group

    described = plan_group([(5, 4)], [PlannedFeature(0, "sum")]).features
    errors: list[BaseException] = []

    def meet() -> None:
        kept = []
        try:
            for _ in range(400):
                kept = [*kept[-20:], torch.from_numpy(described.copy())]
                feature_facts(kept[-1])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=meet) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
