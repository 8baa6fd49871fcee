"""Checkpoints: bit-identical resumption, atomic replacement, refusals, and no code in the files."""

import json
import pickle

import pytest
import torch
from plain import batch_for, three_features

import embedfuse
from embedfuse.torch import FusedOptimizer, load, save


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
