"""Inputs that once were misread, crashed, or said something raw: each is right now, or refused in words."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import (
    Bags,
    EmbeddingCollection,
    SparseIds,
    embedding_bag,
    fused_embedding_lookup_sparse,
    fused_safe_embedding_lookup_sparse,
    use_backend,
)
from embedfuse.torch import feature_column as fc
from embedfuse.torch.backends import why_not
from embedfuse.torch.sparse_lookup import spread

needs_engine = pytest.mark.skipif(
    why_not("cpu", torch.device("cpu")) is not None, reason="the native engine is not built here"
)


def made(**options):
    options = {"combiner": "sum", "initializer": 1.0} | options
    return EmbeddingCollection({"f": FeatureConfig(TableConfig(10, 2, name="t", **options))})


# --- offsets that were never checked, or changed afterwards -----------------------------------------------------------


@needs_engine
@pytest.mark.parametrize("place, value", [(1, 30_000_000), (1, -1), (0, -5), (2, 1 << 62), (0, 1)])
def test_offsets_edited_after_their_check_are_refused_before_anything_is_read(place, value):
    offsets = torch.tensor([0, 2, 3])
    bags = Bags(torch.tensor([1, 2, 3]), offsets)
    offsets[place] = value
    with use_backend("cpu"), pytest.raises(ValueError, match="must start at 0, not decrease, and not exceed"):
        made()({"f": bags})


@needs_engine
def test_offsets_that_wrap_around_are_refused():
    offsets = torch.tensor([0, 2, 3, 3])
    bags = Bags(torch.tensor([1, 2, 3]), offsets)
    # steps of less than 2**63 each, all around the numbers of 64 bits
    offsets.copy_(torch.tensor([0, (1 << 63) - 1, -2, 1]))
    with use_backend("cpu"), pytest.raises(ValueError, match="`offsets` must start at 0"):
        made()({"f": bags})


@needs_engine
def test_bags_cut_by_a_pytree_are_refused():
    bags = Bags.from_lists([[1, 2, 3], [4], [5]], [[1.0] * 3, [1.0], [1.0]])
    with use_backend("cpu"), pytest.raises(ValueError, match="got 0 before 3 at position 1"):
        made()({"f": pytree.tree_map(lambda tensor: tensor[:2], bags)})
    short = Bags.from_lists([[1, 2]], [[1.0, 1.0]])
    short.weights = short.weights[:1]
    with use_backend("cpu"), pytest.raises(ValueError, match="`weights` must be one an id, 2, got 1"):
        made()({"f": short})


@needs_engine
def test_every_op_of_the_engine_checks_offsets():
    from embedfuse import cpu
    from embedfuse.plan import PlannedFeature, PlannedTable, plan_group
    from embedfuse.torch.backends import Csr, load

    plan = plan_group([PlannedTable(10, 2, math.inf)], [PlannedFeature(0, "mean", 0)])
    features = torch.from_numpy(plan.features)
    bad = Csr(torch.tensor([1, 2]), torch.tensor([0, 1 << 40, 2]), torch.ones(2), 2)
    table, grad, scale = torch.ones(20), torch.ones(2, 2), torch.ones(2)
    winners = torch.zeros(2, 2, dtype=torch.int64)
    engine = load("cpu")
    calls = {
        "pooled_lookup": lambda: engine.pooled_lookup(table, features, bad, 2, True, "drop"),
        "max_lookup": lambda: engine.max_lookup(table, features, bad, 2, "drop"),
        "max_grad": lambda: engine.max_grad(table, features, bad, winners, grad),
        "row_grad": lambda: engine.row_grad(table, features, bad, scale, grad),
        "coefficient_grad": lambda: engine.coefficient_grad(table, features, bad, scale, grad),
        "prepare_ids": lambda: engine.prepare_ids(features, bad, None, "drop"),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match="`offsets`"):
            call()
        assert hasattr(cpu, name)
    assert table.tolist() == [1.0] * 20


def test_a_compiled_constructor_checks_offsets_when_it_runs():
    collection = made()

    @torch.compile(backend="eager", fullgraph=True)
    def look_up(ids, offsets):
        return collection({"f": Bags(ids, offsets)})["f"]

    assert look_up(torch.tensor([1, 2]), torch.tensor([0, 1, 2, 2])).tolist() == [[1, 1], [1, 1], [0, 0]]
    with pytest.raises(ValueError, match="`offsets` must not decrease, got 30000000 before 2 at position 2"):
        look_up(torch.tensor([1, 2]), torch.tensor([0, 30_000_000, 2, 2]))
    with pytest.raises(ValueError, match=r"end at len\(ids\)=2"):
        look_up(torch.tensor([1, 2]), torch.tensor([0, 1, 1, 1]))


# --- NaN weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combiner", ["mean", "sqrtn", "mean_by_count"])
def test_a_nan_weight_does_not_count(combiner, placement):
    name, device = placement
    rows = torch.tensor([[1.0, 2.0], [4.0, 8.0], [3.0, 5.0]])
    table = TableConfig(3, 2, initializer=rows, combiner=combiner, name="t")
    weights = torch.tensor([math.nan, 2.0, math.nan], device=device, requires_grad=True)
    ids, offsets = torch.tensor([0, 1, 2], device=device), torch.tensor([0, 2, 3], device=device)
    with use_backend(name):
        collection = EmbeddingCollection({"f": FeatureConfig(table)}, update="autograd", grad="sparse", device=device)
        out = collection({"f": Bags(ids, offsets, weights)})["f"]
        out.sum().backward()
    expected = rows[1] * (2 if combiner == "mean_by_count" else 1)
    assert torch.equal(out.detach().cpu(), torch.stack([expected, torch.zeros(2)]))
    assert collection.tables["t"].grad.coalesce().indices().tolist() == [[1]]
    assert weights.grad.isfinite().all() and weights.grad[::2].tolist() == [0, 0]


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_a_nan_weight_of_shards_does_not_count(combiner, monkeypatch):
    ids = Bags.from_lists([[0, 1, 3], [2]], [[math.nan, 2.0, 1.0], [math.nan]])
    table = torch.arange(1.0, 9.0).view(4, 2)
    expected = fused_safe_embedding_lookup_sparse(
        table, Bags.from_lists([[1, 3], []], [[2.0, 1.0], []]), None, combiner
    )
    shards = [table[:2].clone(), table[2:].clone()]
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(spread, "home_of", lambda shard: torch.device("cpu:0" if shard is shards[0] else "cpu"))
        weights = ids.weights.clone().requires_grad_()
        out = fused_safe_embedding_lookup_sparse(shards, Bags(ids.ids, ids.offsets, weights), None, combiner)
        assert torch.allclose(out, expected)
        out.sum().backward()
        assert weights.grad.isfinite().all() and weights.grad[[0, 3]].tolist() == [0, 0]


# --- jagged tensors ---------------------------------------------------------------------------------------------------


def _jagged(*rows):
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_jagged_tensors_with_holes_are_refused_everywhere():
    numbers = torch.arange(10).view(2, 5)
    holes = torch.nested.narrow(numbers, 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged)
    table = torch.ones(10, 2)
    column = fc.embedding_column(fc.categorical_column_with_identity("f", 10), 2)
    for call in (
        lambda: Bags.from_nested(holes),
        lambda: made()({"f": holes}),
        lambda: fused_embedding_lookup_sparse(table, holes),
        lambda: fused_safe_embedding_lookup_sparse(table, holes),
        lambda: embedding_bag(holes, table),
        lambda: fc.InputLayer([column])({"f": holes}),
    ):
        with pytest.raises(ValueError, match=r"got holes, as torch\.nested\.narrow makes them"):
            call()


def test_jagged_weights_of_other_row_lengths_are_refused_everywhere():
    ids, weights, table = _jagged([1, 2], [3]), _jagged([1.0], [2.0, 3.0]), torch.ones(10, 2)
    for call in (
        lambda: Bags.from_nested(ids, weights),
        lambda: fused_embedding_lookup_sparse(table, ids, weights),
        lambda: fused_safe_embedding_lookup_sparse(table, ids, weights),
        lambda: embedding_bag(ids, table, mode="sum", per_sample_weights=weights),
    ):
        with pytest.raises(ValueError, match=r"rows of the lengths of the ids, \[2, 1\], got \[1, 2\]"):
            call()
    same = _jagged([1.0, 2.0], [3.0])
    assert fused_embedding_lookup_sparse(table, ids, same, combiner="sum").tolist() == [[3, 3], [3, 3]]


# --- numbers that are missing, and dense columns ----------------------------------------------------------------------

pa, pd = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")

WITH_GAPS = {
    "list": [1, None],
    "nested": [[1], [None]],
    "floats": [1.0, None],
    "objects": np.array([1, None], object),
    "arrow": pa.array([1, None]),
    "arrow_floats": pa.array([1.0, None]),
    "series": pd.Series([1.0, None]),
    "nullable": pd.Series([1, None], dtype="Int64"),
    "object_series": pd.Series([1, None], dtype=object),
}


@pytest.mark.parametrize("kind", WITH_GAPS)
def test_a_missing_number_is_the_default_or_an_error(kind):
    filled = fc.InputLayer([fc.numeric_column("n", default_value=7)])
    assert filled({"n": WITH_GAPS[kind]}).tolist() == [[1], [7]]
    with pytest.raises(ValueError, match="got 1 missing: give numeric_column a `default_value`"):
        fc.InputLayer([fc.numeric_column("n")])({"n": WITH_GAPS[kind]})


def test_minus_one_is_a_number_like_others():
    layer = fc.InputLayer([fc.numeric_column("n", default_value=7)])
    assert layer({"n": [1, -1]}).tolist() == [[1], [-1]]
    wide = fc.InputLayer([fc.numeric_column("n", shape=2, default_value=[0.5, 7])])
    assert wide({"n": [[1, None], [None, -1]]}).tolist() == [[1, 7], [0.5, -1]]


@pytest.mark.parametrize("kind", ["half", "bfloat16", "double", "float"])
def test_layers_of_columns_in_another_dtype(kind):
    dtype = getattr(torch, kind)
    numbers, words = fc.numeric_column("n"), fc.categorical_column_with_identity("a", 10)
    batch = {"n": [1.0, 2.0], "a": [1, 2]}
    for layer in (
        fc.LinearModel([numbers, words]),
        fc.LinearModel([numbers]),
        fc.InputLayer([numbers, fc.embedding_column(words, 2)]),
        fc.InputLayer([numbers]),
    ):
        assert layer.to(dtype)(batch).dtype == dtype
    assert not fc.InputLayer([numbers]).state_dict()


def test_dtype_of_a_numeric_column_is_what_its_normalizer_sees():
    seen = []
    for dtype in ("int32", torch.float64, np.int16, np.dtype("float32"), int):
        column = fc.numeric_column(
            "n", dtype=dtype, normalizer_fn=lambda numbers: seen.append(numbers.dtype) or numbers
        )
        out = fc.InputLayer([column])({"n": [1.75, -2.5]})
        assert out.dtype == torch.float32
        assert out.flatten().tolist() == ([1.75, -2.5] if seen[-1].is_floating_point else [1, -2])
    assert seen == [torch.int32, torch.float64, torch.int16, torch.float32, torch.int64]
    for dtype in ("string", bool, str, "complex64"):
        with pytest.raises(ValueError, match="`dtype` must be a number type"):
            fc.numeric_column("n", dtype=dtype)


@pytest.mark.parametrize("boundaries", [[math.nan], [1, math.nan], ["a"], [1, "b"], [None]])
def test_boundaries_must_be_numbers(boundaries):
    with pytest.raises(ValueError, match="`boundaries` must be numbers"):
        fc.bucketized_column(fc.numeric_column("n"), boundaries)


def test_columns_of_data_frames():
    words = fc.indicator_column(fc.categorical_column_with_vocabulary_list("s", ["a", "b"]))
    layer = fc.InputLayer([words, fc.numeric_column("n")])
    expected = [[1, 1, 0], [2, 0, 0]]
    for series in (
        pd.Series(["a", None]),
        pd.Series(["a", None], dtype="category"),
        pd.Series(["a", None], dtype="string"),
        pd.Series([["a"], []]),
        pd.Series(["a", ""]),
    ):
        assert layer({"s": series, "n": pd.Series([1, 2], index=[9, 4])}).tolist() == expected
    frame = pd.DataFrame({"s": ["a", None], "n": [1, 2]})
    assert layer(dict(frame)).tolist() == expected
    with pytest.raises(TypeError, match=r"a data frame is dict\(frame\)"):
        layer(frame)
    pair = fc.InputLayer([fc.numeric_column("p", shape=2)])
    assert pair({"p": pd.DataFrame({"x": [1, 2], "y": [3.5, 4]})}).tolist() == [[1, 3.5], [2, 4]]


# --- arguments --------------------------------------------------------------------------------------------------------

ONE = torch.tensor([1])
REFUSED = {
    "flat list": (lambda: Bags.from_lists([7, 8]), TypeError, r"must be a list of lists, one a bag, got \[7, 8\]"),
    "strings": (lambda: Bags.from_lists([["a"]]), TypeError, "`bags` must hold whole numbers, got 'a'"),
    "none": (lambda: Bags.from_lists([[1, None]]), TypeError, "`bags` must hold whole numbers, got None"),
    "too large": (lambda: Bags.from_lists([[2**40]], dtype=torch.int32), ValueError, "that fit torch.int32, got 1099"),
    "larger": (lambda: Bags.from_lists([[2**70]]), ValueError, "that fit torch.int64, got 1180"),
    "weights": (lambda: Bags.from_lists([[1]], [["a"]]), TypeError, "`weights` must hold numbers"),
    "flat weights": (lambda: Bags.from_lists([[1]], [1.0]), TypeError, "`weights` must be a list of lists"),
    "ids in a list": (lambda: Bags.from_lengths([1], ONE), TypeError, "`ids` must be a torch.Tensor, got list"),
    "lengths in a list": (lambda: Bags.from_lengths(ONE, [1]), TypeError, "`lengths` must be a torch.Tensor, got list"),
    "negative": (lambda: Bags.from_lengths(ONE, torch.tensor([2, -1])), ValueError, "must not be negative, got -1"),
    "nested list": (lambda: Bags.from_nested([[1]]), TypeError, "`ids` must be a nested tensor"),
    "padded weights": (lambda: Bags.from_padded(ONE[None], None, [[1.0]]), TypeError, "`weights` must be a floating"),
    "arrow strings": (lambda: Bags.from_arrow(pa.array([["a"]])), TypeError, "must hold lists of numbers, got list<"),
    "arrow flat": (lambda: Bags.from_arrow(pa.array([1])), TypeError, "must be a pyarrow list array, got int64"),
    "arrow weights": (lambda: Bags.from_arrow(pa.array([[1]]), pa.array([1])), TypeError, "`weights` must be a py"),
    "negative shape": (lambda: SparseIds(ONE[None][:0], ONE[:0], (-1, 2)), ValueError, "`dense_shape` must hold sizes"),
    "shape of words": (lambda: SparseIds(ONE[None], ONE, ("a", 2)), TypeError, "`dense_shape` must be a sequence"),
    "values": (lambda: SparseIds(ONE[None], ONE[None], (1, 2)), ValueError, "`values` must have one dimension"),
    "rows": (lambda: TableConfig(5.0, 4), ValueError, "`vocabulary_size` must be an int of at least 1, got 5.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_in_words(name):
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


def test_rows_of_lists_may_be_arrays():
    assert Bags.from_lists([np.array([1, 2]), torch.tensor([3]), ()]).to_lists() == [[1, 2], [3], []]
    assert Bags.from_lists([[np.int32(4)]]).to_lists() == [[4]]


def test_sizes_may_be_whole_numbers_of_any_library():
    table = TableConfig(np.int64(5), np.int32(4))
    feature = FeatureConfig(table, max_sequence_length=np.int64(2))
    assert all(type(size) is int for size in (table.vocabulary_size, table.dim, feature.max_sequence_length))
    assert EmbeddingCollection({"f": feature})({"f": Bags.from_lists([[1]])})["f"].shape == (1, 2, 4)
    assert FeatureConfig(table, output_shape=(np.int64(1),)).output_shape == (1,)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_shards_says_that_it_has_none(weighted):
    shards = [torch.randn(3, 2, requires_grad=True) for _ in range(2)]
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True) if weighted else None
    out = fused_embedding_lookup_sparse(shards, Bags.from_lists([[1, 4], [3]]), weights, combiner="sum")
    (first, _) = torch.autograd.grad(out.square().sum(), shards, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"join them, with torch\.cat\(shards\)"):
        first.sum().backward()


def test_an_unknown_backend_in_the_environment_is_named():
    code = (
        "import torch, embedfuse.torch as e; from embedfuse import TableConfig, FeatureConfig;"
        "c = e.EmbeddingCollection({'f': FeatureConfig(TableConfig(3, 2))}); c({'f': e.Bags.from_lists([[1]])})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"EMBEDFUSE_BACKEND": "CPU"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    message = "the environment variable EMBEDFUSE_BACKEND must be one of auto, triton, cpu, eager, got 'CPU'"
    assert message in done.stderr
