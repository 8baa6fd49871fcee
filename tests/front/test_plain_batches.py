"""Nests of bags and of ids with one number of bags, which are put together without a look at each feature."""

import contextlib
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection

IDS, OFFSETS = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
KINDS = [
    (torch.float16, torch.float64), (torch.float16, torch.float16), (torch.bfloat16, None),
    (torch.float32, torch.float64), (torch.float8_e4m3fn, torch.float32), (torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.float16, torch.bfloat16),
]  # fmt: skip


def _collection(features: int = 2, **given: Any) -> EmbeddingCollection:
    torch.manual_seed(2)
    tables = [TableConfig(9, 4, combiner="mean", name=f"t{n}") for n in range(features)]
    return EmbeddingCollection([FeatureConfig(table) for table in tables], update="autograd", **given)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("lower", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [1, 2])
def test_weights_of_any_types(kinds: tuple[Any, Any], lower: torch.dtype | None, features: int) -> None:
    collection, numbers = _collection(features), torch.tensor([0.5, 2, 3])
    weights = [None if kind is None else numbers.to(kind) for kind in kinds[:features]]
    wanted = collection([Bags(IDS, OFFSETS, None if own is None else own.to(torch.float32)) for own in weights])
    with torch.autocast("cpu", dtype=lower) if lower else contextlib.nullcontext():
        found = collection([Bags(IDS, OFFSETS, own) for own in weights])
    assert all(map(torch.equal, found, wanted))


def test_gradients_of_weights_have_their_types() -> None:
    weights = [torch.tensor([0.5, 2, 3], dtype=kind, requires_grad=True) for kind in (torch.float16, torch.float64)]
    out = _collection()([Bags(IDS, OFFSETS, own) for own in weights])
    sum(one.square().sum() for one in out).backward()
    plain = [own.detach().float().requires_grad_() for own in weights]
    other = _collection()([Bags(IDS, OFFSETS, own) for own in plain])
    sum(one.square().sum() for one in other).backward()
    for own, like in zip(weights, plain, strict=True):
        assert own.grad is not None and like.grad is not None and own.grad.dtype == own.dtype
        torch.testing.assert_close(own.grad.float(), like.grad, rtol=1e-3, atol=1e-4)


def test_what_is_no_vector_of_ids() -> None:
    scalars = torch.nested.nested_tensor([torch.tensor(1), torch.tensor(2)])
    with pytest.raises(ValueError, match=r"must be \[B, \*\], of layout torch.jagged"):
        _collection()([scalars, torch.tensor([1, 2])])
    with pytest.raises(TypeError, match="must be int32 or int64"):
        _collection()([torch.tensor([1.0, 2]), torch.tensor([1, 2])])


@pytest.mark.parametrize("batches", [([], [1]), ([1], []), ([], []), ([], [1, 1, 3], [])])
def test_sparse_gradients_of_several_batches(batches: tuple[list[int], ...]) -> None:
    collection = _collection(1, grad="sparse")
    judge = torch.nn.EmbeddingBag(9, 4, sparse=True, include_last_offset=True)
    for ids in batches:
        bags = Bags(torch.tensor(ids, dtype=torch.int64), torch.tensor([0, len(ids)]))
        collection([bags])[0].sum().backward()
        judge(bags.ids, bags.offsets).sum().backward()
    table = collection.tables["t0"]
    assert table.grad is not None and judge.weight.grad is not None
    torch.testing.assert_close(table.grad.to_dense(), judge.weight.grad.to_dense())


class _Wrapped(torch.Tensor):
    """A tensor that has another one and no memory of its own."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _pytree.tree_map_only(cls, lambda one: one.inside, (args, kwargs or {}))
        return _pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


@pytest.mark.parametrize("place", ["ids", "offsets", "weights"])
@pytest.mark.parametrize("features", [1, 2])
@pytest.mark.parametrize("grad", [True, False])
def test_tensors_without_memory_of_their_own(place: str, features: int, grad: bool) -> None:
    collection = _collection(features)
    bags = [Bags(IDS, OFFSETS, torch.tensor([0.5, 2, 3])) for _ in range(features)]
    with torch.set_grad_enabled(grad):
        wanted = collection(bags)
        setattr(bags[0], place, _Wrapped(getattr(bags[0], place)))
        found = collection(bags)
    assert all(torch.equal(one.inside, other) for one, other in zip(found, wanted, strict=True))
