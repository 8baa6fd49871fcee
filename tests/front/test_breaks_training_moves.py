"""Tables that move, are converted, replaced or made in odd places, and train all the same."""

import copy
import io
import pickle

import pytest
import torch
from test_breaks_training import column, made, one, rows

from embedfuse import SGD, Adagrad, FeatureConfig, TableConfig
from embedfuse.torch import EmbeddingCollection, FusedOptimizer

MOVES = {
    "to": lambda c: c.to("cpu"),
    "share_memory": lambda c: c.share_memory(),
    "data": lambda c: setattr(c.tables["t"], "data", c.tables["t"].data.clone()),
    "assign": lambda c: c.load_state_dict({k: v.clone() for k, v in c.state_dict().items()}, assign=True),
    "holder": lambda c: c.tables.double().float(),
    "lookup after": lambda c: (setattr(c.tables["t"], "data", c.tables["t"].data.clone()), c({"t": one})),
    "copy": copy.copy,
}


@pytest.mark.parametrize("when", ["after backward", "before backward"])
@pytest.mark.parametrize("move", MOVES)
def test_waiting_gradients_survive(move, when):
    collection, optimizer = made()
    out = collection({"t": one})["t"].sum()
    if when == "after backward":
        out.backward()
    MOVES[move](collection)
    if when == "before backward":
        out.backward()
    optimizer.step()
    assert column(collection) == rows(r1=-1)
    assert collection({"t": one})["t"][0, 0].item() == -1
    # the optimizer knows the tables there are now
    assert optimizer.param_groups[0]["params"][0] is collection.tables["t"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_waiting_gradients_follow_another_type(dtype):
    collection, optimizer = made(Adagrad(1.0, initial_accumulator_value=1.0))
    # a weighted mean has scale and weights to convert
    collection({"t": one})["t"].sum().backward()
    collection.to(dtype)
    collection({"t": one})["t"].sum().backward()
    optimizer.step()
    torch.testing.assert_close(collection.tables["t"][1, 0].item(), -2 / 5**0.5, rtol=1e-2, atol=1e-2)
    state = optimizer.state[collection.tables["t"]]["accumulators"]
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert state[1, 0].item() == 5


def test_state_of_float64_tables_follows_to_half():
    table = TableConfig(10, 2, combiner="mean", initializer=0.0, dtype="float64", name="t")
    collection = EmbeddingCollection({"t": FeatureConfig(table)}, Adagrad(1.0))
    optimizer = FusedOptimizer(collection)
    collection({"t": one})["t"].sum().backward()
    collection.half()
    assert next(iter(optimizer.state_dict()["state"]["t"].values())).dtype == torch.float32
    optimizer.step()
    assert collection.tables["t"][1, 0].item() < -0.5


def test_values_given_by_data_survive_a_move():
    collection, _ = made()
    collection.tables["t"].data = torch.full((10, 2), 3.0)
    collection.to("cpu")
    assert column(collection) == [3.0] * 10


def test_the_user_s_tensor_is_left_alone():
    collection, optimizer = made()
    theirs = torch.zeros(10, 2)
    collection.tables["t"].data = theirs
    collection({"t": one})["t"].sum().backward()
    optimizer.step()
    assert not theirs.any() and column(collection) == rows(r1=-1)


@pytest.mark.parametrize("move", ["data", "assign"])
def test_a_compiled_collection_follows(move):
    torch._dynamo.reset()
    collection, optimizer = made()
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    compiled({"t": one})["t"].sum().backward()
    optimizer.step()
    with torch.no_grad():
        compiled({"t": one})
    fives = torch.full((10, 2), 5.0)
    if move == "data":
        collection.tables["t"].data = fives
    else:
        collection.load_state_dict({"tables.t": fives}, assign=True)
    with torch.no_grad():
        assert compiled({"t": one})["t"].tolist() == [[5, 5]]
    out = compiled({"t": one})["t"]
    assert out.tolist() == [[5, 5]]
    out.sum().backward()
    optimizer.step()
    assert column(collection) == [5.0, 4.0, *[5.0] * 8]
    if move == "data":
        # once more, with the graph that knows how to train
        collection.tables["t"].data = torch.zeros(10, 2)
        out = compiled({"t": one})["t"]
        assert out.tolist() == [[0, 0]]
        out.sum().backward()
        optimizer.step()
        assert column(collection) == rows(r1=-1)


def test_an_exported_program_keeps_its_tables():
    collection, optimizer = made()
    with torch.no_grad():
        program = torch.export.export(collection, ({"t": one},)).module()
    collection.tables["t"].data = torch.ones(10, 2)
    collection({"t": one})["t"].sum().backward()
    optimizer.step()
    assert program({"t": one})["t"].tolist() == [[0, 0]]


def in_inference_mode(case):
    buffer = io.BytesIO()
    collection, optimizer = made()
    if case == "pickle":
        torch.save(collection, buffer)
        buffer.seek(0)
    with torch.inference_mode():
        if case == "made":
            collection, optimizer = made()
        elif case == "moved":
            collection.double()
        elif case == "pickle":
            collection = torch.load(buffer, weights_only=False)
        elif case == "deepcopy":
            collection = copy.deepcopy(collection)
        elif case == "data":
            collection.tables["t"].data = torch.zeros(10, 2)
            collection({"t": one})
        elif case == "step":
            pass
    if case in ("pickle", "deepcopy"):
        optimizer = FusedOptimizer(collection)
    return collection, optimizer


@pytest.mark.parametrize("case", ["made", "moved", "pickle", "deepcopy", "data"])
def test_what_happened_in_inference_mode_can_be_trained(case):
    collection, optimizer = in_inference_mode(case)
    for step in range(2):
        collection({"t": one})["t"].sum().backward()
        with torch.inference_mode(step == 1):
            optimizer.step()
    collection({"t": one})["t"].sum().backward()
    optimizer.step()
    assert column(collection) == rows(r1=-3)


def test_built_on_meta_and_filled_later():
    table = TableConfig(10, 2, combiner="sum", name="t")
    collection = EmbeddingCollection({"t": FeatureConfig(table)}, Adagrad(1.0), device="meta")
    assert collection({"t": one.to("meta")})["t"].shape == (1, 2)
    early = FusedOptimizer(collection)
    collection.to_empty(device="cpu")
    collection.reset_parameters()
    values = collection.tables["t"].detach().clone()
    assert values.any()
    collection({"t": one})["t"].sum().backward()
    early.step()
    changed = collection.tables["t"].detach() != values
    assert changed[1].all() and changed.sum() == 2
    assert early.state[collection.tables["t"]]["accumulators"][1, 0].item() == pytest.approx(1.1)
    materialised = EmbeddingCollection({"t": FeatureConfig(table)}, device="meta")
    materialised.load_state_dict(collection.state_dict(), assign=True)
    assert torch.equal(materialised({"t": one})["t"], collection({"t": one})["t"])


def test_deepcopy_of_model_and_optimizer():
    collection, optimizer = made(Adagrad(1.0))
    model = torch.nn.ModuleDict({"embeddings": collection})
    optimizer = FusedOptimizer(model)
    collection({"t": one})["t"].sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    twin, optimizer_twin = copy.deepcopy((model, optimizer))
    alone = copy.deepcopy(optimizer)
    assert optimizer_twin.param_groups[0]["params"][0] is twin["embeddings"].tables["t"]
    for embeddings, own in ((collection, optimizer), (twin["embeddings"], optimizer_twin)):
        embeddings({"t": one})["t"].sum().backward()
        own.step()
    assert column(twin["embeddings"]) == column(collection)
    assert alone.param_groups[0]["lr"] == 0.5
    assert alone.param_groups[0]["params"][0] is not collection.tables["t"]


def test_an_optimizer_is_not_pickled():
    _, optimizer = made()
    for act in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="state_dict"):
            act(optimizer)


def test_a_copy_of_the_collection_has_no_gradients_of_the_first():
    collection, optimizer = made()
    collection({"t": one})["t"].sum().backward()
    twin = copy.deepcopy(collection)
    FusedOptimizer(twin).step()
    assert column(twin) == rows()
    optimizer.step()
    assert column(collection) == rows(r1=-1) and column(twin) == rows()
    assert twin.optimizer == SGD(1.0)
