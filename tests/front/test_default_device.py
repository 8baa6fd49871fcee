"""torch's default device and type are for the user's new tensors, and say nothing of ours."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from embedfuse import FTRL, SGD, Adagrad, Adam, FeatureConfig, RowWiseAdagrad, TableConfig
from embedfuse.torch import Bags, EmbeddingBag, EmbeddingCollection, FusedOptimizer, SparseIds, feature_column
from embedfuse.torch.backends import use_backend, why_not
from embedfuse.torch.gather import product_topk

ON_GPU = torch.cuda.is_available()
# nothing can be read from "meta", nor by the CPU from "cuda"
WHERE = [
    ("cpu", "meta"),
    *([pytest.param(*both, marks=pytest.mark.gpu) for both in (("cuda", "cuda"), ("cpu", "cuda"))] if ON_GPU else []),
]


def _same(work: Callable[[str], list[Any]], device: str, default: str) -> None:
    found = []
    for context in (contextlib.nullcontext(), torch.device(default)):
        torch.manual_seed(1)
        with context:
            found.append(work(device))
    assert len(found[0]) == len(found[1]) > 0
    for wanted, one in zip(*found, strict=True):
        assert one.device == wanted.device and torch.equal(one, wanted)


def _on_cpu(values: Any, **given: Any) -> torch.Tensor:
    return torch.tensor(values, device="cpu", **given)


@pytest.mark.parametrize(("device", "default"), WHERE)
@pytest.mark.parametrize("chosen", ["eager", "cpu", "triton"])
@pytest.mark.parametrize(("optimizer", "update", "grad"), [
    (SGD(0.1), "step", "dense"), (Adagrad(0.1), "backward", "dense"), (Adam(0.1), "step", "dense"),
    (FTRL(0.1), "step", "dense"), (RowWiseAdagrad(0.1), "step", "dense"), (None, "autograd", "dense"),
    (None, "autograd", "sparse"),
])  # fmt: skip
def test_collections(device: str, default: str, chosen: str, optimizer: Any, update: Any, grad: Any) -> None:
    serve = {"cuda": ("eager", "triton"), "cpu": ("eager", "cpu") if ON_GPU else ("eager", "cpu", "triton")}
    reason = "another device's backend" if chosen not in serve[device] else why_not(chosen, torch.device(device))
    if reason is not None:
        pytest.skip(reason)

    def trained(device: str) -> list[Any]:
        tables = [TableConfig(9, dim, combiner="mean", max_norm=norm) for dim, norm in ((4, None), (3, 0.5))]
        features = {
            "a": FeatureConfig(tables[0]),
            "b": FeatureConfig(tables[1], default_id=2),
            "c": FeatureConfig(tables[1]),
        }
        collection = EmbeddingCollection(features, optimizer, update, device, grad=grad)
        stepper: Any = None if update == "autograd" else FusedOptimizer(collection)
        found: list[Any] = []
        for ids, offsets in (([1, 2, 2, 8, 0, 3], [0, 2, 2, 6]), ([], [0, 0, 0, 0])):
            weights = torch.linspace(0.5, 1, len(ids), device="cpu").requires_grad_()
            bags = Bags(_on_cpu(ids, dtype=torch.int64), _on_cpu(offsets), weights).to(device)
            out = collection({"a": bags, "b": bags, "c": _on_cpu([3, 0, 3]).to(device)})
            (out["a"].square().sum() + out["b"].sum() + out["c"].sum()).backward()
            found += [out["a"].detach(), weights.grad]
            if stepper is not None:
                found.append(stepper.clip_grad_norm_(1.0))
                stepper.step()
        return found + [
            table.detach() if table.grad is None else table.grad.to_dense() for table in collection.parameters()
        ]

    with use_backend(chosen):
        _same(trained, device, default)


@pytest.mark.parametrize(("device", "default"), WHERE)
def test_what_else_there_is(device: str, default: str) -> None:
    def looked_up(device: str) -> list[Any]:
        bag = EmbeddingBag(9, 4, mode="max", device=device)
        sparse = SparseIds(_on_cpu([[0, 0], [1, 1]]).to(device), _on_cpu([3, 1]).to(device), (2, 2))
        scores = torch.randn(3, 8, device="cpu").to(device)
        values, places = product_topk(scores, scores.flip(1), 4)
        return [bag(sparse.to_bags().ids, sparse.to_bags().offsets[:-1]).detach(), values, places]

    _same(looked_up, device, default)


@pytest.mark.parametrize(("device", "default"), WHERE)
def test_columns(device: str, default: str) -> None:
    def given(device: str) -> list[Any]:
        columns = [
            feature_column.numeric_column("n"),
            feature_column.embedding_column(feature_column.categorical_column_with_identity("i", 9), 3),
            feature_column.embedding_column(feature_column.categorical_column_with_vocabulary_list("w", ["x", "y"]), 2),
            feature_column.embedding_column(feature_column.categorical_column_with_vocabulary_list("v", [5, 7]), 2),
        ]
        layer = feature_column.InputLayer(columns, "sgd", device=device)
        lists = {"n": [1.0, 2.0], "i": [[1, 2], []], "w": [["x"], ["y", "x"]], "v": [[5], [7, 8]]}
        arrays = {
            "n": np.array([1.0, 2.0]),
            "i": np.array([3, 4]),
            "w": np.array(["x", "z"]),
            "v": np.array([[5], [7]]),
        }
        return [layer(lists).detach(), layer(arrays).detach()]

    _same(given, device, default)


@pytest.mark.parametrize(("device", "default"), WHERE)
def test_state_and_values_that_are_given(device: str, default: str) -> None:
    def loaded(device: str) -> list[Any]:
        given = {"a": [[0.1, 0.2], [0.3, 0.4]], "b": torch.ones(2, 2, device="cpu"), "c": np.full((2, 2), 0.7)}
        collection = EmbeddingCollection(
            {name: FeatureConfig(TableConfig(2, 2, initializer=value)) for name, value in given.items()},
            Adagrad(0.1), device=device,
        )  # fmt: skip
        bags = Bags.from_lists([[0, 1], [1]], [[0.5, 2.0], [1.0]], device=device)
        out, found = collection(dict.fromkeys(given, bags)), list(collection.parameters())
        optimizer = FusedOptimizer(collection)
        sum(one.sum() for one in out.values()).backward()
        optimizer.step()
        state, other = copy.deepcopy(optimizer).state_dict(), FusedOptimizer(copy.deepcopy(collection))
        as_lists = {
            name: {slot: value.tolist() for slot, value in slots.items()} for name, slots in state["state"].items()
        }
        for one in (state, {**state, "state": as_lists}):
            other.load_state_dict(one)
            found += [value for slots in other.state_dict()["state"].values() for value in slots.values()]
        return [*found, bags.ids, bags.offsets, bags.weights]

    _same(loaded, device, default)


@pytest.mark.parametrize(("device", "default"), WHERE)
def test_a_layer_moves_and_fills_in(device: str, default: str) -> None:
    def given(device: str) -> list[Any]:
        numbers = feature_column.numeric_column("m", default_value=1001.0)
        layer = feature_column.InputLayer([feature_column.bucketized_column(numbers, [1000.5, 1001.5])], device=device)
        return [layer.to(device)({"m": [1001.0, None]}).detach()]

    _same(given, device, default)


TYPES = [torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("default", TYPES)
@pytest.mark.parametrize("chosen", ["eager", "cpu", *([] if ON_GPU else ["triton"])])
def test_the_default_type_scales_no_gradient(default: torch.dtype, chosen: str) -> None:
    if why_not(chosen, torch.device("cpu")) is not None:
        pytest.skip(str(why_not(chosen, torch.device("cpu"))))

    def trained() -> list[Any]:
        torch.manual_seed(1)
        table = TableConfig(9, 4, initializer=[[0.1 * n] * 4 for n in range(9)])
        collection = EmbeddingCollection({"a": FeatureConfig(table)}, SGD(1.0))
        optimizer, found = FusedOptimizer(collection), []
        for scaled, clipped in ((False, True), (True, False), (True, True)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
            out = collection({"a": Bags.from_lists([[1, 2], [2]])})["a"]
            loss = (out * torch.linspace(0.3, 1.7, 4, dtype=torch.float32)).sum()
            (scaler.scale(loss) if scaled else loss).backward()
            if clipped:
                if scaled:
                    scaler.unscale_(optimizer)
                found.append(optimizer.clip_grad_norm_(0.37))
            if scaled:
                scaler.step(optimizer)
            else:
                optimizer.step()
            found.append(collection.tables["table_0"].detach().clone())
        return found

    wanted, before = None, torch.get_default_dtype()
    with use_backend(chosen):
        wanted = trained()
        torch.set_default_dtype(default)
        try:
            found = trained()
        finally:
            torch.set_default_dtype(before)
    assert all(map(torch.equal, found, wanted))
