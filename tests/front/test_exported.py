"""Exported programs: saved, loaded elsewhere, given other weights. The tables are parameters of their own names."""

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import (
    PEER,
    Bags,
    EmbeddingCollection,
    FusedOptimizer,
    JoinedBags,
    UltraMem,
    ValueTable,
    pack_tables,
)
from embedfuse.torch import feature_column as fc

DYNAMIC = {0: torch.export.Dim.DYNAMIC}
AUTO = {0: torch.export.Dim.AUTO}


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
@pytest.mark.parametrize("size", [None, DYNAMIC, AUTO], ids=["static", "dynamic", "auto"])
def test_bags_as_inputs_load_again(joined: bool, size: Any) -> None:
    features = {name: FeatureConfig(TableConfig(9, 4, name=name)) for name in ("a", "b")}
    collection = EmbeddingCollection(features)
    bags: Any = {name: Bags.from_lists([[1, 2], [3]]) for name in features}
    each = [size, size, None]
    shapes: Any = ([each] if joined else dict.fromkeys(features, each),) if size else None
    given = JoinedBags.join(bags) if joined else bags
    with torch.no_grad():
        program = torch.export.export(collection, (given,), dynamic_shapes=shapes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*pack_tables", UserWarning)
            loaded = reloaded(program)
            other: Any = {name: Bags.from_lists([[4], [], [5, 6]]) for name in features}
            for batch in (given, JoinedBags.join(other) if joined else other)[: 2 if size else 1]:
                for name, out in loaded(batch).items():
                    assert torch.equal(out, collection(batch)[name])


@pytest.mark.parametrize("dynamic", [False, True])
def test_bags_compile_as_ever_after_an_export(dynamic: bool) -> None:
    collection = EmbeddingCollection(FeatureConfig(TableConfig(9, 4)), "sgd")
    bags = Bags.from_lists([[1, 2], [3]])
    before = torch.utils._pytree.tree_leaves(bags)[:2]
    torch.export.export(collection, (bags,), dynamic_shapes=([DYNAMIC, DYNAMIC, None],) if dynamic else None)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(collection, backend=counter, fullgraph=True)
    with torch.no_grad():
        for other in (bags, Bags.from_lists([[1], [2, 3], [4, 5, 6]]), bags):
            torch.testing.assert_close(compiled(other), collection(other))
    # the first sees the sizes of the export
    assert counter.frame_count <= 2
    assert all(torch.equal(*pair) for pair in zip(before, (bags.ids, bags.offsets), strict=True))


def test_trees_of_bags_may_hold_anything() -> None:
    collection = EmbeddingCollection(FeatureConfig(TableConfig(9, 4)), update="autograd")
    bags = Bags(torch.zeros(3).long(), torch.tensor([0, 3]), torch.ones(3))
    shapes = torch.utils._pytree.tree_map(lambda tensor: tuple(tensor.shape), bags)
    assert shapes.ids == (3,)
    two = torch.utils._pytree.tree_map(lambda tensor: torch.stack([tensor, tensor]), bags)
    torch.testing.assert_close(torch.vmap(collection)(two), torch.stack([collection(bags)] * 2))


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_experts_and_blocks_are_exported(update: Any, grad: bool) -> None:
    tables = [ValueTable(16, 6, update=update, optimizer="sgd") for _ in range(2)]
    tables[0].row_mask = torch.arange(16) < 5
    blocks = ValueTable(4, 4, update=update, optimizer="sgd")
    for module in (
        PEER(6, 4, dim_key=4, heads=2, topk=3, down=tables[0], up=tables[1]),
        UltraMem(6, 4, dim_key=4, heads=2, topk=3, blocks=4, dim_value=4, values=blocks),
    ):
        module.eval()
        optimizer = FusedOptimizer(module)
        x = torch.randn(3, 6)
        with torch.set_grad_enabled(grad):
            program = torch.export.export(module, (x,), dynamic_shapes=(DYNAMIC,)).module()
        x = torch.randn(5, 6)
        torch.testing.assert_close(program(x), module(x))
        optimizer.zero_grad()


def test_exported_sequences_may_be_empty() -> None:
    collection = EmbeddingCollection(FeatureConfig(TableConfig(9, 4), max_sequence_length=2))
    with torch.no_grad():
        given = (Bags.from_lists([[1, 2], [3]]),)
        program = torch.export.export(collection, given, dynamic_shapes=([DYNAMIC, DYNAMIC, None],)).module()
        for bags in (Bags.from_lists([[5, 6, 7], [], [8]]), Bags.from_lists([[], []])):
            assert torch.equal(program(bags), collection(bags))


def test_an_input_layer_is_exported_with_any_batch_size() -> None:
    category = fc.categorical_column_with_identity("a", 10)
    layer = fc.InputLayer([fc.embedding_column(category, 4), fc.indicator_column(category)])
    given = {"a": torch.zeros(3, 2, dtype=torch.int64)}
    with torch.no_grad():
        program = torch.export.export(layer, (given,), dynamic_shapes=({"a": DYNAMIC},)).module()
        other = {"a": torch.randint(0, 10, (7, 2))}
        torch.testing.assert_close(program(other), layer(other))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    with torch.no_grad():
        for size in (3, 5, 8, 13):
            compiled({"a": torch.randint(0, 10, (size, 2))})
    assert counter.frame_count <= 2


def test_a_module_without_a_graph_is_refused() -> None:
    with pytest.raises(TypeError, match="`program` must be the module of an exported program, got Linear"):
        pack_tables(nn.Linear(2, 2))
