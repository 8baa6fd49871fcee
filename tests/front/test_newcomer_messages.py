"""What newcomers are told: weights among the ids, collections of two modes, options that would do nothing."""

import sys

import pytest
import torch
from torch import nn

from embedfuse import SGD, FeatureConfig, TableConfig
from embedfuse.torch import (
    Bags,
    EmbeddingCollection,
    FusedOptimizer,
    SparseIds,
    fused_safe_embedding_lookup_sparse,
    plot_usage,
)
from embedfuse.torch.memory import PEER, MemoryPlus, ProductKeyMemory, UltraMem, ValueTable

INDICES = torch.tensor([[0, 0], [1, 0]])
SHAPE = (2, 3)


# --- sparse ids and their weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_are_no_sparse_ids(dtype):
    with pytest.raises(TypeError) as told:
        SparseIds(INDICES, torch.tensor([0.5, 2.0], dtype=dtype), SHAPE)
    text = str(told.value)
    assert text.startswith(f"`values` must be int32 or int64, got {dtype}: SparseIds holds ids")
    assert "weights go in a plain tensor" in text and "torch.sparse_coo_tensor" in text and "only ids" in text


def test_other_values_that_are_no_ids():
    with pytest.raises(TypeError, match=r"got torch\.int16: convert with `\.long\(\)`"):
        SparseIds(INDICES, torch.tensor([1, 2], dtype=torch.int16), SHAPE)
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor, got list"):
        SparseIds(INDICES, [0.5, 2.0], SHAPE)
    with pytest.raises(TypeError, match="SparseIds holds ids"):
        Bags.from_sparse(INDICES, torch.tensor([0.5, 2.0]), SHAPE)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_ids_are_no_weights():
    ids = SparseIds(INDICES, torch.tensor([1, 2]), SHAPE)
    table = torch.randn(4, 2)
    with pytest.raises(TypeError, match="got SparseIds: give a tensor of one weight for each id"):
        fused_safe_embedding_lookup_sparse(table, ids, ids)
    # both ways that are named work
    weights = torch.tensor([0.5, 2.0])
    plain = fused_safe_embedding_lookup_sparse(table, ids, weights, "sum")
    sparse = fused_safe_embedding_lookup_sparse(table, ids, torch.sparse_coo_tensor(INDICES.T, weights, SHAPE), "sum")
    torch.testing.assert_close(plain, table[[1, 2]] * weights[:, None])
    assert torch.equal(sparse, plain)


# --- collections of two modes --------------------------------------------------------------------------------------


class Both(nn.Module):
    def __init__(self, **options):
        super().__init__()
        table = TableConfig(5, 4, combiner="sum", name="words")
        self.embeddings = EmbeddingCollection({"words": FeatureConfig(table)}, SGD(0.1))
        self.blocks = nn.ModuleList([nn.Linear(4, 4), ProductKeyMemory(4, 4, heads=2, topk=2, **options)])


def test_an_ordinary_memory_beside_stepped_tables():
    model = Both()
    with pytest.raises(ValueError) as told:
        FusedOptimizer(model)
    text = str(told.value)
    assert "blocks.1.values.collection" in text and "FusedOptimizer(model.embeddings)" in text
    assert 'update="step"' in text and "ValueTable" in text
    # both ways out
    assert len(FusedOptimizer(model.embeddings).state_dict()["state"]) == 1
    both = Both(values=ValueTable(16, 4, update="step"))
    assert len(FusedOptimizer(both, default="sgd").state_dict()["state"]) == 2


def test_collections_of_two_modes_side_by_side():
    model = Both()
    pool = MemoryPlus(4, 4, topk=2)
    with pytest.raises(ValueError, match=r"at values\.collection, "):
        FusedOptimizer(model.embeddings, pool)
    with pytest.raises(ValueError, match=r"at modules\[1\], "):
        FusedOptimizer(model.embeddings, pool.values.collection)
    with pytest.raises(ValueError, match=r"at blocks\.1\.values\.collection, values\.collection, "):
        FusedOptimizer(model, pool)
    # without any other there is nothing to leave out
    with pytest.raises(ValueError, match="gives its tables ordinary gradients: use a torch optimizer"):
        FusedOptimizer(pool)


# --- options that would do nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", SGD(0.1)])
def test_an_ordinary_table_has_no_optimizer(optimizer):
    with pytest.raises(ValueError, match=r'`optimizer` must be None with update="autograd".*update="step"'):
        ValueTable(8, 4, optimizer=optimizer)
    for update in ("step", "backward"):
        assert ValueTable(8, 4, update=update, optimizer=optimizer).update == update


def test_a_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"`plot_usage` needs matplotlib.*pip install 'embedfuse\[cli\]'"):
        plot_usage({}, tmp_path / "use.png")
    assert not list(tmp_path.iterdir())


# --- what the documents say of memories under autocast --------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "options", "kept"),
    [
        (ProductKeyMemory, {}, True),
        (ProductKeyMemory, {"output_projection": True}, False),
        (PEER, {}, True),
        (MemoryPlus, {}, False),
        (UltraMem, {}, False),
    ],
)
def test_types_of_memories_under_autocast(layer, options, kept):
    memory = layer(8, 4, heads=2, topk=4, **options)
    with torch.autocast("cpu", torch.bfloat16):
        assert memory(torch.randn(3, 8)).dtype == (torch.float32 if kept else torch.bfloat16)
