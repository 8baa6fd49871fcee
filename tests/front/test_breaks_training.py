"""What a caller may do between lookup, backward and step, and what must be refused instead of training wrongly."""

import copy
import gc
import warnings

import pytest
import torch

from embedfuse import SGD, Adam, FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer
from embedfuse.torch.ledger import MOST_UNUSED

one = torch.tensor([1])


def made(optimizer=None, names=("t",), config=None, **options):
    """Tables of zeros, each with a feature of its name."""
    features = {
        name: FeatureConfig(TableConfig(10, 2, combiner="sum", initializer=0.0, name=name), **(config or {}))
        for name in names
    }
    collection = EmbeddingCollection(features, optimizer or SGD(1.0), **options)
    return collection, FusedOptimizer(collection)


def column(collection, name="t"):
    return collection.tables[name].detach()[:, 0].tolist()


def rows(**moved):
    """A column of zeros but for `r1=-1` and the like."""
    return [moved.get(f"r{number}", 0.0) for number in range(10)]


# --- the caller's tensors -------------------------------------------------------------------------------------------


def test_inputs_may_be_written_after_backward():
    collection, optimizer = made()
    ids, offsets, weights = torch.tensor([1, 2, 2]), torch.tensor([0, 1, 3]), torch.ones(3)
    collection({"t": Bags(ids, offsets, weights)})["t"].sum().backward()
    ids.fill_(5)
    offsets.fill_(1 << 40)
    weights.fill_(9)
    optimizer.step()
    assert column(collection) == rows(r1=-1, r2=-2)
    dense = torch.tensor([3])
    collection({"t": dense})["t"].sum().backward()
    dense.fill_(5)
    optimizer.step()
    assert column(collection) == rows(r1=-1, r2=-2, r3=-1)


@pytest.mark.parametrize("use", ["step", "clip"])
def test_a_gradient_written_after_backward_is_refused(use):
    collection, optimizer = made()
    gradient = torch.ones(1, 2)
    collection({"t": one})["t"].backward(gradient)
    gradient.fill_(100)
    with pytest.raises(RuntimeError, match=r"gradient\.clone\(\)"):
        optimizer.step() if use == "step" else optimizer.clip_grad_norm_(1.0)
    assert column(collection) == rows()
    optimizer.zero_grad()
    collection({"t": one})["t"].backward(gradient.clone())
    gradient.fill_(7)
    optimizer.step()
    assert column(collection) == rows(r1=-100)


def test_a_gradient_of_inference_mode_is_kept():
    collection, optimizer = made()
    with torch.inference_mode():
        gradient = torch.ones(1, 2)
    collection({"t": one})["t"].backward(gradient)
    with torch.inference_mode():
        gradient.fill_(100)
    optimizer.step()
    assert column(collection) == rows(r1=-1)


# --- gradients that nobody uses -------------------------------------------------------------------------------------


def test_a_collection_without_optimizer_says_so():
    collection = EmbeddingCollection({"t": FeatureConfig(TableConfig(10, 2))})
    with pytest.warns(UserWarning, match="no optimizer.*FusedOptimizer"):
        collection({"t": one})["t"].sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(MOST_UNUSED - 1):
            collection({"t": one})["t"].sum().backward()
        with pytest.raises(RuntimeError, match="there is none"):
            collection({"t": one})["t"].sum().backward()
        collection.discard()
        optimizer = FusedOptimizer(collection, default=SGD(1.0))
        collection({"t": one})["t"].sum().backward()
        optimizer.step()


def test_a_backward_whose_collection_is_gone_is_refused():
    collection, optimizer = made()
    out = collection({"t": one})["t"]
    del collection, optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone"):
        out.sum().backward()


def test_a_gradient_of_the_table_itself_is_refused():
    collection, optimizer = made()
    table = collection.tables["t"]
    (collection({"t": one})["t"].sum() + table.square().sum()).backward()
    with pytest.raises(RuntimeError, match=r"table 't' has a `\.grad`.*weight_decay_factor"):
        optimizer.step()
    assert column(collection) == rows()
    table.grad = None
    optimizer.step()
    assert column(collection) == rows(r1=-1)


@pytest.mark.parametrize("kind", [torch.Tensor.clone, torch.nn.Parameter])
@pytest.mark.parametrize("train", [True, False])
def test_a_functional_call_is_refused_and_moves_nothing(kind, train):
    collection, optimizer = made()
    theirs = kind(torch.ones(10, 2))
    place = theirs.data_ptr()
    with torch.set_grad_enabled(train), pytest.raises(RuntimeError, match='update="autograd"'):
        torch.func.functional_call(collection, {"tables.t": theirs}, ({"t": one},))
    assert theirs.data_ptr() == place
    collection({"t": one})["t"].sum().backward()
    optimizer.step()
    assert column(collection) == rows(r1=-1)


def test_a_functional_call_with_parameters_trains_these():
    table = TableConfig(10, 2, combiner="sum", initializer=0.0, name="t")
    collection = EmbeddingCollection({"t": FeatureConfig(table)}, update="autograd")
    theirs = torch.nn.Parameter(torch.ones(10, 2))
    out = torch.func.functional_call(collection, {"tables.t": theirs}, ({"t": one},))["t"]
    assert out.tolist() == [[1, 1]]
    out.sum().backward()
    assert theirs.grad[1].tolist() == [1, 1] and collection.tables["t"].grad is None


# --- what autograd knows --------------------------------------------------------------------------------------------


def test_a_backward_that_needs_rows_changed_by_a_step_is_refused():
    collection, optimizer = made()
    weights = torch.ones(1, requires_grad=True)
    out = collection({"t": Bags(one, torch.tensor([0, 1]), weights)})["t"]
    versions = collection.tables["t"]._version
    collection({"t": one})["t"].sum().backward()
    optimizer.step()
    assert collection.tables["t"]._version > versions
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_frozen_is_what_was_frozen_at_backward():
    collection, optimizer = made(names=("a", "b"))
    inputs = {"a": one, "b": one}

    def backward(**learns):
        for name, value in learns.items():
            collection.tables[name].requires_grad_(value)
        out = collection(inputs)
        (out["a"].sum() + out["b"].sum()).backward()

    backward(a=False, b=True)
    collection.tables["a"].requires_grad_(True)
    collection.tables["b"].requires_grad_(False)
    optimizer.step()
    assert column(collection, "a") == rows() and column(collection, "b") == rows(r1=-1)
    backward(a=True, b=False)
    backward(a=True, b=True)
    norm = optimizer.clip_grad_norm_(1e9)
    optimizer.step()
    torch.testing.assert_close(norm, torch.tensor(2 * 2.0**2 + 2 * 1.0).sqrt())
    assert column(collection, "a") == rows(r1=-2) and column(collection, "b") == rows(r1=-2)


def test_tables_beside_the_loss_step_with_gradients_of_zero():
    collection, optimizer = made(Adam(0.1), names=("a", "b"))
    collection({"a": one, "b": one})["a"].sum().backward()
    optimizer.step()
    assert int(optimizer.state[collection.tables["b"]]["step"]) == 1
    assert column(collection, "b") == rows()


# --- `update="backward"` --------------------------------------------------------------------------------------------


def two_types():
    tables = [TableConfig(10, 2, combiner="sum", initializer=0.0, dtype=dtype) for dtype in ("float32", "float64")]
    collection = EmbeddingCollection([FeatureConfig(table) for table in tables], SGD(1.0), update="backward")
    return collection, FusedOptimizer(collection)


def test_a_second_lookup_is_refused_although_a_group_is_frozen():
    collection, _optimizer = two_types()
    collection.tables["table_1"].requires_grad_(False)
    collection([one, one])
    with pytest.raises(RuntimeError, match="looked up again"):
        collection([one, one])


def test_a_loss_of_one_group_is_enough():
    collection, _optimizer = two_types()
    for _ in range(3):
        collection([one, one])[0].sum().backward()
    assert column(collection, "table_0") == rows(r1=-3)
    first = collection([one, one])
    first[0].sum().backward()
    second = collection([one, one])
    second[1].sum().backward()
    # it was looked up before these rows changed
    with pytest.raises(RuntimeError, match="changed by another backward"):
        first[1].sum().backward()


def test_both_groups_may_have_a_backward_of_their_own():
    collection, _optimizer = two_types()
    first, second = collection([one, one])
    first.sum().backward()
    second.sum().backward()
    assert column(collection, "table_0") == column(collection, "table_1") == rows(r1=-1)


def test_zero_grad_between_lookup_and_backward():
    collection, optimizer = made(update="backward")
    out = collection({"t": one})["t"]
    optimizer.zero_grad()
    out.sum().backward()
    assert column(collection) == rows(r1=-1)


# --- transforms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_vjp_of_embedding_bag(mode):
    from embedfuse.torch import embedding_bag

    table, ids, offsets = torch.randn(5, 3), torch.tensor([1, 2, 2]), torch.tensor([0, 1])

    def run(function):
        _, back = torch.func.vjp(lambda weight: function(ids, weight, offsets, mode=mode), table)
        return back(torch.ones(2, 3))[0]

    torch.testing.assert_close(run(embedding_bag), run(torch.nn.functional.embedding_bag))


def test_vjp_of_weights():
    from embedfuse.torch import embedding_bag

    table, ids, offsets = torch.randn(5, 3), torch.tensor([1, 2, 2]), torch.tensor([0, 1])
    weights = torch.rand(3)

    def run(table, weights):
        return embedding_bag(ids, table, offsets, mode="sum", per_sample_weights=weights)

    found = torch.func.vjp(run, table, weights)[1](torch.ones(2, 3))
    torch.testing.assert_close(found[1], table[ids].sum(1))


# --- copies ---------------------------------------------------------------------------------------------------------


def test_a_shallow_copy_is_the_same_tables():
    collection, optimizer = made()
    collection({"t": one})["t"].sum().backward()
    other = copy.copy(collection)
    other({"t": torch.tensor([2])})["t"].sum().backward()
    assert other.tables["t"] is collection.tables["t"]
    optimizer.step()
    assert column(collection) == rows(r1=-1, r2=-1)
