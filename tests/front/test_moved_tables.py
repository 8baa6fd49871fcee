"""What is kept from step to step must not outlive the tables that it was of."""

import gc

import pytest
import torch
from test_breaks_training import made, one
from torch.multiprocessing.reductions import StorageWeakRef

from embedfuse import SGD, FeatureConfig, TableConfig
from embedfuse.torch import EmbeddingCollection, FusedOptimizer, native, tables


@pytest.fixture(params=["exchange", "python"])
def reading(request, monkeypatch):
    """Where tables lie is asked by C++, or by Python, as with PyTorch before 2.10."""
    if request.param == "python":
        monkeypatch.setattr(tables, "EXCHANGE", None)
    elif native.EXCHANGE is None or native.NATIVE is None:
        pytest.skip("no exchange")


def step(collection, optimizer):
    collection({"t": one})["t"].sum().backward()
    optimizer.step()


@pytest.mark.parametrize("move", [lambda c: c.to(torch.bfloat16), lambda c: c.double()])
def test_the_memory_of_before_is_free_at_once(move):
    """It may be most of a GPU, and nobody may step again."""
    collection, optimizer = made()
    step(collection, optimizer)
    left = StorageWeakRef(collection._groups[0].arena.buffer.untyped_storage())
    move(collection)
    gc.collect()
    assert left.expired()


def test_tables_in_shared_memory_stay_there(reading):
    collection, optimizer = made()
    step(collection, optimizer)
    for table in collection.parameters():
        table.share_memory_()
    before = collection.tables["t"].data_ptr()
    step(collection, optimizer)
    assert collection.tables["t"].is_shared() and collection.tables["t"].data_ptr() == before


@pytest.mark.parametrize(
    "put", [torch.clone, lambda t: t.t().contiguous().t(), lambda t: t[[1, 0, *range(2, len(t))]], lambda t: t * 2]
)
def test_tables_that_were_put_elsewhere_are_found(reading, put):
    collection, optimizer = made()
    step(collection, optimizer)
    table = collection.tables["t"]
    table.data = put(table.data)
    wanted = table.data.clone()
    with torch.no_grad():
        assert torch.equal(collection({"t": one})["t"], wanted[one])
    step(collection, optimizer)
    assert table.data_ptr() == collection._groups[0].arena.buffer.data_ptr()
    assert not torch.equal(table.data, wanted)


def test_rows_of_another_order_in_the_same_memory_are_noticed(reading):
    features = [FeatureConfig(TableConfig(4, 4, name="a")), FeatureConfig(TableConfig(4, 4, name="b"))]
    collection = EmbeddingCollection(features, optimizer=SGD(1.0))
    arena = collection._groups[0].arena
    assert arena.is_whole()
    a, b = collection.tables["a"], collection.tables["b"]
    for change in (lambda: setattr(a, "data", a.data.t()), lambda: torch.utils.swap_tensors(a, b)):
        change()
        assert not arena.is_whole()
        arena.gather()
        assert arena.is_whole()


def test_a_table_with_a_counter_of_its_own_refuses_a_stale_backward():
    collection, optimizer = made()
    step(collection, optimizer)
    table = collection.tables["t"]
    # the same memory, but other versions
    torch.utils.swap_tensors(table, torch.nn.Parameter(table.data))
    stale = (torch.ones(1, table.shape[1], requires_grad=True) @ table.t()).sum()
    step(collection, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_one_collection_that_cannot_be_followed_leaves_the_others_to_be():
    configs = [TableConfig(10, 4, name=name) for name in "ab"]
    first, second = (EmbeddingCollection([FeatureConfig(config)], optimizer="adagrad") for config in configs)
    optimizer = FusedOptimizer(first, second)
    first.double()
    kept = second.tables["b"].data
    second.tables["b"].data = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="must keep its shape"):
        optimizer.step()
    second.tables["b"].data = kept
    optimizer.step()
    slots = optimizer.state[first.tables["a"]]
    assert {slots[name].dtype for name in slots if name != "step"} == {torch.float64}


def test_steps_of_one_kind_share_an_update_until_tables_move():
    collection, optimizer = made()
    state, seen = optimizer._states[0][0], []
    for move in (None, None, lambda: collection.double()):
        if move is not None:
            move()
            assert state._updates == []
        step(collection, optimizer)
        seen.append(state._updates[0])
    assert seen[0] is seen[1] is not seen[2]
    assert seen[2].table is collection._groups[0].arena.buffer and seen[2].slots is state.slots
