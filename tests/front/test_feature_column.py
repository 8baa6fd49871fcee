"""Feature columns against what TensorFlow answered: ids, outputs, order, gradients, a training."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from column_cases import FEATURES, RECORD, columns_of, fill, ours, random_lists

import embedfuse
from embedfuse.torch import Bags, FusedOptimizer
from embedfuse.torch import feature_column as fc
from embedfuse.torch.backends import use_backend
from embedfuse.torch.feature_column.column import Features

BACKENDS = ("cpu", "eager")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "vocabulary.txt"
    path.write_text("\n".join(RECORD["file"]) + "\n")
    return path


def upstream(shape: torch.Size) -> torch.Tensor:
    """The gradient that the recording used."""
    return torch.from_numpy(np.sin(np.arange(shape.numel()) * 1.7 + 0.9).reshape(shape).astype(np.float32))


@pytest.mark.parametrize("mode", ["cpu", "eager", "plain"])
@pytest.mark.parametrize("name", RECORD["cases"])
def test_input_layer_is_tensorflows(name, mode, file):
    case = RECORD["cases"][name]
    layer = fc.InputLayer(columns_of(case["columns"], file, do_fusion=mode != "plain"), update="autograd")
    assert [column.name for column in layer.columns] == case["order"]
    tables = dict(layer.tables.named_tables()) if layer.tables is not None else {}
    assert set(tables) == {ours(variable) for variable in case["variables"]}
    fill(tables, case["variables"])
    with use_backend("eager" if mode == "plain" else mode):
        out = layer(FEATURES)
        torch.testing.assert_close(out.detach(), torch.tensor(case["output"]), rtol=2e-6, atol=2e-6)
        if tables:
            out.backward(upstream(out.shape))
    for variable, expected in case["gradients"].items():
        torch.testing.assert_close(tables[ours(variable)].grad, torch.tensor(expected), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("do_fusion", [True, False])
@pytest.mark.parametrize("name", RECORD["linear"])
def test_linear_model_is_tensorflows(name, do_fusion, file):
    case = RECORD["linear"][name]
    combiner = "mean" if name == "linear_mean" else "sum"
    columns = columns_of(case["columns"], file)
    model = fc.linear_model(columns, units=2, sparse_combiner=combiner, update="autograd", do_fusion=do_fusion)
    tables = {**dict(model.dense_weights.items()), **dict(model.tables.named_tables())}
    assert set(tables) == {ours(variable) for variable in case["variables"]}
    assert all(not table.any() for table in tables.values())
    fill(tables, case["variables"])
    out = model(FEATURES)
    torch.testing.assert_close(out.detach(), torch.tensor(case["output"]), rtol=2e-6, atol=3e-6)
    out.backward(upstream(out.shape))
    for variable, expected in case["gradients"].items():
        torch.testing.assert_close(tables[ours(variable)].grad, torch.tensor(expected), rtol=3e-6, atol=3e-6)


def test_hashes_are_tensorflows():
    record = RECORD["fingerprints"]
    for buckets, words, numbers in zip(record["buckets"], record["of_words"], record["of_numbers"], strict=True):
        text = pa.array([[word] for word in record["words"]])
        found = fc.categorical_column_with_hash_bucket("a", buckets).ids(Features({"a": text}))
        assert found.ids.tolist() == words
        bags = Bags.from_lists([record["numbers"]])
        found = fc.categorical_column_with_hash_bucket("a", buckets, "int64").ids(Features({"a": bags}))
        assert found.ids.tolist() == numbers


@pytest.mark.parametrize("case", RECORD["crosses"], ids=lambda case: f"{'_'.join(case['features'])}_{case['hash_key']}")
def test_crosses_are_tensorflows_in_their_order(case):
    column = fc.crossed_column(case["features"], 2**62, case["hash_key"])
    assert column.ids(Features(FEATURES)).to_lists() == case["buckets"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("update", ["step", "backward"])
def test_deeprecs_seed_example_trains_as_tensorflow_does(backend, update):
    """Five rows of one id each, all ones, twice the output, summed, FTRL."""
    record = RECORD["seed_example"]
    column = fc.embedding_column(fc.categorical_column_with_identity("id", 6), 3, initializer=1.0)
    rule = embedfuse.FTRL(0.1, l1_regularization_strength=2.0, l2_regularization_strength=1e-5)
    layer = fc.InputLayer([column], rule, update)
    optimizer = FusedOptimizer(layer)
    table = dict(layer.tables.named_tables())["id_embedding"]
    batch = {"id": Bags.from_lists([[i] for i in record["ids"]])}
    with use_backend(backend):
        for loss, after in zip(record["losses"], record["tables"], strict=True):
            found = (layer(batch) * 2).sum()
            assert float(found.detach()) == pytest.approx(loss, rel=1e-6)
            found.backward()
            optimizer.step()
            torch.testing.assert_close(table.detach(), torch.tensor(after), rtol=2e-6, atol=1e-6)
    for ours_, theirs in (("accumulators", "accum"), ("linears", "linear")):
        torch.testing.assert_close(
            optimizer.state[table][ours_], torch.tensor(record["slots"][theirs]), rtol=2e-6, atol=0
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_fusion_changes_no_number(backend, combiner, max_norm):
    def layer(do_fusion):
        torch.manual_seed(1)
        identity = [fc.categorical_column_with_identity(key, 30) for key in "abc"]
        weighted = fc.weighted_categorical_column(identity[2], "w")
        options = {"combiner": combiner, "max_norm": max_norm, "do_fusion": do_fusion}
        columns = [fc.embedding_column(weighted, 5, **options)]
        columns += fc.shared_embedding_columns(identity[:2], 9, **options)
        made = fc.InputLayer(columns, update="autograd")
        for number, (_, table) in enumerate(sorted(made.tables.named_tables())):
            torch.nn.init.normal_(table, generator=torch.Generator().manual_seed(number))
        return made

    batch = {key: Bags.from_lists(random_lists(20, 5, 30, seed)) for seed, key in enumerate("abc")}
    batch["w"] = [np.random.default_rng(3).normal(size=len(bag)).round(1).tolist() for bag in batch["c"].to_lists()]
    fused, plain = layer(True), layer(False)
    with use_backend(backend):
        outs = [one(batch) for one in (fused, plain)]
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
        for out in outs:
            out.backward(upstream(out.shape))
    theirs = dict(plain.tables.named_tables())
    for name, table in fused.tables.named_tables():
        torch.testing.assert_close(table.grad, theirs[name].grad, rtol=1e-5, atol=1e-5)


def test_all_fused_columns_are_one_lookup(monkeypatch):
    from embedfuse.torch import collection

    calls = []
    launched = collection.EmbeddingCollection._look_up
    monkeypatch.setattr(
        collection.EmbeddingCollection, "_look_up", lambda self, *args: calls.append(1) or launched(self, *args)
    )
    columns = [
        fc.embedding_column(fc.categorical_column_with_identity(f"f{n}", 9 + n), 2 + n, max_norm=n or None)
        for n in range(6)
    ]
    layer = fc.InputLayer(columns)
    layer({f"f{n}": [[n], [1, 2]] for n in range(6)})
    assert len(calls) == 1


def test_a_frozen_column_stays():
    columns = [
        fc.embedding_column(fc.categorical_column_with_identity(key, 4), 2, trainable=key == "a") for key in "ab"
    ]
    layer = fc.InputLayer(columns, "sgd")
    before = {name: table.detach().clone() for name, table in layer.tables.named_tables()}
    optimizer = FusedOptimizer(layer)
    layer({"a": [[1], [2]], "b": [[1], [2]]}).sum().backward()
    optimizer.step()
    after = dict(layer.tables.named_tables())
    assert torch.equal(after["b_embedding"], before["b_embedding"])
    assert not torch.equal(after["a_embedding"][1], before["a_embedding"][1])


def test_sequences_keep_their_rows_apart():
    columns = [
        fc.embedding_column(fc.sequence_categorical_column_with_identity("a", 5), 2),
        fc.embedding_column(fc.sequence_categorical_column_with_vocabulary_list("b", ["x", "y"]), 3, do_fusion=False),
    ]
    layer = fc.SequenceInputLayer(columns, update="autograd")
    batch = {"a": Bags.from_lists([[1, 2, 1], [], [4]]), "b": pa.array([["x", "?", "y"], [], ["x"]])}
    out, lengths = layer(batch)
    assert out.shape == (3, 3, 5)
    assert lengths.tolist() == [3, 0, 1]
    tables = {name: table.detach() for name, table in layer.tables.named_tables()}
    expected = torch.zeros(3, 3, 5)
    expected[0, :, :2] = tables["a_embedding"][[1, 2, 1]]
    expected[2, 0, :2] = tables["a_embedding"][4]
    expected[0, 0, 2:], expected[0, 2, 2:] = tables["b_embedding"]
    expected[2, 0, 2:] = tables["b_embedding"][0]
    assert torch.equal(out.detach(), expected)
    short = fc.SequenceInputLayer(columns, max_length=2)
    out, lengths = short(batch)
    assert out.shape == (3, 2, 5) and lengths.tolist() == [2, 0, 1]
    out, lengths = layer({"a": [[], []], "b": [[], []]})
    assert out.shape == (2, 0, 5)
