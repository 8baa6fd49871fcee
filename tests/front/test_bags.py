"""`Bags` and `SparseIds`: every constructor, and what they refuse."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embedfuse.torch import Bags, SparseIds

LISTS = [[3, 1], [], [2, 2, 5], [0]]


def same(bags, lists=LISTS):
    assert bags.to_lists() == lists
    assert len(bags) == len(lists) and bags.offsets.dtype == torch.int64


@given(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=8))
def test_lists_there_and_back(lists):
    same(Bags.from_lists(lists), lists)
    lengths = torch.tensor([len(bag) for bag in lists], dtype=torch.int32)
    ids = torch.tensor([i for bag in lists for i in bag], dtype=torch.int32)
    same(Bags.from_lengths(ids, lengths), lists)


def test_padded():
    padded = torch.tensor([[3, -1, 1], [-1, -1, -1], [2, 2, 5], [-1, -1, 0]])
    same(Bags.from_padded(padded))
    weights = torch.arange(12.0).view(4, 3)
    assert Bags.from_padded(padded, weights=weights).weights.tolist() == [0, 2, 6, 7, 8, 11]
    same(Bags.from_padded(torch.tensor([[1, 2], [3, 4]]), padding_id=None), [[1, 2], [3, 4]])
    same(Bags.from_padded(torch.empty(2, 0, dtype=torch.int64)), [[], []])


def test_sparse_rows_in_any_order():
    indices = torch.tensor([[2, 0], [0, 0], [2, 1], [0, 3], [3, 0], [2, 2]])
    values = torch.tensor([2, 3, 2, 1, 0, 5])
    weights = torch.tensor([1.0, 2, 3, 4, 5, 6])
    bags = Bags.from_sparse(indices, values, (4, 4), weights)
    same(bags)
    assert bags.weights.tolist() == [2, 4, 1, 3, 6, 5]
    deep = SparseIds(torch.tensor([[1, 1, 0], [0, 0, 2]]), torch.tensor([7, 8]), torch.tensor([2, 2, 3])).to_bags()
    same(deep, [[8], [], [], [7]])
    same(Bags.from_sparse(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.int64), (2, 5)), [[], []])


def test_nested_arrow_and_keyed_jagged():
    parts = [torch.tensor(bag, dtype=torch.int64) for bag in LISTS]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    same(Bags.from_nested(nested))
    assert Bags.from_nested(nested).ids.data_ptr() == nested.values().data_ptr()
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array(LISTS, pyarrow.list_(pyarrow.int64()))
    bags = Bags.from_arrow(column)
    same(bags)
    assert bags.ids.data_ptr() == column.values.buffers()[1].address
    same(Bags.from_arrow(column.slice(1, 2)), LISTS[1:3])
    same(Bags.from_arrow(pyarrow.chunked_array([column])))
    same(Bags.from_arrow(pyarrow.array([[1], None, [2]])), [[1], [], [2]])
    weights = pyarrow.array([[0.5] * len(bag) for bag in LISTS])
    assert Bags.from_arrow(column, weights).weights.dtype == torch.float64
    with pytest.raises(ValueError, match="hold no nulls"):
        Bags.from_arrow(pyarrow.array([[1, None]]))
    with pytest.raises(TypeError, match="list array"):
        Bags.from_arrow(pyarrow.array([1, 2]))
    with pytest.raises(ValueError, match="lengths"):
        Bags.from_arrow(column, weights.slice(1))
    jagged = SimpleNamespace(
        values=lambda: torch.tensor([1, 2]), offsets=lambda: torch.tensor([0, 2]), weights_or_none=lambda: None
    )
    same(Bags.from_keyed_jagged(SimpleNamespace(to_dict=lambda: {"a": jagged}))["a"], [[1, 2]])


def test_as_a_value():
    bags = Bags.from_lists(LISTS, [[1.0] * len(bag) for bag in LISTS])
    assert repr(bags) == "Bags(4 bags, 6 ids, weighted, torch.int64, cpu)"
    assert bags.lengths().tolist() == [2, 0, 3, 1]
    same(bags.to("cpu"))
    same(pickle.loads(pickle.dumps(bags)))
    flat, spec = torch.utils._pytree.tree_flatten({"a": bags})
    assert len(flat) == 3
    same(torch.utils._pytree.tree_unflatten(flat, spec)["a"])


IDS, OFFSETS = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Bags(IDS, torch.tensor([1, 3])), ValueError, r"start at 0 and end at len\(ids\)=3, got first value 1"),
        (lambda: Bags(IDS, torch.tensor([0, 2])), ValueError, "last value 2"),
        (lambda: Bags(IDS, torch.tensor([0, 2, 1, 3])), ValueError, "must not decrease, got 2 before 1 at position 2"),
        (lambda: Bags(IDS, torch.tensor([], dtype=torch.int64)), ValueError, "`offsets`"),
        (lambda: Bags(IDS.float(), OFFSETS), TypeError, "`ids` must be int32 or int64, got torch.float32"),
        (lambda: Bags([1], OFFSETS), TypeError, "from_lists"),
        (lambda: Bags(IDS[None], OFFSETS), ValueError, "from_padded"),
        (lambda: Bags(IDS, OFFSETS.float()), TypeError, "`offsets`"),
        (lambda: Bags(IDS, OFFSETS, torch.ones(2)), ValueError, r"`weights` must have the shape of the ids, \(3,\)"),
        (lambda: Bags(IDS, OFFSETS, IDS), TypeError, "`weights` must be a floating-point"),
        (lambda: Bags.from_lengths(IDS, torch.tensor([1, 1])), ValueError, "number of ids, 3, got a sum of 2"),
        (lambda: Bags.from_lengths(IDS, torch.tensor([4, -1])), ValueError, "`lengths` must not be negative"),
        (lambda: Bags.from_lists([[1.5]]), TypeError, "whole numbers"),
        (lambda: Bags.from_lists([[1]], [[1.0, 2.0]]), ValueError, "`weights`"),
        (lambda: Bags.from_padded(IDS), ValueError, r"\[B, K\]"),
        (lambda: Bags.from_padded(IDS[None], weights=torch.ones(3)), ValueError, "`weights`"),
        (lambda: Bags.from_nested(IDS), TypeError, "jagged"),
        (lambda: SparseIds(torch.tensor([[0, 5]]), torch.tensor([1]), (2, 5)), ValueError, r"got \[0, 5\] at row 0"),
        (lambda: SparseIds(torch.tensor([[0]]), torch.tensor([1]), (2,)), ValueError, "at least 2"),
        (lambda: SparseIds(torch.tensor([[0, 1, 1]]), torch.tensor([1]), (2, 5)), ValueError, "`indices`"),
        (lambda: Bags.from_sparse(torch.tensor([[0, 1]]), torch.tensor([1]), (2, 5), torch.ones(2)), ValueError, "`w"),
    ],
)  # fmt: skip
def test_refusals(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
