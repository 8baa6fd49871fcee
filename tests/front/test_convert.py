"""Tables and optimizer state from TensorFlow: a training goes on as it would have there; nothing is half loaded."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from column_cases import FEATURES, RECORD, columns_of

import embedfuse
from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import EmbeddingCollection, FusedOptimizer
from embedfuse.torch import feature_column as fc
from embedfuse.torch.convert import from_tf_variables, read_variables

RULES = {
    "adagrad": embedfuse.Adagrad(0.1, initial_accumulator_value=0.2),
    # TensorFlow's Adam moves all rows; it adds epsilon before the correction, so only a small one does the same here
    "adam": embedfuse.Adam(0.05, epsilon=1e-8, lazy_adam=False, bias_correction=True),
    "ftrl": embedfuse.FTRL(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.02),
}
MODEL = "model/input_layer/"


def arrays(record):
    return {name: np.array(value, np.float32) for name, value in record.items()}


def joined(record, table):
    """The parts of a table, one after another."""
    parts = [np.array(value) for name, value in sorted(record.items()) if f"/{table}/" in name]
    return torch.tensor(np.concatenate(parts), dtype=torch.float32)


@pytest.mark.parametrize("record", RECORD["trainings"], ids=lambda record: record["rule"])
@pytest.mark.parametrize("together", [True, False])
def test_a_training_goes_on_as_in_tensorflow(record, together):
    layer = fc.InputLayer(columns_of(record["columns"], Path()), RULES[record["rule"]])
    optimizer = FusedOptimizer(layer)
    variables = arrays(record["variables"])
    if together:
        used = from_tf_variables([layer, optimizer], variables)
        assert used["ids_embedding"] == f"{MODEL}ids_embedding/embedding_weights"
    else:
        from_tf_variables(layer, variables)
        from_tf_variables(optimizer, variables)
    tables = dict(layer.tables.named_tables())
    assert {int(optimizer.state[table]["step"]) for table in tables.values()} == {2}
    out = layer(FEATURES)
    pattern = np.sin(np.arange(out.numel()) * 1.7 + 0.9).reshape(out.shape).astype(np.float32)
    out.backward(torch.from_numpy(pattern))
    optimizer.step()
    for name, table in tables.items():
        torch.testing.assert_close(table.detach(), joined(record["after"], name), rtol=1e-5, atol=2e-6)


def two_tables(**options):
    configs = {name: TableConfig(rows, 3, name=name) for name, rows in (("user", 7), ("item", 10))}
    return EmbeddingCollection({name: FeatureConfig(config) for name, config in configs.items()}, "adagrad", **options)


def whole(rows, start=0.0):
    return np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + np.float32(start)


@pytest.mark.parametrize("parts", [1, 2, 4, 10])
@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_parts_are_put_together(parts, strategy):
    def split(table):
        if strategy == "mod":
            return [table[number::parts] for number in range(parts)]
        return np.array_split(table, parts)

    user, item = whole(7), whole(10, 100.0)
    variables = {f"a/item/embedding_weights/part_{n}": part for n, part in enumerate(split(item))}
    variables["a/user/embeddings:0"] = user
    collection = two_tables()
    from_tf_variables(collection, variables, partition_strategy=strategy)
    assert np.array_equal(collection.tables["item"].detach().numpy(), item)
    assert np.array_equal(collection.tables["user"].detach().numpy(), user)


def test_keras_and_object_checkpoints_name_things_otherwise():
    ending = "/.ATTRIBUTES/VARIABLE_VALUE"
    variables = {}
    for name, rows in (("user", 7), ("item", 10)):
        variables[f"model/{name}/embeddings{ending}"] = whole(rows)
        slot = f"model/{name}/embeddings/.OPTIMIZER_SLOT/optimizer/accumulator{ending}"
        variables[slot] = whole(rows, 1.0)
    variables[f"optimizer/iter{ending}"] = np.array(41)
    collection = two_tables()
    optimizer = FusedOptimizer(collection)
    from_tf_variables([collection, optimizer], variables)
    assert int(optimizer.state_dict()["state"]["user"]["step"]) == 41
    assert optimizer.state_dict()["state"]["item"]["accumulators"].numpy().tolist() == whole(10, 1.0).tolist()
    keras = {"a/user/embeddings": whole(7), "b/item/embeddings": whole(10)}
    keras |= {f"Adagrad/{name}/accumulator": value + 2 for name, value in keras.items()}
    from_tf_variables(optimizer, keras)
    assert optimizer.state_dict()["state"]["user"]["accumulators"].numpy().tolist() == whole(7, 2.0).tolist()


def test_names_and_slots_can_be_told():
    collection = two_tables()
    optimizer = FusedOptimizer(collection)
    variables = {"old/u": whole(7), "old/i": whole(10), "old/u/mine": whole(7, 1), "old/i/mine": whole(10, 1)}
    names = {"user": "old/u", "tables.item": "old/i"}
    from_tf_variables(collection, variables, names=names)
    names = {"user": "old/u", "item": "old/i"}
    from_tf_variables(optimizer, variables, names=names, slots={"accumulators": "mine"}, step=9)
    assert int(optimizer.state_dict()["state"]["user"]["step"]) == 9
    assert np.array_equal(collection.tables["item"].detach().numpy(), whole(10))


def test_a_linear_model_and_plain_tables_are_loaded_too():
    case = RECORD["linear"]["linear"]
    model = fc.LinearModel(columns_of(case["columns"], Path()), units=2)
    from_tf_variables(model, arrays(case["variables"]))
    torch.testing.assert_close(model(FEATURES).detach(), torch.tensor(case["output"]), rtol=2e-6, atol=3e-6)
    case = RECORD["cases"]["order"]
    layer = fc.InputLayer(columns_of(case["columns"], Path(), do_fusion=False))
    from_tf_variables(layer, arrays(case["variables"]))
    torch.testing.assert_close(layer(FEATURES).detach(), torch.tensor(case["output"]), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("steps", [0, 1, 5, 200, 20_000])
def test_steps_are_read_from_the_powers_of_betas(steps):
    collection = two_tables()
    collection.optimizer = None
    optimizer = FusedOptimizer(collection, default=embedfuse.Adam(0.1, bias_correction=True))
    variables = {"user": whole(7), "item": whole(10)}
    variables |= {f"{name}/{slot}": value for name, value in variables.items() for slot in ("Adam", "Adam_1")}
    powers = np.float32(0.9) ** np.float32(steps + 1), np.float32(0.999) ** np.float32(steps + 1)
    variables |= {"beta1_power": powers[0], "beta2_power": powers[1]}
    from_tf_variables(optimizer, variables)
    found = int(optimizer.state_dict()["state"]["user"]["step"])
    assert found == pytest.approx(steps, rel=1e-3)
    if steps < 100:
        assert found == steps
    del variables["beta1_power"], variables["beta2_power"]
    with pytest.raises(ValueError, match=r"must hold `iter`, `beta1_power` or `global_step` .* give `step`"):
        from_tf_variables(optimizer, variables)


def good():
    variables = {"user": whole(7), "item": whole(10)}
    return variables | {f"{name}/Adagrad": value + 1 for name, value in variables.items()}


BAD = [
    (
        lambda v: v.pop("item"),
        {},
        ValueError,
        r"must hold one for table 'item', got none among .*: say which in `names`",
    ),
    (
        lambda v: v.update(item=whole(9)),
        {},
        ValueError,
        r"table 'item' must be loaded from shape \[10, 3\], got \[9, 3\]",
    ),
    (lambda v: v.update({"x/item": whole(10)}), {}, ValueError, r"'item', got several, item, x/item: say which"),
    (
        lambda v: v.pop("item/Adagrad"),
        {},
        ValueError,
        r"item/Adagrad or item/accumulator for slot 'accumulators' of tab",
    ),
    (
        lambda v: v.update({"item/Adagrad": whole(9)}),
        {},
        ValueError,
        r"slot 'accumulators' of table 'item' must be loaded",
    ),
    (lambda v: v.update({"item/part_1": whole(5)}), {}, ValueError, r"must hold 'item' once, whole or in parts"),
    (lambda v: None, {"partition_strategy": "block"}, ValueError, r"`partition_strategy` must be one of div, mod, got"),
    (
        lambda v: None,
        {"names": {"itme": "item"}},
        ValueError,
        r"`names` must name tables of the targets, got \['itme'\]",
    ),
    (lambda v: None, {"names": {"item": "itme"}}, ValueError, r"`names` must give variables, got 'itme' for 'item'"),
    (lambda v: None, {"step": -1}, ValueError, r"`step` must be an int of at least 0"),
    (
        lambda v: v.update({"item/part_1": v.pop("item")}),
        {},
        ValueError,
        r"all parts of 'item', got none with .* \[0\]",
    ),
    (
        lambda v: v.update({"item/part_0": v.pop("item")[:8], "item/part_1": whole(2)}),
        {"partition_strategy": "mod"},
        ValueError,
        r"must have \[5, 5\] rows with `partition_strategy=\"mod\"`, got \[8, 2\]",
    ),
    (
        lambda v: v.update({"item/part_0": v.pop("item")[:8], "item/part_1": whole(2)[:, :2]}),
        {},
        ValueError,
        r"must be rows of one width",
    ),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_does_not_fit_changes_nothing(number):
    spoil, options, error, message = BAD[number]
    collection = two_tables()
    optimizer = FusedOptimizer(collection)
    before = copy.deepcopy((collection.state_dict(), optimizer.state_dict()["state"]))
    variables = good()
    spoil(variables)
    with pytest.raises(error, match=message):
        from_tf_variables([collection, optimizer], variables, **options)
    for name, table in before[0].items():
        assert torch.equal(collection.state_dict()[name], table)
    for name, slots in before[1].items():
        for slot, value in slots.items():
            assert torch.equal(optimizer.state_dict()["state"][name][slot], value)


def test_other_targets_are_refused():
    with pytest.raises(TypeError, match="`targets` must be modules with embedding tables, got Linear without any"):
        from_tf_variables(torch.nn.Linear(2, 3), good())
    with pytest.raises(TypeError, match="`targets` must be modules and FusedOptimizers, got Adagrad"):
        from_tf_variables([embedfuse.Adagrad()], good())
    config = TableConfig(7, 3, name="user", optimizer=embedfuse.RowWiseAdagrad(0.1))
    rowwise = FusedOptimizer(EmbeddingCollection([FeatureConfig(config)]))
    with pytest.raises(ValueError, match=r"slot 'accumulators' of table 'user' must be loaded from shape \[7, 1\]"):
        from_tf_variables(rowwise, good())


def test_files_and_first_values_from_them(tmp_path, monkeypatch):
    path = tmp_path / "variables.npz"
    table = whole(6, 0.5)
    np.savez(path, **{"m/part_0": table[:4], "m/part_1": table[4:], "other": whole(7)})
    assert set(read_variables(path)) == {"m/part_0", "m/part_1", "other"}
    ids = fc.categorical_column_with_identity("a", 6)
    column = fc.embedding_column(ids, 3, ckpt_to_load_from=path, tensor_name_in_ckpt="m")
    assert fc.InputLayer([column])({"a": [5]}).tolist() == [table[5].tolist()]
    wrong = fc.embedding_column(ids, 3, ckpt_to_load_from=path, tensor_name_in_ckpt="n")
    with pytest.raises(ValueError, match="`tensor_name_in_ckpt` must be one of m, other, got 'n'"):
        fc.InputLayer([wrong])
    with pytest.raises(FileNotFoundError, match=r"`path` must be a file of variables"):
        read_variables(tmp_path / "none.npz")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"TensorFlow must be installed to read its checkpoint .*numpy.savez"):
        read_variables(tmp_path / "model.ckpt")


def test_a_checkpoint_of_tensorflow(tmp_path):
    tensorflow = pytest.importorskip("tensorflow")
    v1 = tensorflow.compat.v1
    with tensorflow.Graph().as_default(), v1.Session() as session:
        with v1.variable_scope("a", partitioner=v1.fixed_size_partitioner(3)):
            for name, rows in (("user", 7), ("item", 10)):
                parts = list(v1.get_variable(name, [rows, 3]))
                session.run(v1.variables_initializer(parts))
                begin = 0
                for part in parts:
                    size = int(part.shape[0])
                    session.run(part.assign(whole(rows)[begin : begin + size]))
                    begin += size
        v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))
    for path in (tmp_path, tmp_path / "model.ckpt"):
        collection = two_tables()
        from_tf_variables(collection, path)
        assert np.array_equal(collection.tables["item"].detach().numpy(), whole(10))
    with pytest.raises(FileNotFoundError, match="must be a checkpoint of TensorFlow"):
        read_variables(tmp_path / "none.ckpt")
