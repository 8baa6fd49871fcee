"""Places that only pad: no bad ids, no default rows; and what a sequence feature does with other inputs."""

import pytest
import torch

from embedfuse import SGD, FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, SparseIds

values = torch.arange(1, 11.0)[:, None].expand(10, 2)


def made(update="step", **features):
    """Features of one table, whose rows are 1, 2, …"""
    table = TableConfig(10, 2, combiner="sum", initializer=values)
    configs = {name: FeatureConfig(table, **options) for name, options in features.items()}
    collection = EmbeddingCollection(configs, SGD(1.0), update=update)
    return collection, FusedOptimizer(collection) if update != "autograd" else None


def trained(collection, optimizer, out):
    sum(value.sum() for value in out.values()).backward()
    optimizer.step()
    return (values - collection.tables["table_0"].detach())[:, 0].tolist()


STRICT = {"validate_weights_and_indices": False}


def test_batches_of_different_sizes_hold_no_bad_ids():
    collection, optimizer = made(a=STRICT, b=STRICT)
    out = collection({"a": torch.tensor([[1, 2]]), "b": torch.tensor([3, 4, 5])})
    assert out["a"][..., 0].tolist() == [[2, 3]] and out["b"][:, 0].tolist() == [4, 5, 6]
    assert trained(collection, optimizer, out) == [0, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    with pytest.raises(IndexError, match=r"'a'.*got -1"):
        collection({"a": torch.tensor([[1, -1]]), "b": torch.tensor([3, 4, 5])})


@pytest.mark.parametrize("default", [None, 7])
@pytest.mark.parametrize("strict", [False, True])
def test_padding_to_an_output_shape(strict, default):
    options = {"output_shape": (2, 2), "default_id": default, "validate_weights_and_indices": not strict}
    collection, optimizer = made(a=options, b={})
    bags = Bags.from_lists([[1], []])
    out = collection({"a": bags, "b": torch.tensor([2, 3, 4])})
    assert out["a"][..., 0].tolist() == [[2, 0], [0, 0]]
    assert trained(collection, optimizer, out) == [0, 1, 1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("form", ["output_shape", "max_sequence_length"])
def test_bad_ids_of_a_sequence_are_told_from_padding(form):
    collection, _ = made(a={form: (2, 2) if form == "output_shape" else 2, **STRICT})
    for ids, found in (([[3], [-5]], -5), ([[10], [1]], 10)):
        with pytest.raises(IndexError, match=f"'a'.*got {found} "):
            collection({"a": Bags.from_lists(ids)})
    clean = Bags.from_lists([[3], [5, 6]])
    assert collection({"a": clean})["a"][..., 0].tolist() == [[4, 0], [6, 7]]
    tolerant, _ = made(a={form: (2, 2) if form == "output_shape" else 2})
    assert tolerant({"a": Bags.from_lists([[3], [-5]])})["a"][..., 0].tolist() == [[4, 0], [0, 0]]


def test_a_place_whose_id_was_dropped_has_its_default():
    collection, optimizer = made(a={"output_shape": (2, 2), "default_id": 7})
    out = collection({"a": Bags.from_lists([[1], [-1]])})
    assert out["a"][..., 0].tolist() == [[2, 0], [8, 0]]
    assert trained(collection, optimizer, out) == [0, 1, 0, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("update", ["step", "autograd"])
@pytest.mark.parametrize("options", [{"default_id": 7}, {}, STRICT])
def test_dense_ids_of_no_columns_beside_another_batch_size(options, update):
    collection, _ = made(update, a=options, b={})
    out = collection({"a": torch.zeros(4, 0, dtype=torch.int64), "b": torch.tensor([2])})
    assert out["a"].shape == (4, 0, 2) and out["b"].tolist() == [[3, 3]]
    out = collection({"a": torch.zeros(4, 0, dtype=torch.int64), "b": torch.zeros(3, 0, dtype=torch.int64)})
    assert out["a"].shape == (4, 0, 2) and out["b"].shape == (3, 0, 2)
    sum(value.sum() for value in out.values()).backward()


def test_compiled_padding_is_the_same():
    torch._dynamo.reset()
    options = {"output_shape": (2, 2), "default_id": 7, **STRICT}
    collection, _ = made(a=options, b={"max_sequence_length": 3, **STRICT}, c={})
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    bags = Bags.from_lists([[1], [2, 3]])
    inputs = {"a": bags, "b": bags, "c": torch.tensor([[1, 2], [3, 4], [5, 6]])}
    with torch.no_grad():
        for name, out in compiled(inputs).items():
            assert torch.equal(out, collection(inputs)[name])


def test_deeper_sparse_ids_are_pooled_as_tensorflow_does():
    collection, _ = made(a={"max_sequence_length": 2, "combiner": "mean"})
    indices = torch.tensor([[0, 0, 0], [0, 0, 2], [1, 1, 1]])
    ids = SparseIds(indices, torch.tensor([1, 3, 5]), (2, 2, 3))
    with pytest.warns(UserWarning, match="ignores `max_sequence_length=2`"):
        out = collection({"a": ids})["a"]
    assert out[..., 0].tolist() == [[3, 0], [0, 6]]


def test_an_output_shape_ends_the_sequence_and_keeps_the_combiner():
    collection, _ = made(a={"max_sequence_length": 2, "combiner": "mean", "output_shape": (2,)})
    weighted = Bags.from_lists([[1, 3], [5]], [[1.0, 3.0], [-1.0]])
    assert collection({"a": weighted})["a"][:, 0].tolist() == [3.5, 0]


def test_sequences_of_one_feature_of_the_caller():
    # as long as it is wide: nothing is copied on the way in
    collection, optimizer = made(a={"max_sequence_length": 1})
    ids = torch.tensor([4, 5])
    out = collection({"a": Bags(ids, torch.tensor([0, 1, 2]))})
    out["a"].sum().backward()
    ids.fill_(0)
    optimizer.step()
    assert (values - collection.tables["table_0"].detach())[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_a_bad_id_of_the_second_type_leaves_no_lookup_open():
    features = {
        "f": FeatureConfig(TableConfig(6, 3, name="f")),
        "g": FeatureConfig(TableConfig(6, 3, name="g", dtype="bfloat16")),
    }
    collection = EmbeddingCollection(features, "sgd", update="backward")
    optimizer = FusedOptimizer(collection)
    good = torch.tensor([1])
    with pytest.raises(IndexError, match="'g'"):
        collection({"f": good, "g": torch.tensor([77])})
    before = collection.tables["f"].detach().clone()
    sum(out.float().sum() for out in collection({"f": good, "g": good}).values()).backward()
    assert not torch.equal(before, collection.tables["f"])
    del optimizer


def test_sparse_gradients_of_no_places():
    features = {"a": FeatureConfig(TableConfig(7, 4, name="a")), "b": FeatureConfig(TableConfig(7, 3, name="b"))}
    collection = EmbeddingCollection(features, update="autograd", grad="sparse")
    out = collection({"a": torch.zeros(5, 0, dtype=torch.int64), "b": torch.zeros(5, dtype=torch.int64)})
    sum(one.sum() for one in out.values()).backward()
    assert collection.tables["a"].grad.to_dense().shape == (7, 4) and not collection.tables["a"].grad.to_dense().any()
    assert collection.tables["b"].grad.to_dense()[0].tolist() == [5, 5, 5]


def test_a_failed_evaluation_leaves_lookups_that_wait():
    features = [
        FeatureConfig(TableConfig(10, 4, name="x")),
        FeatureConfig(TableConfig(10, 4, name="y", dtype="bfloat16")),
    ]
    collection = EmbeddingCollection(features, "sgd", update="backward")
    optimizer, ids = FusedOptimizer(collection), torch.arange(3)
    collection.tables["y"].requires_grad_(False)
    loss = collection([ids, ids])[0].sum()
    with torch.no_grad(), pytest.raises(IndexError):
        collection([ids, ids + 100])
    with pytest.raises(RuntimeError, match="looked up again"):
        collection([ids, ids])
    loss.backward()
    del optimizer
