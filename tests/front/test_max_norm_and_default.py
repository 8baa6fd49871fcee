"""Rows cut to a length and rows for empty bags, in a collection, against plain PyTorch."""

import pytest
import torch
from plain import Plain, batch_for, loss_of, three_features, upstream

import embedfuse
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer

OPTIONS = {"max_norm": 0.6, "default_id": 4}


def untidy(collection, seed=0, weighted=True):
    """A batch with negative ids, weights of 0 and below, and empty bags."""
    inputs = batch_for(collection, 12, seed, weighted)
    generator = torch.Generator().manual_seed(seed)
    for bags in inputs.values():
        bags.ids[torch.rand(bags.ids.shape, generator=generator) < 0.3] = -1
        if weighted:
            bags.weights[torch.rand(bags.ids.shape, generator=generator) < 0.2] *= -1
    return inputs


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("grad", ["dense", "sparse"])
def test_lookup_and_gradients(grad, weighted):
    collection = three_features(update="autograd", grad=grad, **OPTIONS)
    plain = Plain(collection)
    inputs = untidy(collection, weighted=weighted)
    theirs, ours = (
        {k: Bags(v.ids, v.offsets, v.weights.clone().requires_grad_() if weighted else None) for k, v in inputs.items()}
        for _ in range(2)
    )
    expected, found = plain(theirs), collection(ours)
    gradients = upstream(expected, 3)
    for outputs in (expected, found):
        loss_of(outputs, gradients).backward()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
        if weighted:
            torch.testing.assert_close(ours[name].weights.grad, theirs[name].weights.grad)
    for name, table in plain.tables.items():
        mine = collection.tables[name].grad
        torch.testing.assert_close(mine.to_dense() if grad == "sparse" else mine, table.grad)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("dense", [False, True])
def test_training(update, dense):
    solvers = {
        "items": embedfuse.Adam(0.01, lazy_adam=False, bias_correction=True) if dense else embedfuse.Adagrad(0.3),
        "cities": embedfuse.SGD(0.5),
    }
    collection = three_features(update=update, **solvers, **OPTIONS)
    plain = Plain(collection)
    optimizer = FusedOptimizer(collection)
    rivals = [
        torch.optim.Adam([plain.tables["items"]], 0.01, eps=1e-7)
        if dense
        else torch.optim.Adagrad([plain.tables["items"]], 0.3, initial_accumulator_value=0.1),
        torch.optim.SGD([plain.tables["cities"]], 0.5),
    ]
    for step in range(3):
        inputs = untidy(collection, step)
        expected = plain(inputs)
        gradients = upstream(expected, step)
        loss_of(expected, gradients).backward()
        loss_of(collection(inputs), gradients).backward()
        optimizer.step()
        for rival in rivals:
            rival.step()
            rival.zero_grad()
    plain.check(collection, atol=1e-5, rtol=1e-4)


def test_norm_of_gradients_is_that_of_the_cut():
    collection = three_features(**OPTIONS)
    plain = Plain(collection)
    optimizer = FusedOptimizer(collection)
    inputs = untidy(collection)
    expected = plain(inputs)
    gradients = upstream(expected, 1)
    loss_of(expected, gradients).backward()
    loss_of(collection(inputs), gradients).backward()
    right = torch.stack([table.grad.norm() for table in plain.tables.values()]).norm()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), right)


def test_only_rows_of_the_batch_and_defaults_are_touched():
    collection = three_features(**OPTIONS)
    before = {name: table.detach().clone() for name, table in collection.tables.items()}
    optimizer = FusedOptimizer(collection)
    inputs = {
        "seen": Bags.from_lists([[1], []]),
        "bought": Bags.from_lists([[-1], []]),
        "city": Bags.from_lists([[2], [3]]),
    }
    loss_of(out := collection(inputs), upstream(out, 0)).backward()
    optimizer.step()
    for name, rows in (("items", [1, 4]), ("cities", [2, 3])):
        changed = (collection.tables[name].detach() != before[name]).any(1).nonzero()[:, 0]
        assert changed.tolist() == rows


def test_features_of_fewer_bags_touch_no_default():
    collection = three_features(default_id=4, items=embedfuse.Adam(0.1))
    before = collection.tables["items"].detach().clone()
    optimizer = FusedOptimizer(collection)
    for lists in ([[1], [4]], [[1]]):
        inputs = {
            "seen": Bags.from_lists(lists),
            "bought": Bags.from_lists([[2]] * 3),
            "city": Bags.from_lists([[2]] * 3),
        }
        out = collection(inputs)
        assert out["seen"].shape == (len(lists), 8)
        loss_of(out, upstream(out, 0)).backward()
        optimizer.step()
        if len(lists) == 2:
            after = collection.tables["items"].detach().clone()
    assert (after[4] != before[4]).all()
    # Adam would move a row that was looked up, even without gradient
    assert torch.equal(collection.tables["items"][4], after[4])


def test_compiled_is_the_same():
    collection = three_features(update="autograd", **OPTIONS)
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    for bags in (5, 9):
        inputs = untidy(collection, bags)
        for value in inputs.values():
            value.weights.requires_grad_()
        expected, found = collection(inputs), compiled(inputs)
        gradients = upstream(expected, 0)
        leaves = [*collection.tables.values(), *(value.weights for value in inputs.values())]
        right = torch.autograd.grad(loss_of(expected, gradients), leaves)
        for mine, theirs in zip(torch.autograd.grad(loss_of(found, gradients), leaves), right, strict=True):
            torch.testing.assert_close(mine, theirs)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])


def test_the_clip_of_the_research():
    table = embedfuse.TableConfig(1, 2, torch.tensor([[3.0, 4.0]]), combiner="sum", max_norm=2.5)
    collection = EmbeddingCollection({"a": embedfuse.FeatureConfig(table)}, update="autograd")
    out = collection({"a": torch.tensor([0])})["a"]
    torch.testing.assert_close(out, torch.tensor([[1.5, 2.0]]))
    out[0, 0].backward()
    torch.testing.assert_close(collection.tables["table_0"].grad, torch.tensor([[0.32, -0.24]]))


def test_a_second_derivative_is_refused():
    collection = three_features(update="autograd", max_norm=0.5)
    out = collection(batch_for(collection, 5, 0))
    (grad,) = torch.autograd.grad(out["seen"].square().sum(), collection.tables["items"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.renorm"):
        grad.sum().backward()


def test_bad_ids_are_named():
    collection = three_features(default_id=2)
    with pytest.raises(IndexError, match=r"'city'.*got 7 in bag 1, at position 2"):
        collection({"seen": Bags.from_lists([[], []]), "bought": Bags.from_lists([[1], []]),
                    "city": Bags.from_lists([[0, -1], [7]])})  # fmt: skip


@pytest.mark.parametrize("value", [-1, "1", True, float("nan")])
def test_max_norm_is_checked(value):
    with pytest.raises(ValueError, match="`max_norm` must be a number of at least 0, or None"):
        embedfuse.TableConfig(3, 2, max_norm=value)


def test_default_id_is_checked():
    table = embedfuse.TableConfig(3, 2)
    for value in (-1, 3):
        with pytest.raises(ValueError, match="`default_id` must be a row of the table, 0 to 2"):
            embedfuse.FeatureConfig(table, default_id=value)
    for value in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="`default_id` must be an int"):
            embedfuse.FeatureConfig(table, default_id=value)
    with pytest.raises(ValueError, match="sequence"):
        embedfuse.FeatureConfig(table, default_id=1, max_sequence_length=3)
