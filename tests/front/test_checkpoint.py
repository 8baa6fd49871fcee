"""Checkpoints: bit-identical resumption, atomic replacement, refusals, and no code in the files."""

import json
import pickle

import pytest
import torch
from plain import batch_for, three_features

import embedfuse
from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, load, save


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = three_features(items=embedfuse.Adam(0.1, bias_correction=True), cities=embedfuse.FTRL(0.1))
        self.top = torch.nn.Linear(19, 1)

    def forward(self, inputs):
        return self.top(torch.cat(list(self.embeddings(inputs).values()), 1))


def made():
    torch.manual_seed(0)
    model = Model()
    return model, {"tables": FusedOptimizer(model), "dense": torch.optim.Adam(model.top.parameters(), 0.01)}


def train(model, optimizers, steps):
    for step in steps:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        out = model(batch_for(model.embeddings, 5, step))
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(step))).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()


def test_resumed_run_is_bit_identical(tmp_path):
    model, optimizers = made()
    train(model, optimizers, range(3))
    state = {"step": 3, "name": "run", "rng": torch.get_rng_state(), "nested": [1, (2.5, None)], "by_number": {7: True}}
    save(tmp_path / "point", {"model": model}, optimizers, state)
    train(model, optimizers, range(3, 6))
    other, others = made()
    found = load(tmp_path / "point", {"model": other}, others)
    assert torch.equal(found.pop("rng"), state.pop("rng"))
    assert found == state
    train(other, others, range(3, 6))
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])
    for name, slots in optimizers["tables"].state_dict()["state"].items():
        for slot, value in slots.items():
            assert torch.equal(value, others["tables"].state_dict()["state"][name][slot])


def test_files_hold_no_code_and_a_killed_save_leaves_the_last_one(tmp_path, monkeypatch):
    model, optimizers = made()
    save(tmp_path, {"model": model}, optimizers, {"step": 1})
    kept = {path.name for path in tmp_path.iterdir()}
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(torch, "load", None)
    train(model, optimizers, range(2))
    import safetensors.torch

    def killed(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, {"model": model}, optimizers, {"step": 2})
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, {"model": model}, optimizers, {"step": 2})
    assert load(tmp_path) == {"step": 1}
    assert kept <= {path.name for path in tmp_path.iterdir()}
    save(tmp_path, {"model": model}, optimizers, {"step": 2})
    assert load(tmp_path) == {"step": 2}
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_refusals_change_nothing(tmp_path):
    model, optimizers = made()
    save(tmp_path, {"model": model}, optimizers)
    with pytest.raises(FileNotFoundError, match=r"checkpoint\.json"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="'other'"):
        load(tmp_path, {"other": model})
    table = embedfuse.TableConfig(31, 8, name="items")
    larger = embedfuse.torch.EmbeddingCollection(
        {"x": embedfuse.FeatureConfig(table), "y": embedfuse.FeatureConfig(embedfuse.TableConfig(7, 3, name="cities"))}
    )
    save(tmp_path / "tables", {"tables": model.embeddings})
    before = larger.tables["cities"].detach().clone()
    with pytest.raises(ValueError, match=r"'tables.items'.*\[30, 8\], got \[31, 8\]"):
        load(tmp_path / "tables", {"tables": larger})
    assert torch.equal(before, larger.tables["cities"].detach())
    with pytest.raises(ValueError, match="not in the checkpoint"):
        load(tmp_path / "tables", {"tables": model})
    with pytest.raises(TypeError, match="'state/x'"):
        save(tmp_path, {}, state={"x": object()})
    assert load(tmp_path, {"model": model}) is None
    (tmp_path / "checkpoint.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load(tmp_path)
    save(tmp_path, {})
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    (tmp_path / "checkpoint.json").write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(ValueError, match="format"):
        load(tmp_path)


def test_keys_of_state_never_collide(tmp_path):
    state = {
        "a": {"b": torch.tensor([1.0])}, "a/b": torch.tensor([2.0]), "a/b'": torch.tensor([3.0]),
        7: torch.tensor([4.0]), "7": torch.tensor([5.0]),
    }  # fmt: skip
    marks = {"t": {"__tuple__": [1, 2]}, "i": {"__items__": [[1, 2]]}, "x": {"__tensor__": "a"}, "pair": (1, (2,))}
    save(tmp_path, {}, state=state | marks)
    found = load(tmp_path)
    assert {key: found[key] for key in marks} == marks
    assert found["a"]["b"].item() == 1
    assert [found[key].item() for key in ("a/b", "a/b'", 7, "7")] == [2, 3, 4, 5]


def test_table_names_may_hold_slashes(tmp_path):
    def model():
        tables = [TableConfig(4, 2, name=name) for name in ("a", "a/step", "b/a")]
        return EmbeddingCollection([FeatureConfig(table) for table in tables], embedfuse.Adam(0.1))

    first, second = model(), model()
    optimizers = FusedOptimizer(first), FusedOptimizer(second)
    first.concatenated([Bags.from_lists([[number, 3]]) for number in range(3)]).sum().backward()
    optimizers[0].step()
    save(tmp_path, {"m": first}, {"o": optimizers[0]})
    load(tmp_path, {"m": second}, {"o": optimizers[1]})
    for name, slots in optimizers[0].state_dict()["state"].items():
        assert torch.equal(first.tables[name], second.tables[name])
        for slot, value in slots.items():
            assert torch.equal(value, optimizers[1].state_dict()["state"][name][slot])


@pytest.mark.parametrize("wrong", ["shape", "count", "rule"])
def test_nothing_is_loaded_unless_everything_fits(wrong, tmp_path):
    def parts(width, count, rule):
        collection = EmbeddingCollection({"f": FeatureConfig(TableConfig(10, 2, name="t"))})
        dense = torch.nn.ModuleList([torch.nn.Linear(width, 1) for _ in range(count)])
        dense_optimizer = torch.optim.Adam(dense.parameters())
        other = EmbeddingCollection({"f": FeatureConfig(TableConfig(4, 2, name="u"))}, rule)
        optimizers = {"a": FusedOptimizer(collection, default=embedfuse.Adagrad(0.1)), "b": dense_optimizer}
        return collection, dense, optimizers | {"c": FusedOptimizer(other)}

    collection, dense, optimizers = parts(3, 1, embedfuse.Adam(0.1))
    collection({"f": Bags.from_lists([[1]])})["f"].sum().backward()
    dense[0](torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    save(tmp_path, {}, optimizers)
    asked = {"shape": (4, 1, embedfuse.Adam(0.1)), "count": (3, 2, embedfuse.Adam(0.1)),
             "rule": (3, 1, embedfuse.AdamW(0.1))}[wrong]  # fmt: skip
    _, _, others = parts(*asked)
    before = {slot: value.clone() for slot, value in others["a"].state_dict()["state"]["t"].items()}
    with pytest.raises(ValueError, match=f"optimizer '{'c' if wrong == 'rule' else 'b'}'"):
        load(tmp_path, None, others)
    for slot, value in others["a"].state_dict()["state"]["t"].items():
        assert torch.equal(value, before[slot])
    assert not others["b"].state


def test_checkpoints_of_earlier_versions_load(tmp_path):
    model, optimizers = made()
    train(model, optimizers, range(1))
    save(tmp_path, {"model": model}, optimizers)
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    del index["shapes"]
    (tmp_path / "checkpoint.json").write_text(json.dumps(index))
    other, others = made()
    load(tmp_path, {"model": other}, others)
    assert torch.equal(other.top.weight, model.top.weight) and len(others["dense"].state) == 2


class WithExtra(torch.nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state_may_be_anything_plain(tmp_path):
    saved, fresh = WithExtra({"words": ["a"], "n": (1, 2)}), WithExtra({})
    save(tmp_path, {"m": saved})
    load(tmp_path, {"m": fresh})
    assert fresh.extra == saved.extra
    with pytest.raises(ValueError, match="must have the saved shape dict, got "):
        load(tmp_path, {"m": WithExtra(torch.ones(2))})


def test_files_that_are_no_checkpoints(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="`path` must be a folder"):
            save(path, {})
    missing = {"format": 1, "tensors": "no", "modules": {}, "optimizers": {}, "state": None}
    for text in ("[]", "3", "{}", '{"format": 1}', '{"tensors": 3}', json.dumps(missing)):
        (tmp_path / "checkpoint.json").write_text(text)
        with pytest.raises(ValueError, match="is damaged"):
            load(tmp_path)
    (tmp_path / "checkpoint.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is damaged"):
        load(tmp_path)
