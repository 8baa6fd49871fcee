"""Lookups of a collection against plain PyTorch, and what it refuses."""

import copy
import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from plain import Plain, batch_for, loss_of, random_bags, three_features, upstream

import embedfuse
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, SparseIds


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("update", ["step", "autograd"])
def test_forward_equals_plain_torch(update, weighted):
    collection = three_features(update=update)
    inputs = batch_for(collection, 9, seed=1, weighted=weighted)
    expected = Plain(collection)(inputs)
    found = collection(inputs)
    assert list(found) == ["seen", "bought", "city"]
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("grad", ["dense", "sparse"])
def test_autograd_mode_gives_ordinary_gradients(grad):
    collection = three_features(update="autograd", grad=grad)
    plain = Plain(collection)
    inputs = batch_for(collection, 9, seed=2, weighted=True)
    theirs = {k: Bags(v.ids, v.offsets, v.weights.clone().requires_grad_()) for k, v in inputs.items()}
    ours = {k: Bags(v.ids, v.offsets, v.weights.clone().requires_grad_()) for k, v in inputs.items()}
    expected, found = plain(theirs), collection(ours)
    gradients = upstream(expected, 3)
    loss_of(expected, gradients).backward()
    loss_of(found, gradients).backward()
    for name, table in plain.tables.items():
        mine = collection.tables[name].grad
        if grad == "sparse":
            assert mine.is_sparse
            used = {int(i) for k, b in inputs.items() if collection.features[k].table.name == name for i in b.ids}
            assert mine._indices()[0].tolist() == sorted(used)
            mine = mine.to_dense()
        torch.testing.assert_close(mine, table.grad)
    for name in inputs:
        torch.testing.assert_close(ours[name].weights.grad, theirs[name].weights.grad)


def test_autograd_mode_differentiates_twice():
    tables = [
        embedfuse.TableConfig(5, 3, dtype="float64", combiner="sum"),
        embedfuse.TableConfig(4, 2, dtype="float64"),
    ]
    collection = EmbeddingCollection([embedfuse.FeatureConfig(t) for t in tables], update="autograd")
    bags = [
        Bags.from_lists([[0, 1, 1], [], [4]], [[0.5, 2.0, 1.5], [], [1.0]]),
        Bags.from_lists([[3], [2, 2, 0], [1]]),
    ]
    names = list(collection.tables)

    def run(first, second, weights):
        tables = {f"tables.{names[0]}": first, f"tables.{names[1]}": second}
        inputs = [Bags(bags[0].ids, bags[0].offsets, weights), bags[1]]
        return torch.func.functional_call(collection, tables, (inputs,))

    leaves = [t.detach().clone().requires_grad_() for t in collection.tables.values()]
    leaves.append(bags[0].weights.double().requires_grad_())
    assert torch.autograd.gradcheck(lambda *a: tuple(run(*a)), leaves)
    # the mean of the second feature is unweighted; the launch has weights, of which it is a mean: not twice in those
    leaves[2] = leaves[2].detach()
    assert torch.autograd.gradgradcheck(lambda a, b: tuple(run(a, b, None)), leaves[:2])


def test_weights_get_gradients_in_step_mode():
    collection = three_features()
    _optimizer = FusedOptimizer(collection)
    plain = Plain(collection)
    inputs = batch_for(collection, 6, seed=4, weighted=True)
    theirs = {k: Bags(v.ids, v.offsets, v.weights.bfloat16().requires_grad_()) for k, v in inputs.items()}
    ours = {k: Bags(v.ids, v.offsets, v.weights.bfloat16().requires_grad_()) for k, v in inputs.items()}
    expected, found = plain(theirs), collection(ours)
    gradients = upstream(expected, 5)
    loss_of(expected, gradients).backward()
    loss_of(found, gradients).backward()
    for name in inputs:
        assert ours[name].weights.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours[name].weights.grad, theirs[name].weights.grad, rtol=2e-2, atol=2e-2)


def test_concatenated_is_the_features_side_by_side():
    collection = three_features()
    inputs = batch_for(collection, 5, seed=6)
    with torch.no_grad():
        torch.testing.assert_close(collection.concatenated(inputs), torch.cat(list(collection(inputs).values()), 1))


def test_mixed_dtypes_dims_and_id_types():
    generator = torch.Generator().manual_seed(7)
    features, inputs = {}, {}
    for number, (dim, dtype) in enumerate(
        [(1, "float32"), (63, "bfloat16"), (144, "float16"), (7, "float64"), (2, "float32"), (5, "bfloat16")]
    ):
        table = embedfuse.TableConfig(11 + number, dim, dtype=dtype, combiner=["mean", "sum", "sqrtn"][number % 3])
        features[f"f{number}"] = embedfuse.FeatureConfig(table)
        kind = torch.int32 if number % 2 else torch.int64
        inputs[f"f{number}"] = random_bags(11 + number, 6, generator, weighted=number > 3, dtype=kind)
    collection = EmbeddingCollection(features)
    expected = Plain(collection)(inputs)
    found = collection(inputs)
    for number, name in enumerate(features):
        assert found[name].shape == expected[name].shape
        assert found[name].dtype == collection.tables[f"table_{number}"].dtype
        torch.testing.assert_close(found[name], expected[name], rtol=2e-2, atol=2e-2)


def test_any_nest_in_the_same_nest_out():
    pair = namedtuple("pair", "left right")
    table = embedfuse.TableConfig(5, 2)
    one = embedfuse.FeatureConfig(table)
    nest = {"a": [one, embedfuse.FeatureConfig(table)], "b": pair(one, (one,))}
    collection = EmbeddingCollection(nest)
    bags = Bags.from_lists([[0], [1]])
    out = collection({"a": [bags, bags], "b": pair(bags, (bags,))})
    assert isinstance(out["b"], pair) and isinstance(out["b"].right, tuple)
    assert out["a"][1].shape == (2, 2)
    assert len(collection.tables) == 1
    single = EmbeddingCollection(one)
    assert single(bags).shape == (2, 2)


def test_dense_ids_are_looked_up_one_by_one():
    table = embedfuse.TableConfig(9, 4, combiner="sum")
    collection = EmbeddingCollection({"x": embedfuse.FeatureConfig(table), "y": embedfuse.FeatureConfig(table)})
    weight = collection.tables["table_0"].detach()
    ids = torch.randint(0, 9, (3, 2, 5))
    flat = torch.tensor([1, 8, 0])
    out = collection({"x": ids, "y": flat})
    torch.testing.assert_close(out["x"].detach(), weight[ids])
    torch.testing.assert_close(out["y"].detach(), weight[flat])
    optimizer = FusedOptimizer(collection, default=embedfuse.SGD(1.0))
    expected = weight.clone().index_add(0, ids.reshape(-1), -torch.ones(30, 4)).index_add(0, flat, -torch.ones(3, 4))
    (out["x"].sum() + out["y"].sum()).backward()
    optimizer.step()
    torch.testing.assert_close(collection.tables["table_0"].detach(), expected)


def test_sequences_keep_positions_and_pad_with_zeros():
    table = embedfuse.TableConfig(9, 4)
    sequence = embedfuse.FeatureConfig(table, max_sequence_length=3)
    collection = EmbeddingCollection({"s": sequence, "p": embedfuse.FeatureConfig(table)})
    weight = collection.tables["table_0"].detach().clone()
    bags = Bags.from_lists([[1, 2, 3, 4], [], [5]])
    out = collection({"s": bags, "p": bags})
    assert out["s"].shape == (3, 3, 4) and out["p"].shape == (3, 4)
    expected = torch.zeros(3, 3, 4)
    expected[0], expected[2, 0] = weight[[1, 2, 3]], weight[5]
    torch.testing.assert_close(out["s"].detach(), expected)
    sparse = SparseIds(torch.tensor([[0, 1], [2, 0], [0, 5]]), torch.tensor([7, 8, 1]), (3, 6))
    placed = collection({"s": sparse, "p": bags})["s"].detach()
    expected = torch.zeros(3, 3, 4)
    expected[0, 1], expected[2, 0] = weight[7], weight[8]
    torch.testing.assert_close(placed, expected)
    optimizer = FusedOptimizer(collection, default=embedfuse.SGD(1.0))
    out["s"].sum().backward()
    optimizer.step()
    moved = (weight - collection.tables["table_0"].detach())[:, 0]
    torch.testing.assert_close(moved, torch.tensor([0.0, 1, 1, 1, 0, 1, 0, 0, 0]))


def test_batches_of_different_sizes(subtests=None):
    collection = three_features()
    plain = Plain(collection)
    generator = torch.Generator().manual_seed(8)
    inputs = {
        "seen": random_bags(30, 4, generator), "bought": random_bags(30, 0, generator),
        "city": random_bags(7, 7, generator),
    }  # fmt: skip
    optimizer = FusedOptimizer(collection)
    expected, found = plain(inputs), collection(inputs)
    for name in inputs:
        torch.testing.assert_close(found[name], expected[name])
    gradients = upstream(expected, 9)
    loss_of(expected, gradients).backward()
    loss_of(found, gradients).backward()
    optimizer.step()
    torch.optim.SGD(plain.tables.values(), 0.1).step()
    plain.check(collection)


def test_empty_batches():
    collection = three_features()
    before = {name: table.detach().clone() for name, table in collection.tables.items()}
    optimizer = FusedOptimizer(collection)
    for bags in (0, 4):
        empty = Bags(torch.empty(0, dtype=torch.int64), torch.zeros(bags + 1, dtype=torch.int64))
        out = collection({"seen": empty, "bought": empty, "city": empty})
        assert out["seen"].shape == (bags, 8) and not out["seen"].any()
        loss_of(out, upstream(out, 0)).backward()
        optimizer.step()
    for name, table in collection.tables.items():
        assert torch.equal(table.detach(), before[name])


def test_negative_ids_and_nonpositive_weights_are_dropped_as_tensorflow_does():
    table = embedfuse.TableConfig(4, 1, initializer=np.array([[1.0], [2], [4], [8]]))
    features = {c: embedfuse.FeatureConfig(table, combiner=c) for c in ("sum", "mean", "sqrtn")}
    collection = EmbeddingCollection(features)
    bags = Bags.from_lists([[0, -1, 2], [3, 1]], [[2.0, 5.0, 2.0], [-1.0, 3.0]])
    out = collection(dict.fromkeys(features, bags))
    torch.testing.assert_close(out["sum"], torch.tensor([[10.0], [-2.0]]))
    torch.testing.assert_close(out["mean"], torch.tensor([[2.5], [2.0]]))
    torch.testing.assert_close(out["sqrtn"], torch.tensor([[10 / 8**0.5], [2.0]]))
    strict = EmbeddingCollection(embedfuse.FeatureConfig(table, validate_weights_and_indices=False))
    with pytest.raises(IndexError, match="-1"):
        strict(bags)


def test_out_of_range_ids_name_feature_place_and_table():
    collection = three_features()
    inputs = batch_for(collection, 3, seed=10)
    inputs["city"] = Bags.from_lists([[1], [2, 7], [3]])
    with pytest.raises(IndexError, match=r"'city'.*\[0, 7\).*'cities'.*got 7 in bag 1, at position 2"):
        collection(inputs)
    table = embedfuse.TableConfig(5, 2, combiner="sum")
    for policy in ("drop", "ignore"):
        dropping = EmbeddingCollection(embedfuse.FeatureConfig(table), out_of_range=policy)
        optimizer = FusedOptimizer(dropping, default=embedfuse.SGD(1.0))
        before = dropping.tables["table_0"].detach().clone()
        out = dropping(Bags.from_lists([[5, 1]]))
        torch.testing.assert_close(out.detach(), before[1:2])
        out.sum().backward()
        optimizer.step()
        moved = (before - dropping.tables["table_0"].detach()).abs().sum(1)
        torch.testing.assert_close(moved, torch.tensor([0.0, 2, 0, 0, 0]))


def test_duplicate_ids_in_bfloat16_are_summed_in_float32():
    table = embedfuse.TableConfig(2, 3, dtype="bfloat16", initializer=0.0, combiner="sum")
    collection = EmbeddingCollection(embedfuse.FeatureConfig(table))
    optimizer = FusedOptimizer(collection, default=embedfuse.SGD(1.0))
    collection(torch.ones(4096, dtype=torch.int64)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(collection.tables["table_0"][1].detach(), torch.full((3,), -4096.0).bfloat16())


def test_states_move_copy_and_pickle():
    collection = three_features()
    inputs = batch_for(collection, 4, seed=11)
    with torch.no_grad():
        expected = collection(inputs)
        twin, thawed = copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))
        for other in (twin, thawed):
            for name, out in other(inputs).items():
                assert torch.equal(out, expected[name])
        twin.tables["items"].zero_()
        assert torch.equal(collection(inputs)["seen"], expected["seen"])
        half = copy.deepcopy(collection).half()
        assert half(inputs)["seen"].dtype == torch.float16
        torch.testing.assert_close(half(inputs)["seen"].float(), expected["seen"], rtol=1e-2, atol=1e-2)
        assert set(collection.state_dict()) == {"tables.items", "tables.cities"}
        fresh = three_features()
        fresh.load_state_dict(collection.state_dict())
        assert torch.equal(fresh(inputs)["seen"], expected["seen"])
        fresh.load_state_dict({k: v * 2 for k, v in collection.state_dict().items()}, assign=True)
        torch.testing.assert_close(fresh(inputs)["city"], 2 * expected["city"])
        fresh.tables["items"].data = torch.ones(30, 8)
        assert fresh(inputs)["seen"].max() == 1


def test_views_of_a_tables_own_memory_are_noticed():
    collection = EmbeddingCollection(embedfuse.FeatureConfig(embedfuse.TableConfig(4, 4, name="square")))
    table = collection.tables["square"]
    expected = table.detach().t().clone()
    table.data = table.data.t()
    assert torch.equal(collection(torch.arange(4)), expected)
    table.data = table.data.reshape(2, 8)
    with pytest.raises(ValueError, match=r"table 'square' must keep its shape \[4, 4\], got \[2, 8\]"):
        collection(torch.arange(2))


def test_views_of_a_tables_own_memory_are_noticed_before_a_step():
    table = embedfuse.TableConfig(4, 4, name="square", initializer=0.0)
    collection = EmbeddingCollection(embedfuse.FeatureConfig(table, output_shape=(1,)), embedfuse.SGD(1.0))
    optimizer, table = FusedOptimizer(collection), collection.tables["square"]
    collection(torch.tensor([[1]])).sum().backward()
    table.data = table.data.t()
    optimizer.step()
    assert table.tolist() == [[0] * 4, [-1] * 4, [0] * 4, [0] * 4]
    collection(torch.tensor([[1]])).sum().backward()
    table.data = table.data.reshape(2, 8)
    with pytest.raises(ValueError, match=r"table 'square' must keep its shape \[4, 4\], got \[2, 8\]"):
        optimizer.step()


def test_configs_are_never_changed_and_every_name_is_allowed():
    table = embedfuse.TableConfig(3, 2, name="items")
    feature = embedfuse.FeatureConfig(table)
    collection = EmbeddingCollection({"items": feature, "keys": embedfuse.FeatureConfig(embedfuse.TableConfig(3, 1))})
    assert feature.table is table and table.optimizer is None
    assert dict(collection.named_parameters()).keys() == {"tables.items", "tables.table_1"}


@pytest.mark.parametrize("name", ["training", "_parameters", "_own", "_buffers"])
def test_names_that_modules_need_are_refused(name):
    with pytest.raises(ValueError, match=f"`name` of a table must not be one .* got '{name}': choose another"):
        EmbeddingCollection(embedfuse.FeatureConfig(embedfuse.TableConfig(3, 2, name=name)))


@pytest.mark.parametrize("name", ["changes", "items", "put", "forward", "T", "call_super_init"])
def test_other_names_work_throughout(name):
    collection = EmbeddingCollection(
        embedfuse.FeatureConfig(embedfuse.TableConfig(3, 2, 1.0, name=name)), embedfuse.SGD(1.0)
    )
    optimizer = FusedOptimizer(collection)
    collection.train()
    collection.load_state_dict({f"tables.{name}": torch.full((3, 2), 2.0)}, assign=True)
    collection(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert collection.tables[name].tolist() == [[2, 2], [1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"vocabulary_size": 0, "dim": 1}, ValueError, "vocabulary_size"),
        ({"vocabulary_size": 1, "dim": 0}, ValueError, "dim"),
        ({"vocabulary_size": 1.5, "dim": 1}, ValueError, "vocabulary_size"),
        ({"vocabulary_size": 1, "dim": 1, "combiner": "max"}, ValueError, "combiner"),
        ({"vocabulary_size": 1, "dim": 1, "dtype": "int8"}, ValueError, "dtype"),
        ({"vocabulary_size": 1, "dim": 1, "initializer": "uniform"}, ValueError, "initializer"),
        ({"vocabulary_size": 1, "dim": 1, "optimizer": "lion"}, ValueError, "optimizer"),
        ({"vocabulary_size": 1, "dim": 1, "optimizer": torch.optim.SGD}, TypeError, "optimizer"),
        ({"vocabulary_size": 1, "dim": 1, "name": "a.b"}, ValueError, "name"),
    ],
)
def test_table_config_refuses(arguments, kind, message):
    with pytest.raises(kind, match=f"`{message}`"):
        embedfuse.TableConfig(**arguments)


def test_collection_refuses(monkeypatch):
    table = embedfuse.TableConfig(3, 2, name="t")
    feature = embedfuse.FeatureConfig(table)
    with pytest.raises(ValueError, match="two tables named 't'"):
        EmbeddingCollection([feature, embedfuse.FeatureConfig(embedfuse.TableConfig(3, 2, name="t"))])
    with pytest.raises(ValueError, match="`update`"):
        EmbeddingCollection(feature, update="later")
    with pytest.raises(ValueError, match="`features`"):
        EmbeddingCollection({})
    with pytest.raises(TypeError, match="`features`"):
        EmbeddingCollection({"a": table})
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no CUDA GPU"):
            EmbeddingCollection(feature, device="cuda")
    with pytest.raises(ValueError, match="shape"):
        EmbeddingCollection(embedfuse.FeatureConfig(embedfuse.TableConfig(3, 2, initializer=torch.zeros(2, 3))))
    collection = EmbeddingCollection({"a": feature, "b": feature})
    bags = Bags.from_lists([[0]])
    with pytest.raises(ValueError, match=r"missing: \['b'\], unknown: \['c'\]"):
        collection({"a": bags, "c": bags})
    with pytest.raises(TypeError, match="dict"):
        collection([bags, bags])
    with pytest.raises(TypeError, match="from_lists"):
        collection({"a": bags, "b": [[0]]})
    with pytest.raises(TypeError, match="int32 or int64"):
        collection({"a": bags, "b": torch.zeros(3)})
    sequence = EmbeddingCollection(embedfuse.FeatureConfig(table, max_sequence_length=2))
    with pytest.raises(ValueError, match="max_sequence_length"):
        sequence(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="no weights"):
        sequence(Bags.from_lists([[0]], [[1.0]]))


def test_output_shape():
    table = embedfuse.TableConfig(5, 2, combiner="sum")
    shaped = EmbeddingCollection(embedfuse.FeatureConfig(table, output_shape=(2, 2)))
    bags = Bags.from_lists([[0], [1, 2], [], [3]])
    weight = shaped.tables["table_0"].detach()
    out = shaped(bags).detach()
    assert out.shape == (2, 2, 2)
    torch.testing.assert_close(out[0, 1], weight[1] + weight[2])
    # more places than bags: the bags become sequences
    out = shaped(Bags.from_lists([[0], [1, 2, 3]])).detach()
    torch.testing.assert_close(out, torch.stack([torch.stack([weight[0], torch.zeros(2)]), weight[1:3]]))
    with pytest.raises(ValueError, match="output_shape"):
        shaped(Bags.from_lists([[0], [1], [2]]))


def test_inference_mode_first_and_training_after():
    collection = three_features()
    optimizer = FusedOptimizer(collection)
    sequence = {name: torch.zeros(2, 3, dtype=torch.int64) for name in collection.features}
    with torch.inference_mode():
        collection(sequence)
    before = collection.tables["items"].detach().clone()
    sum(out.sum() for out in collection(sequence).values()).backward()
    optimizer.step()
    assert not torch.equal(before, collection.tables["items"].detach())


def test_functional_transforms_in_autograd_mode():
    collection = three_features(update="autograd")
    plain = Plain(collection)
    inputs = batch_for(collection, 5, seed=12, weighted=True)
    gradients = upstream(plain(inputs), 13)
    loss_of(plain(inputs), gradients).backward()
    named = {f"tables.{name}": table.detach() for name, table in collection.tables.items()}

    def loss(tables):
        return loss_of(torch.func.functional_call(collection, tables, (inputs,)), gradients)

    for name, grad in torch.func.grad(loss)(named).items():
        torch.testing.assert_close(grad, plain.tables[name.removeprefix("tables.")].grad)
    stacked = {name: torch.stack([table, 2 * table]) for name, table in named.items()}
    losses = torch.func.vmap(loss)(stacked)
    torch.testing.assert_close(losses, torch.stack([loss(named), 2 * loss(named)]))
    with pytest.raises(NotImplementedError, match=r"torch\.export"):
        torch.jit.trace(lambda ids: collection(dict.fromkeys(inputs, ids))["seen"], torch.tensor([1, 2]))


def test_tables_may_be_written_between_forward_and_backward():
    collection = three_features(update="autograd")
    out = collection(batch_for(collection, 5, seed=14))
    with torch.no_grad():
        collection.tables["items"].mul_(2)
    sum(value.sum() for value in out.values()).backward()
    assert collection.tables["items"].grad is not None


def test_weights_without_gradients_cost_nothing(monkeypatch):
    from embedfuse.torch.backends import select

    collection = three_features()
    FusedOptimizer(collection)
    backend = select(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(type(backend), "coefficient_grad", None)
    sum(out.sum() for out in collection(batch_for(collection, 5, seed=15, weighted=True)).values()).backward()
