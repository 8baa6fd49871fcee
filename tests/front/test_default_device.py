"""`torch.set_default_device` says where the user's new tensors go, and nothing of where ours do."""

import contextlib
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
