"""Features of one id a bag: a mean of one row is that row, so nothing is divided, nor kept to divide gradients by."""

from typing import Any

import pytest
import torch
from plain import Plain

import embedfuse
from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer
from embedfuse.torch.backends import load

COMBINERS = ("mean", "sqrtn", "sum")


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each lookup, whether sums are divided."""
    found: list[bool] = []
    backend: Any = load("cpu")
    inner = type(backend).pooled_lookup

    def lookup(self: Any, table: Any, features: Any, csr: Any, width: int, normalised: bool, policy: Any) -> Any:
        out, scale = inner(self, table, features, csr, width, normalised, policy)
        assert (scale.shape[0] > 0) == normalised
        found.append(normalised)
        return out, scale

    monkeypatch.setattr(type(backend), "pooled_lookup", lookup)
    return found


def _collection(seed: int = 1, **given: Any) -> EmbeddingCollection:
    torch.manual_seed(seed)
    options = {key: given.pop(key) for key in ("max_norm", "dtype") if key in given}
    own = {key: given.pop(key) for key in ("default_id",) if key in given}
    features = {
        combiner: FeatureConfig(TableConfig(11, dim, name=f"t{dim}", **options), combiner=combiner, **own)
        for dim, combiner in zip((3, 4, 5), COMBINERS, strict=True)
    }
    return EmbeddingCollection(features, **given)


def _ids(bags: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {combiner: torch.randint(-2, 11, (bags,), generator=generator) for combiner in COMBINERS}


def _on(place: str, batch: dict[str, Any]) -> dict[str, Any]:
    return {name: own.to(place) for name, own in batch.items()}


def _as_bags(ids: dict[str, torch.Tensor]) -> dict[str, Bags]:
    return {name: Bags(own, torch.arange(len(own) + 1)) for name, own in ids.items()}


def _steps(collection: EmbeddingCollection, batches: list[dict[str, Any]], at_once: int = 1) -> list[torch.Tensor]:
    """Outputs, and tables after steps, each of some batches."""
    optimizer = FusedOptimizer(collection)
    found = []
    for number, batch in enumerate(batches, 1):
        out = torch.cat([piece.flatten(1) for piece in collection(batch).values()], 1)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float32)
        out.backward(gradient.to(out))
        found.append(out.detach())
        if number % at_once == 0:
            optimizer.step()
    return found + [table.detach().clone() for table in collection.tables.values()]


@pytest.mark.parametrize("given", [
    {}, {"update": "backward"}, {"default_id": 3}, {"max_norm": 0.2}, {"dtype": "bfloat16"}, {"out_of_range": "drop"},
])  # fmt: skip
def test_the_same_as_bags(given: dict[str, Any], place: str) -> None:
    batches = [_ids(6, seed) for seed in range(4)]
    if given.get("out_of_range") == "drop":
        batches[1]["mean"][2] = 99
    options = {"optimizer": embedfuse.Adagrad(0.1), "device": place, **given}
    ours = _steps(_collection(**options), [_on(place, batch) for batch in batches])
    bags = _steps(_collection(**options), [_on(place, _as_bags(batch)) for batch in batches])
    for found, wanted in zip(ours, bags, strict=True):
        assert torch.equal(found, wanted)


def test_the_same_as_plain_torch(divided: list[bool]) -> None:
    collection = _collection(update="autograd")
    judge, ids = Plain(collection), _ids(7, 0)
    out, wanted = collection(ids), judge(_as_bags(ids))
    generator = torch.Generator().manual_seed(5)
    for name, own in out.items():
        gradient = torch.randn(own.shape, generator=generator)
        torch.testing.assert_close(own, wanted[name])
        own.backward(gradient, retain_graph=True)
        wanted[name].backward(gradient)
    for name, table in collection.tables.items():
        torch.testing.assert_close(table.grad, judge.tables[name].grad)
    assert divided == [False]


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("at_once", [1, 2])
def test_between_batches_of_bags(update: Any, at_once: int, place: str) -> None:
    if update == "backward" and at_once > 1:
        pytest.skip("it steps after each")
    batches: list[dict[str, Any]] = []
    plain: list[dict[str, Any]] = []
    for seed in range(9):
        ids = _ids(5, seed)
        bags = _as_bags(ids)
        longer = {name: Bags(own, torch.tensor([0, 2, 2, 3, 5, 5])) for name, own in ids.items()}
        batches.append(_on(place, [ids, bags, longer][seed * 2 % 3]))
        plain.append(_on(place, [bags, bags, longer][seed * 2 % 3]))
    options = {"optimizer": embedfuse.Adam(0.1), "update": update, "device": place}
    ours = _steps(_collection(**options), batches, at_once)
    theirs = _steps(_collection(**options), plain, at_once)
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_what_is_divided(divided: list[bool]) -> None:
    ids = _ids(4, 0)
    matrix = {name: own.view(2, 2) for name, own in ids.items()}
    collection = _collection(optimizer="sgd")
    for batch in (ids, matrix, _as_bags(ids), {**ids, "sum": _as_bags(ids)["sum"]}, matrix):
        collection(batch)
    assert divided == [False, False, True, True, False]
    divided.clear()
    collection({"mean": ids["mean"], "sqrtn": ids["sqrtn"][:3], "sum": ids["sum"]})
    assert divided == [False]
    # plans of sums alone are shared
    table = TableConfig(11, 4, combiner="sum", name="t")
    sums = EmbeddingCollection({"f": FeatureConfig(table), "g": FeatureConfig(table)}, "sgd")
    before = len(sums._launches)
    sums({"f": ids["sum"], "g": ids["sum"]})
    assert len(sums._launches) == before


def test_bad_ids_are_named() -> None:
    ids = _ids(4, 0)
    ids["sqrtn"][2] = 11
    with pytest.raises(IndexError, match=r"'sqrtn'.*got 11 in bag 2, at position 2"):
        _collection(optimizer="sgd")(ids)


def test_weights_of_other_features() -> None:
    ids = _ids(4, 0)
    weighted = Bags(ids["mean"], torch.tensor([0, 1, 1, 3, 4]), torch.tensor([0.5, 2, 3, 0.1]))
    collection = _collection(optimizer="sgd")
    found = collection({**ids, "mean": weighted})
    wanted = collection({**_as_bags(ids), "mean": weighted})
    assert all(torch.equal(found[name], wanted[name]) for name in COMBINERS)


def test_compiled(divided: list[bool]) -> None:
    collection = _collection(optimizer="sgd")
    ids = _ids(6, 0)
    out = torch.compile(lambda batch: collection(batch), backend="aot_eager", fullgraph=True)(ids)
    assert divided == [False]
    for name, wanted in collection(_as_bags(ids)).items():
        assert torch.equal(out[name], wanted)
