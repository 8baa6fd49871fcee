"""`embedding_bag` against plain loops and against torch's: values and gradients of every form and mode."""

import pytest
import torch
import torch.nn.functional as F
from bag_judge import check_answers, random_batch
from cases import numbers
from conftest import INTERPRETED
from tolerance import assert_same_bits

from embedfuse.torch import use_backend
from embedfuse.torch.embedding_bag import embedding_bag

MODES = ["sum", "mean", "sqrtn", "max"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["eager", "cpu"])
def engine(request):
    """Backends whose numbers may be compared to the last bit of float64."""
    with use_backend(request.param):
        yield request.param


def table_of(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype, requires_grad=True)


def pooled(batch, mode, padding=None, form="starts", **options):
    """Output and gradients of a batch, given in one of the forms."""
    table = batch.table.detach().clone().requires_grad_()
    weights = None if batch.weights is None else batch.weights.detach().clone().requires_grad_()
    offsets = batch.bounds if form == "bounds" else batch.bounds[:-1]
    options |= {"mode": mode, "padding_idx": padding, "per_sample_weights": weights}
    out = embedding_bag(batch.ids, table, offsets, include_last_offset=form == "bounds", **options)
    out.backward(batch.upstream)
    return [out, table.grad] if weights is None else [out, table.grad, weights.grad]


# --- against the judge and against torch -----------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [None, 3])
def test_every_form_matches_plain_loops(engine, mode, padding):
    for weighted in (False, True) if mode != "max" else (False,):
        for dtype in DTYPES:
            for dim, kind in ((1, torch.int64), (5, torch.int32), (19, torch.int64)):
                batch = random_batch(dim=dim, weighted=weighted, dtype=dtype, ids_dtype=kind)
                if engine == "cpu" or dtype != torch.float64:
                    check_answers(batch, mode, padding, pooled(batch, mode, padding, "bounds"))
                check_answers(batch, mode, padding, pooled(batch, mode, padding))


@pytest.mark.skipif(not INTERPRETED, reason="the other machines run the whole suite on their GPU")
@pytest.mark.parametrize("mode", MODES)
def test_triton_kernels_match_plain_loops(mode):
    with use_backend("triton"):
        batch = random_batch(dtype=torch.float32, weighted=mode in ("sum", "mean"))
        check_answers(batch, mode, 3, pooled(batch, mode, 3))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 4, -1])
@pytest.mark.parametrize("includes_end", [False, True])
def test_matches_torch(engine, mode, padding, includes_end):
    for dim in (1, 7, 64):
        batch = random_batch(dim=dim, weighted=mode == "sum")
        given = batch.bounds if includes_end else batch.bounds[:-1]
        both = []
        for function in (embedding_bag, F.embedding_bag):
            table = batch.table.clone().requires_grad_()
            weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
            out = function(
                batch.ids, table, given, mode=mode, per_sample_weights=weights, include_last_offset=includes_end,
                padding_idx=padding,
            )  # fmt: skip
            out.backward(batch.upstream)
            both.append([out, table.grad] if weights is None else [out, table.grad, weights.grad])
        torch.testing.assert_close(*both, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_ids_of_any_shape_equal_flat_ones(engine, mode):
    table = torch.randn(11, 5)
    for shape in ((4, 3), (2, 3, 4), (2, 1, 3, 2), (7, 1)):
        ids = torch.randint(0, 11, shape)
        out = embedding_bag(ids, table, mode=mode)
        flat = embedding_bag(ids.reshape(-1), table, torch.arange(0, ids.numel(), shape[-1]), mode=mode)
        assert out.shape == (*shape[:-1], 5)
        assert torch.equal(out.reshape(-1, 5), flat)
        assert torch.equal(embedding_bag(ids.int(), table, mode=mode), out)
        assert torch.equal(embedding_bag(ids, table, mode=mode, include_last_offset=True), out)
        if len(shape) == 2 and mode != "sqrtn":
            torch.testing.assert_close(out, F.embedding_bag(ids, table, mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_look_up_gives_zeros(engine, mode):
    table = torch.randn(4, 3, requires_grad=True)
    empty = torch.empty(0, dtype=torch.int64)
    for ids, offsets, shape in (
        (torch.zeros((5, 0), dtype=torch.int64), None, (5, 3)),
        (torch.zeros((0, 2), dtype=torch.int64), None, (0, 3)),
        (torch.zeros((2, 0, 4), dtype=torch.int64), None, (2, 0, 3)),
        (empty, torch.tensor([0, 0, 0]), (3, 3)),
        (empty, empty, (0, 3)),
        (torch.tensor([1, 1]), torch.tensor([0, 0, 2]), None),
    ):
        out = embedding_bag(ids, table, offsets, mode=mode, padding_idx=1)
        assert out.shape == (shape or (3, 3))
        assert torch.equal(out, torch.zeros_like(out))
        (gradient,) = torch.autograd.grad(out.sum(), table)
        assert torch.equal(gradient, torch.zeros(4, 3))


def test_offsets_and_ids_of_different_integer_types(engine):
    table = torch.randn(300, 4)
    expected = embedding_bag(torch.tensor([200, 2, 7]), table, torch.tensor([0, 2]), mode="sum")
    for ids_type in (torch.int32, torch.int64, torch.int16, torch.uint8):
        for offsets_type in (torch.int32, torch.int64, torch.uint8):
            ids, offsets = torch.tensor([200, 2, 7], dtype=ids_type), torch.tensor([0, 2], dtype=offsets_type)
            assert torch.equal(embedding_bag(ids, table, offsets, mode="sum"), expected)


@pytest.mark.parametrize("mode", MODES)
def test_strides_do_not_matter(engine, mode):
    wide = torch.randn(22, 10, dtype=torch.float64)
    for table in (wide[::2, 1:6], wide.t()[:, :5], wide[:, :1].expand(22, 5)):
        ids, weights = torch.randint(0, 10, (24,))[::2], torch.rand(24, dtype=torch.float64)[::2]
        weights = None if mode == "max" else weights
        offsets = torch.tensor([0, 9, 3, 9, 5, 9, 12, 9])[::2]
        leaf = table.detach().requires_grad_()
        out = embedding_bag(ids, leaf, offsets, mode=mode, per_sample_weights=weights)
        upstream = torch.randn(5, 4, dtype=torch.float64).t()
        packed = table.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        expected = embedding_bag(
            ids.contiguous(), packed, offsets.contiguous(), mode=mode,
            per_sample_weights=None if weights is None else weights.contiguous(),
        )  # fmt: skip
        assert torch.equal(out, expected)
        for gradient in (upstream, torch.randn(4, 1, dtype=torch.float64).expand(4, 5), upstream[:1].expand(4, 5)):
            (strided,) = torch.autograd.grad(out, leaf, gradient, retain_graph=True)
            (plain,) = torch.autograd.grad(expected, packed, gradient.contiguous(), retain_graph=True)
            assert torch.equal(strided, plain)
        (of_sum,) = torch.autograd.grad(out.sum(), leaf)
        (of_ones,) = torch.autograd.grad(expected, packed, torch.ones(4, 5, dtype=torch.float64))
        assert torch.equal(of_sum, of_ones)


# --- single traits ---------------------------------------------------------------------------------------------------
def test_the_first_of_equal_maxima_takes_the_gradient(engine):
    table = table_of([2, 1], [2, 1], [0, 1])
    embedding_bag(torch.tensor([2, 1, 0, 1]), table, torch.tensor([0]), mode="max").sum().backward()
    assert table.grad.tolist() == [[0, 0], [1, 0], [0, 1]]


def test_max_has_a_gradient_of_its_own(engine):
    """Not the mean's."""
    table = table_of([1, 5], [2, 4], [3, 3])
    embedding_bag(torch.tensor([[0, 1, 2]]), table, mode="max").backward(torch.tensor([[7.0, 9]], dtype=torch.float64))
    assert table.grad.tolist() == [[0, 9], [0, 0], [7, 0]]


@pytest.mark.parametrize("mode", MODES)
def test_nan_leaks_from_used_rows_only(engine, mode):
    table = torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan], [3.0, 4.0]])
    padded = embedding_bag(torch.tensor([[1, 2], [1, 1]]), table, mode=mode, padding_idx=1)
    assert padded.tolist() == [[3, 4], [0, 0]]
    assert embedding_bag(torch.tensor([[2, 0]]), table, mode=mode)[0, 1].isnan()


@pytest.mark.parametrize("sparse", [False, True])
def test_one_of_table_and_weights_may_be_frozen(engine, sparse):
    ids = torch.tensor([[0, 1], [1, 1]])
    for table_learns, weights_learn in ((True, False), (False, True), (False, False)):
        table, weights = torch.ones(3, 2), torch.ones(2, 2)
        table.requires_grad_(table_learns), weights.requires_grad_(weights_learn)
        out = embedding_bag(ids, table, mode="sum", per_sample_weights=weights, sparse=sparse)
        assert out.requires_grad == (table_learns or weights_learn)
        if out.requires_grad:
            out.sum().backward()
        assert (table.grad is not None) == table_learns
        assert (weights.grad is not None) == weights_learn


@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize(
    ("table_type", "weights_type"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float64),
        (torch.float64, torch.float32),
    ],
)
def test_weights_of_another_type_than_the_table(engine, mode, table_type, weights_type):
    batch = random_batch(dtype=table_type)
    weights = (torch.rand(batch.ids.shape[0]) + 0.5).to(weights_type).requires_grad_()
    table = batch.table.clone().requires_grad_()
    out = embedding_bag(batch.ids, table, batch.bounds[:-1], mode=mode, per_sample_weights=weights)
    out.backward(batch.upstream)
    assert (out.dtype, table.grad.dtype, weights.grad.dtype) == (table_type, table_type, weights_type)
    batch.weights = weights.detach()
    expected = batch.answers(mode)
    for actual, right in zip((out, table.grad, weights.grad), expected, strict=True):
        error = torch.finfo(actual.dtype if actual.dtype.itemsize < 4 else torch.float32).eps
        torch.testing.assert_close(actual.double(), right, rtol=error, atol=1e-5)


def test_autocast_changes_nothing(engine):
    table, scores = torch.randn(9, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    ids = torch.randint(0, 9, (3, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = (scores @ torch.eye(4)).softmax(-1).to(torch.bfloat16)
        out = embedding_bag(ids, table, mode="sum", per_sample_weights=weights)
        out.sum().backward()
    assert out.dtype == table.grad.dtype == torch.float32
    assert torch.equal(out, embedding_bag(ids, table, mode="sum", per_sample_weights=weights.float()))


def test_nested_ids(engine):
    table = torch.randn(9, 4, requires_grad=True)
    bags, scores = [[1, 2, 8], [], [3], [3, 3]], [[0.5, 1.0, 2.0], [], [3.0], [1.0, 1.0]]
    ids = torch.nested.nested_tensor([torch.tensor(bag, dtype=torch.int64) for bag in bags], layout=torch.jagged)
    weights = torch.nested.nested_tensor([torch.tensor(bag) for bag in scores], layout=torch.jagged)
    offsets = torch.tensor([0, 3, 3, 4, 6])
    for mode, given in (("sum", weights), ("mean", None), ("max", None), ("mean", weights)):
        out = embedding_bag(ids, table, mode=mode, per_sample_weights=given)
        values = None if given is None else given.values()
        expected = embedding_bag(
            ids.values(), table, offsets, mode=mode, per_sample_weights=values, include_last_offset=True
        )
        assert torch.equal(out, expected)
    out.sum().backward()
    with pytest.raises(ValueError, match="per_sample_weights"):
        embedding_bag(ids, table, mode="sum", per_sample_weights=torch.rand(6))
    with pytest.raises(ValueError, match="offsets"):
        embedding_bag(ids, table, offsets, mode="sum")


def test_results_do_not_depend_on_threads_or_the_run(engine):
    batch = random_batch(rows=40, dim=17, bags=300, longest=30, dtype=torch.float32, weighted=True)
    runs = []
    for threads in (1, 2, 1, 3):
        torch.set_num_threads(threads)
        runs.append(pooled(batch, "mean"))
    for run in runs[1:]:
        for actual, expected in zip(run, runs[0], strict=True):
            assert_same_bits(numbers(actual), numbers(expected))


# --- max_norm --------------------------------------------------------------------------------------------------------
def test_worked_example_of_max_norm(engine):
    table = torch.tensor([[3.0, 4], [0.3, 0.4], [6, 8]])
    out = embedding_bag(torch.tensor([0, 1]), table, torch.tensor([0]), max_norm=1, mode="sum")
    torch.testing.assert_close(out, torch.tensor([[0.9, 1.2]]))
    torch.testing.assert_close(table, torch.tensor([[0.6, 0.8], [0.3, 0.4], [6, 8]]))
    assert table[1:].tolist() == torch.tensor([[0.3, 0.4], [6, 8]]).tolist()


@pytest.mark.parametrize("norm_type", [2, 1.0, float("inf"), 3.5])
def test_max_norm_matches_torch(engine, norm_type):
    ids, offsets = torch.tensor([2, 0, 2, 5, 5, 4]), torch.tensor([0, 2, 2])
    start = torch.randn(7, 3, dtype=torch.float64) * 2
    both = []
    for function in (embedding_bag, F.embedding_bag):
        table = start.clone().requires_grad_()
        version = table._version
        out = function(ids, table, offsets, 1.5, norm_type, mode="mean", padding_idx=4)
        assert table._version > version
        # and again, before the first backward ran
        second = function(ids, table, offsets, 0.5, norm_type, mode="mean", padding_idx=4)
        (out.sum() + 2 * second.sum()).backward()
        both.append((out, second, table.detach(), table.grad))
    torch.testing.assert_close(*both, rtol=0, atol=1e-13)
    ours = both[0][2]
    assert torch.equal(ours[[1, 3, 6]], start[[1, 3, 6]])
    assert (torch.linalg.vector_norm(ours[[0, 2, 4, 5]], norm_type, 1) <= 0.5 * (1 + 1e-5)).all()
