"""Gradients of weights alone, which are no gradients of the tables."""

from typing import Any

import pytest
import torch

from embedfuse import SGD, FeatureConfig, TableConfig
from embedfuse.torch import (
    Bags,
    EmbeddingCollection,
    FusedOptimizer,
    ProductKeyMemory,
    ValueTable,
    gather_dot,
    gather_reduce_sum,
)

IDS, OFFSETS = torch.tensor([1, 4, 4, 2]), torch.tensor([0, 3, 4])


def _made(update: Any, place: str) -> tuple[EmbeddingCollection, FusedOptimizer]:
    torch.manual_seed(0)
    features = {"f": FeatureConfig(TableConfig(6, 3, combiner="sum"))}
    collection = EmbeddingCollection(features, SGD(0.5), update=update, device=place)
    return collection, FusedOptimizer(collection)


def _loss(collection: EmbeddingCollection, weights: torch.Tensor) -> torch.Tensor:
    return collection({"f": Bags(IDS.to(weights.device), OFFSETS.to(weights.device), weights)})["f"].pow(3).sum()


def _weights(place: str) -> torch.Tensor:
    return torch.tensor([0.5, 2, 1, 3], device=place, requires_grad=True)


def _asked(loss: torch.Tensor, weights: torch.Tensor, how: str) -> torch.Tensor:
    if how == "grad":
        return torch.autograd.grad(loss, [weights], retain_graph=True)[0]
    loss.backward(inputs=[weights], retain_graph=True)
    assert weights.grad is not None
    return weights.grad


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_tables_that_are_not_asked_for_stay(update: Any, how: str, place: str) -> None:
    collection, optimizer = _made(update, place)
    (table,) = collection.tables.values()
    before = table.detach().clone()
    weights = _weights(place)
    loss = _loss(collection, weights)
    found = _asked(loss, weights, how)
    optimizer.step()
    assert torch.equal(table, before)
    ids, bag, given = IDS.to(place), torch.tensor([0, 0, 0, 1], device=place), weights.detach()
    rows = before[ids]
    out = torch.zeros(2, 3, device=place).index_add(0, bag, rows * given[:, None])
    torch.testing.assert_close(found, (rows * 3 * out[bag].square()).sum(1))
    # the tables' own gradient may still come, once
    loss.backward()
    optimizer.step()
    wanted = before.clone().index_add_(0, ids, -0.5 * given[:, None] * 3 * out[bag].square())
    torch.testing.assert_close(table.detach(), wanted)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_through_what_the_weights_are_made_of(update: Any, place: str) -> None:
    collection, optimizer = _made(update, place)
    before = [table.detach().clone() for table in collection.tables.values()]
    logits = _weights(place)
    (found,) = torch.autograd.grad(_loss(collection, logits.softmax(0)), [logits])
    assert bool(found.any())
    optimizer.step()
    assert all(map(torch.equal, before, collection.tables.values()))


def test_a_penalty_of_the_weights_beside_the_loss(place: str) -> None:
    collection, optimizer = _made("step", place)
    other, plain = _made("step", place)
    weights = _weights(place)
    torch.autograd.grad(_loss(collection, weights), [weights])
    for one, its in ((collection, optimizer), (other, plain)):
        _loss(one, _weights(place)).backward()
        its.step()
    assert all(map(torch.equal, collection.tables.values(), other.tables.values()))


@pytest.mark.parametrize("again", [True, False])
def test_lookups_after_a_backward_of_weights_alone(again: bool, place: str) -> None:
    collection, _ = _made("backward", place)
    weights = _weights(place)
    loss = _loss(collection, weights)
    torch.autograd.grad(loss, [weights], retain_graph=again)
    if again:
        # its backward may still come
        with pytest.raises(RuntimeError, match="looked up again"):
            _loss(collection, weights)
        loss.backward()
    _loss(collection, weights).backward()


def test_an_input_that_is_the_anchor_itself(place: str) -> None:
    collection, optimizer = _made("step", place)
    (table,) = collection.tables.values()
    before, weights = table.detach().clone(), _weights(place)
    torch.autograd.grad(_loss(collection, weights), [weights, collection._anchor], allow_unused=True)
    optimizer.step()
    assert not torch.equal(table, before)


class _Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_where_something_watches(place: str) -> None:
    collection, optimizer = _made("step", place)
    (table,) = collection.tables.values()
    before, weights = table.detach().clone(), _weights(place)
    with _Mode():
        loss = _loss(collection, weights)
    (found,) = torch.autograd.grad(loss, [weights], retain_graph=True)
    optimizer.step()
    assert torch.equal(table, before)
    (wanted,) = torch.autograd.grad(_loss(collection, weights), [weights])
    torch.testing.assert_close(found, wanted)
    loss.backward()
    optimizer.step()
    assert not torch.equal(table, before)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("which", ["sum", "dot", "masked", "memory"])
def test_primitives_and_memories(which: str, update: Any, place: str) -> None:
    collection, optimizer = _made(update, place)
    indices, given = torch.tensor([[1, 4], [4, 2]], device=place), torch.rand(2, 2, device=place, requires_grad=True)
    mask = torch.tensor([True] * 5 + [False], device=place)
    (table,) = collection.tables.values()
    if which == "memory":
        values = ValueTable(16, 4, update=update, optimizer=SGD(0.5), device=place)
        memory = ProductKeyMemory(4, num_keys=4, heads=1, topk=2, values=values, query_norm=None).to(place)
        optimizer, table = FusedOptimizer(memory), values.weight
        given = torch.rand(3, 4, device=place, requires_grad=True)

    def loss() -> torch.Tensor:
        if which == "memory":
            return memory(given).pow(2).sum()
        if which == "dot":
            rows = torch.cat([given, given.sum(1, keepdim=True)], 1)
            return gather_dot(collection, rows, indices).pow(2).sum()
        return gather_reduce_sum(collection, indices, given, row_mask=mask if which == "masked" else None).pow(2).sum()

    before = table.detach().clone()
    for _ in range(2):
        torch.autograd.grad(loss(), [given])
        optimizer.step()
    assert torch.equal(table, before)
    made = loss()
    made.backward(inputs=[given], retain_graph=True)
    optimizer.step()
    assert torch.equal(table, before)
    made.backward()
    optimizer.step()
    assert not torch.equal(table, before)


def test_a_buffer_of_gradients(place: str) -> None:
    rows, buffer = torch.rand(6, 3, device=place, requires_grad=True), torch.zeros(6, 3, device=place)
    weights, indices = torch.rand(2, 2, device=place, requires_grad=True), torch.tensor([[1, 4], [4, 2]], device=place)
    made = gather_reduce_sum(rows, indices, weights, grad_into=buffer).pow(2).sum()
    torch.autograd.grad(made, [weights], retain_graph=True)
    assert not buffer.any()
    made.backward()
    assert bool(buffer.any())


@pytest.mark.parametrize("named", [False, True])
def test_sparse_gradients(named: bool, place: str) -> None:
    rows = torch.rand(6, 3, device=place, requires_grad=True)
    weights, indices = torch.rand(2, 2, device=place, requires_grad=True), torch.tensor([[1, 4], [4, 2]], device=place)
    made = gather_reduce_sum(rows, indices, weights, grad="sparse").pow(2).sum()
    found = torch.autograd.grad(made, [weights, rows] if named else [weights])
    plain = ((rows[indices] * weights[..., None]).sum(1)).pow(2).sum()
    wanted = torch.autograd.grad(plain, [weights, rows])
    for one, other in zip(found, wanted, strict=False):
        torch.testing.assert_close(one.to_dense(), other)
