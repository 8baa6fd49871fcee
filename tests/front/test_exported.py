"""Exported programs: saved, loaded elsewhere, given other weights. The tables are parameters of their own names."""

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, JoinedBags, pack_tables

DYNAMIC = {0: torch.export.Dim.DYNAMIC}


class Model(nn.Module):
    def __init__(self, update: Any) -> None:
        super().__init__()
        features = {
            "a": FeatureConfig(TableConfig(10, 4, name="ta", combiner="mean")),
            "b": FeatureConfig(TableConfig(7, 3, name="tb")),
        }
        self.embeddings = EmbeddingCollection(features, None if update == "autograd" else "sgd", update=update)
        self.dense = nn.Linear(7, 1)

    def forward(self, ids: Any, offsets: Any, more: Any) -> Any:
        found = self.embeddings({"a": Bags(ids, offsets), "b": more})
        return self.dense(torch.cat([found["a"], found["b"]], 1))


def batch(bags: int) -> tuple[Any, ...]:
    lengths = torch.randint(1, 4, (bags,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, 10, (int(offsets[-1]),)), offsets, torch.randint(0, 7, (bags,))


def reloaded(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("update", ["step", "backward", "autograd"])
def test_a_loaded_program_takes_other_weights(update: Any, grad: bool) -> None:
    model = Model(update).eval()
    optimizer = FusedOptimizer(model) if update != "autograd" else None
    with torch.set_grad_enabled(grad):
        program = torch.export.export(model, batch(3), dynamic_shapes=(DYNAMIC, DYNAMIC, DYNAMIC))
    assert not any("lookup_for_update" in str(node.target) for node in program.graph.nodes)
    loaded = reloaded(program)
    with torch.no_grad():
        torch.testing.assert_close(loaded(*(one := batch(2))), model(*one))
        for parameter in loaded.parameters():
            # what a move to a device does
            parameter.data = parameter.data.clone()
        with pytest.warns(UserWarning, match="pack_tables"):
            torch.testing.assert_close(loaded(*(one := batch(5))), model(*one))
        assert pack_tables(loaded) is loaded
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(loaded(*(one := batch(4))), model(*one))
        other = Model(update).eval()
        assert loaded.load_state_dict(other.state_dict(), strict=False).missing_keys == []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(loaded(*(one := batch(6))), other(*one))
    assert optimizer is None or not optimizer._waiting()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_bags_as_inputs_load_again(joined: bool, dynamic: bool) -> None:
    features = {name: FeatureConfig(TableConfig(9, 4, name=name)) for name in ("a", "b")}
    collection = EmbeddingCollection(features)
    bags: Any = {name: Bags.from_lists([[1, 2], [3]]) for name in features}
    each = [DYNAMIC, DYNAMIC, None]
    shapes: Any = ([each] if joined else dict.fromkeys(features, each),) if dynamic else None
    given = JoinedBags.join(bags) if joined else bags
    with torch.no_grad():
        program = torch.export.export(collection, (given,), dynamic_shapes=shapes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*pack_tables", UserWarning)
            loaded = reloaded(program)
            for name, out in loaded(given).items():
                assert torch.equal(out, collection(given)[name])


def test_a_module_without_a_graph_is_refused() -> None:
    with pytest.raises(TypeError, match="`program` must be the module of an exported program, got Linear"):
        pack_tables(nn.Linear(2, 2))
