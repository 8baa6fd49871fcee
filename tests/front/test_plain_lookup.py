"""Lookups of tables that learn nothing take a short cut, unless something else wants a gradient."""

import itertools

import pytest
import torch

from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection

UPDATES = ("step", "backward", "autograd")


def _collection(update: str = "step", **table: object) -> EmbeddingCollection:
    torch.manual_seed(0)
    features = {
        "a": FeatureConfig(TableConfig(11, 5, name="a", combiner="sum", **table)),
        "b": FeatureConfig(TableConfig(7, 3, name="b", combiner="mean", **table)),
    }
    return EmbeddingCollection(features, "adagrad", update=update)


def _batch(weights_grad: bool = False) -> dict[str, Bags]:
    torch.manual_seed(1)
    found = {}
    for name, rows in (("a", 11), ("b", 7)):
        weights = (torch.rand(9) + 0.5).requires_grad_(weights_grad)
        found[name] = Bags.from_lengths(torch.randint(rows, (9,)), torch.tensor([3, 0, 4, 2]), weights)
    return found


def _plain(table: torch.Tensor, bags: Bags, mean: bool) -> torch.Tensor:
    """In float64, bag by bag."""
    rows, offsets, weights = table.detach().double(), bags.offsets.tolist(), bags.weights.double()
    out = []
    for start, stop in itertools.pairwise(offsets):
        total = (weights[start:stop, None] * rows[bags.ids[start:stop].long()]).sum(0)
        out.append(total / weights[start:stop].sum() if mean and stop > start else total)
    return torch.stack(out)


@pytest.mark.parametrize("update", UPDATES)
def test_weights_of_frozen_tables_learn(update):
    collection, batch = _collection(update), _batch(weights_grad=True)
    collection.requires_grad_(False)
    out = collection(batch)
    upstream = {name: torch.randn_like(value) for name, value in out.items()}
    sum((out[name] * upstream[name]).sum() for name in out).backward()
    found = {name: bags.weights.grad for name, bags in batch.items()}
    again = _batch(weights_grad=True)
    for name, mean in (("a", False), ("b", True)):
        (_plain(collection.tables[name], again[name], mean) * upstream[name]).sum().backward()
        torch.testing.assert_close(found[name], again[name].weights.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("table", [{}, {"max_norm": 0.5}], ids=["plain", "cut"])
def test_evaluation_gives_the_same_numbers(update, table):
    # a "backward" collection trains with its optimizer only
    trained, batch = _collection("autograd", **table), _batch()
    evaluated = _collection(update, **table)
    evaluated.load_state_dict(trained.state_dict())
    expected = trained(batch)
    assert all(value.requires_grad for value in expected.values())
    with torch.no_grad():
        found = evaluated(batch)
    with torch.inference_mode():
        inferred = evaluated(batch)
    evaluated.requires_grad_(False)
    frozen = evaluated(batch)
    for name, value in expected.items():
        for other in (found[name], inferred[name], frozen[name]):
            assert torch.equal(other, value)
            assert not other.requires_grad


def test_bad_ids_are_named():
    collection = _collection()
    batch = {**_batch(), "b": Bags.from_lengths(torch.tensor([1, 7]), torch.tensor([1, 1, 0, 0]))}
    with torch.no_grad(), pytest.raises(IndexError, match=r"'b'.* 7"):
        collection(batch)
