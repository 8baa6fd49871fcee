"""TensorFlow's sparse lookups: recorded answers, worked examples, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embedfuse.torch import (
    Bags,
    SparseIds,
    fused_embedding_lookup_sparse,
    fused_safe_embedding_lookup_sparse,
    use_backend,
)

CASES = json.loads((Path(__file__).parents[1] / "data" / "lookups.json").read_text())["cases"]


def _name(number):
    case = CASES[number]
    options = ("fn", "combiner", "weights_kind", "max_norm", "default_id", "shards", "partition_strategy")
    return "-".join(str(case[option]) for option in options) + f"-{number}"


def _array(given):
    return None if given is None else np.array(given["data"]).reshape(given["shape"])


def cut(table, count, strategy):
    """A table as shards of TensorFlow's sizes."""
    if strategy == "mod":
        return [table[number::count].clone() for number in range(count)]
    return [piece.clone() for piece in torch.tensor_split(table, count)]


def joined(shards, strategy):
    """One table out of its shards."""
    if strategy == "div":
        return torch.cat(shards)
    out = shards[0].new_empty(sum(len(shard) for shard in shards), shards[0].shape[1])
    for number, shard in enumerate(shards):
        out[number :: len(shards)] = shard
    return out


@pytest.fixture
def chosen(placement, request):
    """The device of each backend in turn, with that backend chosen."""
    name, device = placement
    with use_backend(name):
        yield device


@pytest.mark.parametrize("number", range(len(CASES)), ids=_name)
def test_recorded_answers_of_tensorflow(number, chosen, placement):
    case = CASES[number]
    if placement[0] == "triton" and chosen == "cpu" and number % 8:
        pytest.skip("too slow in the interpreter")
    table = torch.tensor(_array(case["table"]), dtype=torch.float32)
    shards = [s.to(chosen).requires_grad_() for s in cut(table, case["shards"], case["partition_strategy"])]
    indices, values = (
        torch.tensor(_array(case[key]), dtype=torch.int64, device=chosen) for key in ("indices", "values")
    )
    ids = SparseIds(indices.reshape(len(values), -1), values, case["dense_shape"])
    weights = _array(case["weights"])
    if weights is not None:
        weights = torch.tensor(weights, dtype=torch.float32, device=chosen, requires_grad=True)
    options = {
        "combiner": case["combiner"],
        "max_norm": case["max_norm"],
        "default_id": case["default_id"],
        "partition_strategy": case["partition_strategy"],
    }
    if case["fn"] == "safe":
        out = fused_safe_embedding_lookup_sparse(shards, ids, weights, **options)
    else:
        out = fused_embedding_lookup_sparse(shards, ids, weights, **options)
    expected = torch.tensor(_array(case["output"]), dtype=torch.float32)
    assert out.shape == (*case["dense_shape"][:-1], table.shape[1])
    # TensorFlow leaves trailing empty rows of the plain lookup out
    torch.testing.assert_close(out[: len(expected)].cpu(), expected)
    assert not out[len(expected) :].any()
    upstream = torch.zeros_like(out)
    upstream[: len(expected)] = torch.tensor(_array(case["upstream"]), dtype=torch.float32)
    out.backward(upstream)
    found = joined([shard.grad.cpu() for shard in shards], case["partition_strategy"])
    torch.testing.assert_close(found, torch.tensor(_array(case["grad_table"]), dtype=torch.float32))
    if case.get("grad_weights") is not None:
        right = torch.tensor(_array(case["grad_weights"]), dtype=torch.float32)
        torch.testing.assert_close(weights.grad.cpu(), right)


# --- the worked examples -------------------------------------------------------------------------------------------

TABLE = torch.arange(1.0, 7)[:, None] * torch.tensor([1.0, 10.0])
LISTS = [[1, 3, 3], [-2], [], [5, -1, 0]]
WEIGHTS = [[1.0, 2.0, 0.5], [1.0], [], [0.0, 3.0, 2.0]]
GOLDEN = {
    "sum": ([10, 0, 0, 7], [10, 5, 5, 7], [12, 0, 0, 2], [1.4925558, 0, 0, 0.9950372]),
    "mean": ([3.3333333, 0, 0, 3.5], [3.3333333, 5, 5, 3.5], [3.4285714, 0, 0, 1], [0.4975186, 0, 0, 0.4975186]),
    "sqrtn": (
        [5.7735027, 0, 0, 4.9497475], [5.7735027, 5, 5, 4.9497475], [5.2372294, 0, 0, 1],
        [0.8617274, 0, 0, 0.7035976],
    ),
}  # fmt: skip


@pytest.mark.parametrize("combiner", GOLDEN)
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_golden_vectors(combiner, shards, strategy, chosen):
    params = [shard.to(chosen) for shard in cut(TABLE, shards, strategy)]
    bags, weighted = Bags.from_lists(LISTS).to(chosen), Bags.from_lists(LISTS, WEIGHTS).to(chosen)
    asked = ((bags, {}), (bags, {"default_id": 4}), (weighted, {}), (bags, {"max_norm": 5.0}))
    for (ids, options), right in zip(asked, GOLDEN[combiner], strict=True):
        out = fused_safe_embedding_lookup_sparse(params, ids, combiner=combiner, partition_strategy=strategy, **options)
        expected = torch.tensor(right)[:, None] * torch.tensor([1.0, 10.0])
        torch.testing.assert_close(out.cpu(), expected)
    both = fused_safe_embedding_lookup_sparse(params, weighted, None, combiner, 4, partition_strategy=strategy)
    torch.testing.assert_close(both.cpu()[1:3], torch.tensor([[5.0, 50.0]] * 2))


def test_gradient_of_defaults(chosen):
    for default, right in ((None, [1 / 2, 1 / 3, 0, 2 / 3, 0, 1 / 2]), (4, [1 / 2, 1 / 3, 0, 2 / 3, 2, 1 / 2])):
        table = TABLE.clone().to(chosen).requires_grad_()
        fused_safe_embedding_lookup_sparse(
            table, Bags.from_lists(LISTS).to(chosen), default_id=default
        ).sum().backward()
        torch.testing.assert_close(table.grad.cpu(), torch.tensor(right)[:, None].expand(6, 2))


def test_higher_ranks_keep_their_shape(chosen):
    indices = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]], device=chosen)
    ids = SparseIds(indices, torch.tensor([1, 0, 2], device=chosen), (2, 2, 2))
    weights = torch.tensor([0.5, 2.0, 3.0], device=chosen, requires_grad=True)
    out = fused_safe_embedding_lookup_sparse(TABLE.to(chosen), ids, combiner="sum")
    assert out[..., 0].tolist() == [[1, 0], [0, 5]]
    # in the order the ids are given in, not that of the bags
    out = fused_safe_embedding_lookup_sparse(TABLE.to(chosen), ids, weights, combiner="sum")
    assert out[..., 0].tolist() == [[2, 0], [0, 10]]
    out[..., 0].sum().backward()
    assert weights.grad.tolist() == [2, 1, 3]


def test_true_gradient_of_the_clip(chosen):
    for shards in (1, 2):
        table = torch.tensor([[3.0, 4.0], [0.0, 0.0]], device=chosen)
        params = [piece.clone().requires_grad_() for piece in table.split(2 // shards)]
        out = fused_safe_embedding_lookup_sparse(params, Bags.from_lists([[0]]).to(chosen), max_norm=2.5)
        out.backward(torch.tensor([[1.0, 0.0]], device=chosen))
        torch.testing.assert_close(params[0].grad[0].cpu(), torch.tensor([0.32, -0.24]))


# --- where TensorFlow is erratic: decided once ---------------------------------------------------------------------


def test_a_norm_of_zero_gives_zeros_and_no_nan():
    table = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    out = fused_safe_embedding_lookup_sparse(table, Bags.from_lists([[0], [1]]), max_norm=0.0)
    out.sum().backward()
    assert not out.any()
    # what is not longer than 0 is not cut, so its gradient passes
    assert table.grad.tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_that_cancel_give_zeros(combiner):
    bags = Bags.from_lists([[0, 1]], [[1.0, -1.0] if combiner == "mean" else [0.0, 0.0]])
    out = fused_embedding_lookup_sparse(TABLE, bags, combiner=combiner)
    assert not out.any()


def test_fewer_rows_than_shards():
    params = [TABLE[:1], TABLE[:0], TABLE[1:2], TABLE[:0]]
    out = fused_safe_embedding_lookup_sparse(params, Bags.from_lists([[0, 1], [1]]), combiner="sum")
    torch.testing.assert_close(out, torch.tensor([[3.0, 30.0], [2.0, 20.0]]))


def test_uneven_shards_count_by_their_real_sizes():
    out = fused_safe_embedding_lookup_sparse([TABLE[:1], TABLE[1:3]], Bags.from_lists([[0], [1], [2]]))
    torch.testing.assert_close(out, TABLE[:3])
    with pytest.raises(IndexError, match=r"shard 1 is too short"):
        fused_safe_embedding_lookup_sparse(
            [TABLE[:4], TABLE[4:5]], Bags.from_lists([[0], [3]]), partition_strategy="mod"
        )


# --- forms of the arguments ----------------------------------------------------------------------------------------


def test_all_forms_of_ids_agree():
    bags = Bags.from_lists([[1, 3], [], [0]])
    indices = torch.tensor([[2, 0], [0, 0], [0, 1]])
    values = torch.tensor([0, 1, 3])
    weights = torch.tensor([0.5, 2.0, 3.0])
    nested = torch.nested.nested_tensor_from_jagged(bags.ids, bags.offsets)
    plain = fused_embedding_lookup_sparse(TABLE, bags)
    for ids in (SparseIds(indices, values, (3, 2)), torch.sparse_coo_tensor(indices.t(), values, (3, 2)), nested):
        torch.testing.assert_close(fused_embedding_lookup_sparse(TABLE, ids), plain)
    expected = fused_embedding_lookup_sparse(TABLE, Bags(bags.ids, bags.offsets, weights[[1, 2, 0]]))
    sparse = torch.sparse_coo_tensor(indices.t(), values, (3, 2))
    like = torch.sparse_coo_tensor(indices.t(), weights, (3, 2))
    for given, theirs in (
        (SparseIds(indices, values, (3, 2)), weights),
        (sparse, weights),
        (sparse, like),
        (SparseIds(indices, values, (3, 2)), like),
        (bags, weights[[1, 2, 0]]),
        (nested, torch.nested.nested_tensor_from_jagged(weights[[1, 2, 0]], bags.offsets)),
        (nested, weights[[1, 2, 0]]),
    ):
        torch.testing.assert_close(fused_embedding_lookup_sparse(TABLE, given, theirs), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types(dtype):
    bags = Bags.from_lists([[1, 3], [], [0]], [[0.5, 1.0], [], [2.0]])
    weights = bags.weights.to(torch.float16).requires_grad_()
    for params in (TABLE.to(dtype).requires_grad_(), [p.to(dtype).requires_grad_() for p in TABLE.split(2)]):
        out = fused_embedding_lookup_sparse(params, Bags(bags.ids, bags.offsets, weights), combiner="sum")
        assert out.dtype == dtype
        assert out[0].tolist() == [5, 50]
        (weight_grad,) = torch.autograd.grad(out.sum(), weights)
        assert weight_grad.dtype == torch.float16 and weight_grad.tolist() == [22, 44, 11]


def test_empty_batches():
    for params in (TABLE, list(TABLE.split(2))):
        assert fused_embedding_lookup_sparse(params, Bags.from_lists([])).shape == (0, 2)
        assert not fused_embedding_lookup_sparse(params, Bags.from_lists([[], []])).any()
        empty = SparseIds(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), (2, 0, 4))
        assert fused_safe_embedding_lookup_sparse(params, empty).shape == (2, 0, 2)
        out = fused_safe_embedding_lookup_sparse(params, Bags.from_lists([[], []]), default_id=5)
        torch.testing.assert_close(out, TABLE[[5, 5]])


def test_shards_are_read_where_they_lie():
    whole = torch.randn(40, 10)
    # odd places in memory, out of order, one not contiguous
    shards = [whole[30:37, :5], whole.view(-1)[3:18].view(3, 5), torch.randn(4, 5), whole.view(-1)[101:121].view(4, 5)]
    bags = Bags.from_lists([[0, 6, 7], [9, 10, 13, 14], [17]])
    out = fused_embedding_lookup_sparse(shards, bags, combiner="sum")
    table = torch.cat(shards)
    torch.testing.assert_close(out[1], table[[9, 10, 13, 14]].sum(0))
    torch.testing.assert_close(out[0], table[[0, 6, 7]].sum(0))


@pytest.mark.parametrize("strategy", ["div", "mod"])
@pytest.mark.parametrize("shards", [1, 3])
def test_compiled_is_the_same(shards, strategy):
    params = [shard.requires_grad_() for shard in cut(TABLE.clone(), shards, strategy)]

    def look_up(params, bags):
        return fused_safe_embedding_lookup_sparse(
            params, bags, default_id=3, max_norm=12.0, partition_strategy=strategy
        )

    compiled = torch.compile(look_up, fullgraph=True, backend="aot_eager")
    for lists, weights in ((LISTS, WEIGHTS), (LISTS[:2], WEIGHTS[:2])):
        bags = Bags.from_lists(lists, weights)
        bags.weights.requires_grad_()
        leaves = [*params, bags.weights]
        found, expected = compiled(params, bags), look_up(params, bags)
        torch.testing.assert_close(found, expected)
        mine, theirs = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected))
        torch.testing.assert_close(mine, theirs)


def test_doctest():
    import doctest

    from embedfuse.torch.sparse_lookup import lookups

    names = {"torch": torch, "SparseIds": SparseIds}
    assert doctest.testmod(lookups, extraglobs=names).failed == 0


# --- what is refused -----------------------------------------------------------------------------------------------

BAGS = Bags.from_lists([[0, 1], [2]])
SPARSE = SparseIds(torch.tensor([[0, 0], [1, 0]]), torch.tensor([0, 1]), (2, 2))
REFUSED = [
    (ValueError, "`params` must be a table or a list", {"params": []}),
    (ValueError, "`params` must be a table or a list", {"params": None}),
    (TypeError, "`params` must hold tensors", {"params": [torch.nn.Embedding(3, 2)]}),
    (ValueError, r"`params` must hold tables \[rows, dim\]", {"params": torch.zeros(3)}),
    (ValueError, "shards of one width, got 2 and 3", {"params": [torch.zeros(3, 2), torch.zeros(3, 3)]}),
    (TypeError, "shards of one dtype", {"params": [torch.zeros(3, 2), torch.zeros(3, 2).double()]}),
    (TypeError, "`params` must be float32", {"params": torch.zeros(3, 2, dtype=torch.int64)}),
    (TypeError, "`sp_ids` must be SparseIds, Bags.*from_padded", {"sp_ids": torch.tensor([[1, 2]])}),
    (ValueError, "`sp_ids` must have rank 2 or more", {"sp_ids": torch.sparse_coo_tensor([[0]], [1], (3,))}),
    (ValueError, "`sp_ids` must have rank 2, got.*fused_safe", {"sp_ids": SparseIds(torch.tensor([[0, 0, 0]]),
                                                                             torch.tensor([0]), (1, 1, 1))}),
    (ValueError, "one weight for each of the 3 ids", {"sparse_weights": torch.ones(2)}),
    (TypeError, "`sparse_weights` must be a floating-point", {"sparse_weights": torch.ones(3, dtype=torch.int64)}),
    (ValueError, "shape and places of the ids", {"sp_ids": SPARSE,
                                                 "sparse_weights": torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 2))}),
    (ValueError, "in the order of the ids", {"sp_ids": SPARSE, "sparse_weights": torch.sparse_coo_tensor(
        [[1, 0], [0, 0]], [1.0, 2.0], (2, 2))}),
    (ValueError, "weights of its own", {"sp_ids": Bags.from_lists([[1]], [[1.0]]), "sparse_weights": torch.ones(1)}),
    (ValueError, "`partition_strategy` must be", {"partition_strategy": "mod_ev"}),
    (ValueError, "`combiner` must be one of", {"combiner": "tile"}),
    (ValueError, "`max_norm` must be a number of at least 0", {"max_norm": -1.0}),
    (ValueError, "`default_id` must be a row of the table, 0 to 5", {"default_id": 6}),
    (ValueError, "`default_id` must be a row", {"default_id": -1}),
    (TypeError, "`default_id` must be an int", {"default_id": 1.5}),
    (TypeError, "`prune_invalid_ids` must be True or False", {"prune_invalid_ids": "yes"}),
    (ValueError, "`blocknums` must be None", {"blocknums": torch.tensor([1])}),
    (IndexError, r"got 6 in bag 1.*enlarge", {"sp_ids": Bags.from_lists([[0], [1, 6]])}),
    (IndexError, r"got -1 in bag 0.*prune", {"sp_ids": Bags.from_lists([[-1], [1]])}),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, change", REFUSED)
@pytest.mark.parametrize("shards", [1, 3])
def test_refusals(kind, message, change, shards):
    params = TABLE if shards == 1 else list(TABLE.split(2))
    with pytest.raises(kind, match=message):
        fused_embedding_lookup_sparse(**{"params": params, "sp_ids": BAGS, **change})


def test_indices_outside_of_their_shape():
    ids = torch.sparse_coo_tensor([[0, 3], [0, 0]], [1, 2], (2, 2), check_invariants=False)
    with pytest.raises(ValueError, match="`indices` must lie inside"):
        fused_safe_embedding_lookup_sparse(TABLE, ids)


def test_unpruned_weights_count():
    out = fused_safe_embedding_lookup_sparse(TABLE, Bags.from_lists([[0, 1]], [[1.0, -3.0]]), prune=False)
    torch.testing.assert_close(out, torch.tensor([[2.5, 25.0]]))
    with pytest.raises(IndexError, match="got -1"):
        fused_safe_embedding_lookup_sparse(TABLE, Bags.from_lists([[0, -1]]), prune=False)
