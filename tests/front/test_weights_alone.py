"""Gradients of weights alone, which are no gradients of the tables."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from embedfuse import SGD, FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, use_backend

IDS, OFFSETS = torch.tensor([1, 4, 4, 2]), torch.tensor([0, 3, 4])


@pytest.fixture
def place(placement: tuple[str, str]) -> Iterator[str]:
    """A device, with each backend in turn."""
    with use_backend(placement[0]):  # type: ignore[arg-type]
        yield placement[1]


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
