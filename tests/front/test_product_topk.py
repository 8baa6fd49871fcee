"""`product_topk` in its three forms against the full grid, sorted in plain loops."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from embedfuse.torch import use_backend
from embedfuse.torch.gather.product_topk import in_torch, product_topk, staircase

INF, NAN = math.inf, math.nan
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def engine(placement, backend):
    """Each backend in turn, chosen."""
    with use_backend(placement[0]):
        yield placement[0]


def exact(values):
    """The sum of floats without rounding, as numbers to be compared one by one: NaN, infinities, the rest."""
    nans = sum(value != value for value in values)
    infinities = sum((value == INF) - (value == -INF) for value in values)
    return nans, infinities, sum((Fraction(value) for value in values if math.isfinite(value)), Fraction(0))


def judge(inputs, k):
    """The ids of the k best sums of one row, from the full grid: largest first, lowest id first among equals."""
    rows = [scores.double().tolist() for scores in inputs]
    grid = [(exact(values), number) for number, values in enumerate(itertools.product(*rows))]
    # sorting is stable, and the grid is in the order of ids
    return [number for _, number in sorted(grid, key=lambda entry: entry[0], reverse=True)[:k]]


def judged(inputs, k):
    return torch.tensor([judge(rows, k) for rows in zip(*inputs, strict=True)])


def check(inputs, k):
    scores, ids = product_topk(*inputs, k)
    assert ids.dtype == torch.int64
    assert torch.equal(ids.cpu(), judged([scores.cpu() for scores in inputs], k))
    a, b = (scores.double().cpu() for scores in inputs)
    ids = ids.cpu()
    sums = a.gather(1, ids // b.shape[1]) + b.gather(1, ids % b.shape[1])
    torch.testing.assert_close(scores.cpu(), sums.to(scores.dtype), equal_nan=True)


def random_scores(rows, size, kind, dtype, device):
    """Scores without ties; with many; with infinities; with NaN."""
    scores = torch.randn(rows, size)
    if kind != "distinct":
        scores = (scores * 2).round() / 2
    if kind in ("infinite", "nan"):
        scores[torch.rand(rows, size) < 0.3] = -INF
        scores[torch.rand(rows, size) < 0.1] = INF
    if kind == "nan":
        scores[torch.rand(rows, size) < 0.1] = NAN
    return scores.to(dtype).to(device)


SIZES = [(1, 1, 1), (5, 7, 1), (5, 7, 3), (5, 7, 35), (8, 8, 8), (33, 16, 20), (2, 40, 64), (40, 1, 40), (1, 9, 4)]


@pytest.mark.parametrize("kind", ["distinct", "ties", "infinite", "nan"])
def test_matches_the_full_grid(engine, device, kind, interpreted):
    """Conformance case 34; ties go to the lowest id, infinities and NaN count as large numbers."""
    for n, m, k in SIZES:
        for dtype in DTYPES if not interpreted else [torch.float32]:
            if engine == "triton" and dtype == torch.float64:
                continue
            rows = 1 if interpreted else 4
            check([random_scores(rows, size, kind, dtype, device) for size in (n, m)], k)


@pytest.mark.parametrize("kind", ["distinct", "ties", "infinite", "nan", "crowded", "in order", "alike"])
@pytest.mark.parametrize("size", [(512, 300, 3), (130, 64, 2)])
def test_long_halves(engine, device, kind, size, interpreted):
    """A kernel sorts only what is not less than the best of some groups; "crowded": more than it has room for."""
    *lengths, k = size
    for dtype in DTYPES[1:] if not interpreted else [torch.float32]:
        inputs = []
        for length in lengths:
            scores = random_scores(
                2, length, "distinct" if kind in ("crowded", "in order", "alike") else kind, dtype, "cpu"
            )
            if kind == "crowded":
                # all the best are in one group of the four or eight
                scores[:, 1 :: 4 if k == 2 else 8] += 50
            elif kind == "in order":
                scores = scores.sort(1, descending=True)[0]
            elif kind == "alike":
                scores = torch.zeros_like(scores)
            inputs.append(scores.to(device))
        expected = in_torch([scores.double() for scores in inputs], k)
        scores, ids = product_topk(*inputs, k)
        assert torch.equal(ids, expected)
        a, b = (scores.double() for scores in inputs)
        sums = a.gather(1, ids // b.shape[1]) + b.gather(1, ids % b.shape[1])
        torch.testing.assert_close(scores, sums.to(scores.dtype), equal_nan=True)


def test_every_k_of_a_square(engine, device, interpreted):
    """Conformance case 34: k up to n * n."""
    size = 4 if interpreted else 9
    inputs = [random_scores(2, size, "ties", torch.float32, device) for _ in range(2)]
    # a kernel is compiled for each k
    for k in (1, size, size * size) if interpreted else (1, 2, 3, 7, size, 17, 40, 64, 80, size * size):
        check(inputs, k)


def test_the_staircase_is_enough():
    """Conformance case 35: no pair outside of (r + 1)(s + 1) <= k, and as few as there should be."""
    assert [len(staircase(k, k, k)[0]) for k in (8, 16, 32, 64, 128, 256)] == [20, 50, 119, 280, 645, 1466]
    for k in (1, 2, 3, 5, 8, 13, 40, 128):
        inputs = [random_scores(2, 16, kind, torch.float64, "cpu") for kind in ("ties", "distinct")]
        assert torch.equal(in_torch(inputs, k), judged(inputs, k))


def test_sums_that_round_to_the_same_number_are_told_apart(engine, device):
    """1 and 2 vanish beside 2**30 in float32, and 1e-30 beside 1 in float64, but not in the order."""
    a = torch.tensor([[1.0, 2, -(2.0**30)]], device=device)
    b = torch.tensor([[2.0**30, 0]], device=device)
    _, ids = product_topk(a, b, 6)
    assert ids.tolist() == [[2, 0, 3, 1, 4, 5]]
    a = torch.tensor([[1e-30, 2e-30, 0]], device=device)
    _, ids = product_topk(a, torch.tensor([[1.0]], device=device), 3)
    assert ids.tolist() == [[1, 0, 2]]


def test_large_k(engine, device, interpreted):
    """The kernel's limit of 256, and beyond it."""
    if interpreted:
        pytest.skip("thousands of times slower")
    for k in (128, 256, 300):
        inputs = [random_scores(3, size, "ties", torch.float32, device) for size in (40, 33)]
        check(inputs, k)


def test_any_number_of_dimensions_and_strides(engine, device, interpreted):
    a, b = torch.randn(2, 3, 6, device=device), torch.randn(2, 3, 5, device=device)
    scores, ids = product_topk(a, b, 4)
    assert scores.shape == ids.shape == (2, 3, 4)
    flat = product_topk(a.view(6, 6), b.view(6, 5), 4)
    assert torch.equal(flat[1].view(2, 3, 4), ids)
    assert torch.equal(product_topk(a[0, 0], b[0, 0], 4)[1], ids[0, 0])
    wide = torch.zeros(2, 3, 18, device=device)
    wide[..., ::3] = a
    turned = b.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(product_topk(wide[..., ::3], turned, 4)[1], ids)
    same = product_topk(a[:1, :1].expand(2, 3, 6), b, 4)[1]
    assert torch.equal(same, product_topk(a[:1, :1].repeat(2, 3, 1), b, 4)[1])
    for lead in ((0,), (2, 0)):
        assert product_topk(torch.zeros(*lead, 6, device=device), torch.zeros(*lead, 5, device=device), 4)[1].shape == (
            *lead,
            4,
        )


def test_dtypes_promote(engine, device):
    a, b = torch.randn(2, 4, device=device), torch.randn(2, 3, device=device).bfloat16()
    scores, ids = product_topk(a, b, 3)
    assert scores.dtype == torch.float32
    assert torch.equal(ids, product_topk(a, b.float(), 3)[1])


def test_repeats_bit_for_bit(engine, device):
    inputs = [random_scores(3, 16, "ties", torch.float32, device) for _ in range(2)]
    first = product_topk(*inputs, 8)
    for _ in range(3):
        for again, before in zip(product_topk(*inputs, 8), first, strict=True):
            assert torch.equal(again, before)


# --- more than two ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [(3, 4, 2), (4, 3, 2, 3)])
@pytest.mark.parametrize("kind", ["distinct", "ties", "nan"])
def test_more_than_two_inputs(sizes, kind):
    inputs = [random_scores(3, size, kind, torch.float64, "cpu") for size in sizes]
    for k in (1, 5, math.prod(sizes)):
        scores, ids = product_topk(inputs, k=k)
        assert torch.equal(ids, judged(inputs, k))
        grid = sum(
            part.view(3, *(size if at == place else 1 for at, size in enumerate(sizes)))
            for place, part in enumerate(inputs)
        )
        torch.testing.assert_close(scores, grid.flatten(1).gather(1, ids), equal_nan=True)


def test_two_inputs_as_a_sequence():
    inputs = [torch.randn(2, 4), torch.randn(2, 3)]
    for one, other in zip(product_topk(inputs, k=5), product_topk(*inputs, 5), strict=True):
        assert torch.equal(one, other)


# --- gradients and transforms ----------------------------------------------------------------------------------------
def test_gradients_go_to_both(engine, device):
    a = torch.tensor([[3.0, 1, 2]], device=device, requires_grad=True)
    b = torch.tensor([[10.0, 0]], device=device, requires_grad=True)
    scores, ids = product_topk(a, b, 4)
    assert ids.tolist() == [[0, 4, 2, 1]]
    assert scores.tolist() == [[13, 12, 11, 3]]
    assert not ids.requires_grad
    scores.backward(torch.tensor([[1.0, 2, 4, 8]], device=device))
    assert a.grad.tolist() == [[9, 4, 2]]
    assert b.grad.tolist() == [[7, 8]]


def test_gradcheck():
    inputs = [torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for engine in ("eager", "cpu"):
        with use_backend(engine):
            assert torch.autograd.gradcheck(lambda a, b: product_topk(a, b, 4)[0], inputs, check_forward_ad=True)
            assert torch.autograd.gradgradcheck(lambda a, b: product_topk(a, b, 4)[0].exp(), inputs)
    inputs.append(torch.randn(2, 3, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda *given: product_topk(given, k=4)[0], inputs)


def test_function_transforms():
    a, b = torch.randn(3, 4, 6), torch.randn(3, 4, 5)
    expected = product_topk(a, b, 4)

    def plain(a, b):
        return (a[..., :, None] + b[..., None, :]).flatten(-2).topk(4)[0].square().sum()

    def ours(a, b):
        return product_topk(a, b, 4)[0].square().sum()

    for dims in ((0, 0), (1, 1), (0, None)):
        given = (a, b) if dims[1] is not None else (a, b[0])
        moved = [x if dim is None else x.movedim(0, dim) for x, dim in zip(given, dims, strict=True)]
        out = torch.vmap(lambda a, b: product_topk(a, b, 4), dims)(*moved)
        if dims[1] is not None:
            for one, other in zip(out, expected, strict=True):
                assert torch.equal(one, other)
        grads = [torch.vmap(torch.func.grad(function, (0, 1)), dims)(*moved) for function in (ours, plain)]
        torch.testing.assert_close(*grads)
    tangents = torch.randn_like(a), torch.randn_like(b)
    torch.testing.assert_close(*(torch.func.jvp(function, (a, b), tangents) for function in (ours, plain)))
    torch.testing.assert_close(*(torch.func.hessian(function)(a[0], b[0]) for function in (ours, plain)))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_whole(compiler):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(lambda a, b: product_topk(a, b, 3), fullgraph=True, backend=counter)
    for rows in (2, 5, 9):
        both = []
        a, b = torch.randn(rows, 4), torch.randn(rows, 6)
        for function in (compiled, lambda a, b: product_topk(a, b, 3)):
            leaves = [x.clone().requires_grad_() for x in (a, b)]
            scores, ids = function(*leaves)
            both.append((scores.detach(), ids, torch.autograd.grad(scores.square().sum(), leaves)))
        torch.testing.assert_close(*both)
    assert counter.frame_count <= 2
    torch.library.opcheck(torch.ops.embedfuse.product_topk_ids.default, (a, b, 3))


# --- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "`k` must be from 1 to 12", (torch.ones(2, 3), torch.ones(2, 4), 13)),
        (ValueError, "`k` must be from 1 to 12", (torch.ones(2, 3), torch.ones(2, 4), 0)),
        (TypeError, "`k`", (torch.ones(2, 3), torch.ones(2, 4), 2.0)),
        (TypeError, "`k`", (torch.ones(2, 3), torch.ones(2, 4))),
        (TypeError, "`k`", (torch.ones(2, 3), torch.ones(2, 4), True)),
        (ValueError, "same dimensions", (torch.ones(2, 3), torch.ones(3, 4), 2)),
        (ValueError, "same dimensions", (torch.ones(2, 3), torch.ones(4), 2)),
        (ValueError, "same dimensions", (torch.tensor(1.0), torch.tensor(1.0), 1)),
        (TypeError, "float32", (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 4), 2)),
        (TypeError, "`scores_a`", (torch.ones(2, 3), None, 2)),
        (TypeError, "`scores_a`", ([torch.ones(2, 3)], None, 2)),
        (ValueError, "`scores_b`", ([torch.ones(2, 3)] * 2, torch.ones(2, 3), 2)),
    ],
)
def test_refusals(error, message, arguments):
    """Conformance case 40."""
    with pytest.raises(error, match=message):
        product_topk(*arguments)
