"""`gather_reduce_sum`, `gather_dot` and `scatter_rows` on every backend against plain loops, in all their forms."""

import pytest
import torch
from gather_judge import random_problem
from tolerance import assert_same_bits

from embedfuse.torch import use_backend
from embedfuse.torch.gather import gather_dot, gather_reduce_sum, scatter_rows

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def engine(placement, backend):
    """Each backend in turn, chosen."""
    with use_backend(placement[0]):
        yield placement[0]


def dtypes_of(engine):
    return DTYPES if engine != "triton" else DTYPES[1:]


def answers_of(problem, lead=None):
    """All values and gradients; the bags as `lead`, several dimensions."""
    shape = (problem.indices.shape[0],) if lead is None else lead
    indices = problem.indices.reshape(shape + problem.indices.shape[1:])
    given = {
        name: tensor.detach().clone().reshape(shape + tensor.shape[1:]).requires_grad_()
        for name, tensor in vars(problem).items()
        if name in ("weights", "x")
    }
    table = problem.table.detach().clone().requires_grad_()
    out = gather_reduce_sum(table, indices, given["weights"])
    answers = {"sum": out}
    grads = torch.autograd.grad(out, [table, given["weights"]], given["x"].detach())
    answers |= dict(zip(("sum.table", "sum.weights"), grads, strict=True))
    dots = gather_dot(table, given["x"], indices)
    grads = torch.autograd.grad(dots, [table, given["x"]], problem.scores.view(dots.shape).to(dots.dtype))
    answers |= {"dot": dots} | dict(zip(("dot.table", "dot.x"), grads, strict=True))
    rows = scatter_rows(indices, given["weights"], given["x"], problem.table.shape[0])
    grads = torch.autograd.grad(rows, [given["weights"], given["x"]], problem.rows)
    answers |= {"scatter": rows} | dict(zip(("scatter.weights", "scatter.grad"), grads, strict=True))
    return answers


# --- values and gradients --------------------------------------------------------------------------------------------
def test_every_size(engine, device, interpreted):
    """Conformance case 2."""
    sizes = [
        (bags, places, dim, rows)
        for bags in (0, 1, 2, 7, 33)
        for places in (0, 1, 3, 32, 128)
        for dim in (1, 6, 63, 64, 144, 288, 1024)
        for rows in (1, 10, 1000)
    ]
    if interpreted:
        sizes = [(0, 3, 6, 10), (2, 0, 6, 10), (1, 1, 1, 1), (2, 3, 6, 1), (7, 3, 63, 10), (2, 32, 144, 1000)]
    for bags, places, dim, rows in sizes:
        dtype = torch.float32 if engine == "triton" or (bags + places) % 2 else torch.float64
        problem = random_problem(rows, dim, bags, places, dtype).to(device)
        problem.check(answers_of(problem))


def test_no_width_and_no_rows(engine, device):
    table = torch.zeros(4, 0, device=device, requires_grad=True)
    indices = torch.tensor([[1, 3]], device=device)
    weights = torch.ones(1, 2, device=device, requires_grad=True)
    out = gather_reduce_sum(table, indices, weights)
    assert out.shape == (1, 0)
    out.sum().backward()
    assert table.grad.shape == (4, 0)
    assert weights.grad.tolist() == [[0, 0]]
    assert gather_dot(table, torch.zeros(1, 0, device=device), indices).tolist() == [[0, 0]]
    nothing = torch.zeros(2, 0, dtype=torch.int64, device=device)
    empty = torch.zeros(0, 3, device=device, requires_grad=True)
    out = gather_reduce_sum(empty, nothing)
    assert out.tolist() == [[0] * 3] * 2
    out.sum().backward()
    assert scatter_rows(nothing, None, torch.ones(2, 3, device=device), 0).shape == (0, 3)


def test_dtypes_of_tables_weights_and_ids(engine, device, interpreted):
    """Conformance cases 9 and 10: every pair of float dtypes, gradients in each one's own, int32 as int64."""
    small = {"rows": 4, "dim": 7, "bags": 2, "places": 3} if interpreted else {"dim": 33}
    for dtype in dtypes_of(engine):
        for weights_dtype in DTYPES if not interpreted else [torch.float32]:
            problem = random_problem(dtype=dtype, weights_dtype=weights_dtype, **small).to(device)
            answers = answers_of(problem)
            assert answers["sum"].dtype == answers["sum.table"].dtype == answers["dot.x"].dtype == dtype
            assert answers["sum.weights"].dtype == answers["scatter.weights"].dtype == weights_dtype
            assert answers["dot"].dtype == dtype
            problem.check(answers)
            problem.indices = problem.indices.to(torch.int32)
            for name, answer in answers_of(problem).items():
                assert torch.equal(answer, answers[name]), name


def test_vectors_of_another_dtype_than_the_table(engine, device):
    problem = random_problem(dtype=torch.bfloat16).to(device)
    table = problem.table.clone().requires_grad_()
    x = problem.x.float().requires_grad_()
    dots = gather_dot(table, x, problem.indices)
    assert dots.dtype == torch.float32
    table_grad, x_grad = torch.autograd.grad(dots, [table, x], problem.scores.float())
    assert (table_grad.dtype, x_grad.dtype) == (torch.bfloat16, torch.float32)
    problem.check({"dot": dots, "dot.table": table_grad})
    rows = scatter_rows(problem.indices, problem.weights, problem.x, 11, dtype=torch.float32)
    assert rows.dtype == torch.float32
    problem.check({"scatter": rows})


def test_any_number_of_dimensions(engine, device):
    """Conformance case 9: the same bits as flat ones; other integer types too."""
    problem = random_problem(bags=12, dtype=torch.float32).to(device)
    flat = answers_of(problem)
    for lead in ((12,), (3, 4), (2, 3, 1, 2)):
        for name, answer in answers_of(problem, lead).items():
            assert torch.equal(answer.reshape(flat[name].shape), flat[name]), (lead, name)
    one = gather_reduce_sum(problem.table, problem.indices[0], problem.weights[0])
    assert torch.equal(one, flat["sum"][0])
    assert torch.equal(gather_dot(problem.table, problem.x[0], problem.indices[0]), flat["dot"][0])
    narrow = gather_reduce_sum(problem.table, problem.indices.to(torch.uint8), problem.weights)
    assert torch.equal(narrow, flat["sum"])
    for lead in ((0,), (2, 0), (0, 3)):
        indices = torch.zeros(*lead, 4, dtype=torch.int64, device=device)
        assert gather_reduce_sum(problem.table, indices).shape == (*lead, 5)
        assert gather_dot(problem.table, torch.zeros(*lead, 5, device=device), indices).shape == (*lead, 4)
        assert not scatter_rows(indices, None, torch.zeros(*lead, 5, device=device), 3).any()


def test_no_weights_are_ones(engine, device):
    problem = random_problem(dtype=torch.float32).to(device)
    ones = torch.ones_like(problem.weights)
    table = problem.table.clone().requires_grad_()
    outs = [gather_reduce_sum(table, problem.indices, weights) for weights in (None, ones)]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*[torch.autograd.grad(out, table, problem.x)[0] for out in outs])
    torch.testing.assert_close(*[scatter_rows(problem.indices, weights, problem.x, 11) for weights in (None, ones)])


def test_views_equal_contiguous_tensors(engine, device):
    """Conformance case 12: strided, transposed, sliced and expanded tables, indices, weights and vectors."""
    problem = random_problem(bags=6, places=4, dtype=torch.float32).to(device)
    expected = answers_of(problem)

    def spread(tensor):
        wide = tensor.new_zeros(tensor.shape[0] * 2, tensor.shape[1] * 3)
        wide[::2, 1::3] = tensor
        return wide[::2, 1::3]

    for change in (spread, lambda tensor: tensor.t().contiguous().t()):
        table, indices, weights, x = (
            change(tensor) for tensor in (problem.table, problem.indices, problem.weights, problem.x)
        )
        assert not table.is_contiguous()
        table.requires_grad_()
        out = gather_reduce_sum(table, indices, weights)
        assert torch.equal(out, expected["sum"])
        assert torch.equal(torch.autograd.grad(out, table, x)[0], expected["sum.table"])
        assert torch.equal(gather_dot(table, x, indices), expected["dot"])
        assert torch.equal(scatter_rows(indices, weights, x, 11), expected["scatter"])
    # one bag for all, one weight for all
    row, one = problem.indices[:1].expand(6, 4), torch.ones(1, 1, device=device).expand(6, 4)
    torch.testing.assert_close(
        gather_reduce_sum(problem.table, row, one), gather_reduce_sum(problem.table, problem.indices[:1]).expand(6, 5)
    )


# --- worked examples -------------------------------------------------------------------------------------------------
TABLE = [[1, 2], [3, 4], [5, 6], [7, 8]]
INDICES = [[0, 2, 2], [3, 0, 2]]
WEIGHTS = [[0.5, 1, -1], [2, 0.25, 0.1]]


def test_worked_example(engine, device):
    """Conformance case 1."""
    dtype = torch.float32 if engine == "triton" else torch.float64
    table = torch.tensor(TABLE, dtype=dtype, device=device, requires_grad=True)
    weights = torch.tensor(WEIGHTS, dtype=dtype, device=device, requires_grad=True)
    indices = torch.tensor(INDICES, device=device)
    out = gather_reduce_sum(table, indices, weights)
    exact = {"rtol": 0, "atol": 2e-6 if engine == "triton" else 1e-14}
    expected = torch.tensor([[0.5, 1.0], [14.75, 17.1]], dtype=dtype, device=device)
    torch.testing.assert_close(out.detach(), expected, **exact)
    out.backward(torch.tensor([[1, -1], [2, 3]], dtype=dtype, device=device))
    expected = torch.tensor([[1, 0.25], [0, 0], [0.2, 0.3], [4, 6]], dtype=dtype, device=device)
    torch.testing.assert_close(table.grad, expected, **exact)
    assert weights.grad.tolist() == [[-1, -1, -1], [38, 8, 28]]
    x = torch.tensor([[1, 2], [-1, 0.5]], dtype=dtype, device=device)
    assert gather_dot(table, x, indices).tolist() == [[5, 17, 17], [-3, 0, -2]]


# --- faults of others ------------------------------------------------------------------------------------------------
# names with "rival_fault": another library gets this wrong
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rival_fault_upstream_that_is_not_constant(engine, device, dtype):
    """Conformance case 16: TensorFlow Addons left the row stride out, and only tried all-ones upstreams."""
    problem = random_problem(rows=6, dim=16, bags=8, places=5, dtype=dtype).to(device)
    problem.check(answers_of(problem))


def test_rival_fault_upstream_that_is_expanded(engine, device):
    """Conformance case 17: Meta's kernel reads `out.sum().backward()`'s upstream as if it were contiguous."""
    problem = random_problem(dim=6, bags=10, dtype=torch.float32).to(device)
    row = problem.x[:1]
    forms = {
        "expanded": (row.expand(10, 6), row.repeat(10, 1)),
        "one number": (problem.x[0, 0].expand(10, 6), problem.x[0, 0].repeat(10, 6)),
        "one column": (problem.x[:, :1].expand(10, 6), problem.x[:, :1].repeat(1, 6)),
        "transposed": (problem.x.t().contiguous().t(), problem.x),
        "sliced": (problem.x.repeat(2, 2)[::2, 1:7], problem.x.repeat(2, 2)[::2, 1:7].clone()),
    }
    for name, (upstream, plain) in forms.items():
        grads = []
        for given in (upstream, plain):
            table = problem.table.clone().requires_grad_()
            weights = problem.weights.clone().requires_grad_()
            grads.append(
                torch.autograd.grad(gather_reduce_sum(table, problem.indices, weights), [table, weights], given)
            )
        for one, other in zip(*grads, strict=True):
            # rows that cannot be read in wide words are summed in another order on a GPU
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)
    table = problem.table.clone().requires_grad_()
    gather_reduce_sum(table, problem.indices, problem.weights).sum().backward()
    # the upstream of the other two is a table, or weights, to their gradients
    x, weights = problem.x.clone().requires_grad_(), problem.weights.clone().requires_grad_()
    gather_dot(problem.table, x, problem.indices).sum().backward()
    dot_grad = x.grad
    x.grad = None
    scatter_rows(problem.indices, weights, x, 11).sum().backward()
    problem.rows, problem.scores = torch.ones_like(problem.rows), torch.ones_like(problem.scores)
    problem.check({"dot.x": dot_grad, "scatter.grad": x.grad, "scatter.weights": weights.grad})
    problem.x = torch.ones_like(problem.x)
    problem.check({"sum.table": table.grad})


def test_rival_fault_gradient_of_any_strategy(engine, device, interpreted):
    """Conformance cases 18 and 20: Meta's "lock" gives zeros. Duplicates in a bag, across bags, one row for all."""
    sizes = [(1, 7, 5), (2, 40, 3), (3, 5, 300), (50, 64, 1)]
    for rows, bags, places in [(1, 3, 5), (2, 1, 70)] if interpreted else sizes:
        problem = random_problem(rows, 6, bags, places, torch.float32).to(device)
        answers = answers_of(problem)
        assert answers["sum.table"].any()
        problem.check(answers)


def test_rival_fault_sums_in_the_storage_type(engine, device, interpreted):
    """Conformance cases 8 and 19: 4096 ones are 4096 in bfloat16 and float16, forward and backward."""
    count = 600 if interpreted else 4096
    for dtype in (torch.bfloat16, torch.float16):
        table = torch.ones(3, 2, dtype=dtype, device=device, requires_grad=True)
        indices = torch.full((1, count), 1, device=device)
        out = gather_reduce_sum(table, indices)
        nearest = float(torch.tensor(float(count), dtype=dtype))
        assert out.tolist() == [[nearest] * 2]
        out.backward(torch.ones_like(out))
        assert table.grad.tolist() == [[0, 0], [nearest] * 2, [0, 0]]
        rows = scatter_rows(indices.t(), None, torch.ones(count, 2, dtype=dtype, device=device), 3)
        assert rows.tolist() == table.grad.tolist()


def test_rival_fault_widths_and_sizes_that_are_no_powers_of_two(engine, device, interpreted):
    """Meta's kernel refuses dim 6, and tables whose rows are no multiple of 8."""
    for dim in (6,) if interpreted else (1, 6, 10, 63):
        problem = random_problem(rows=11, dim=dim, bags=2, places=10, dtype=torch.float32).to(device)
        problem.check(answers_of(problem))


def test_nan_of_a_row_shows_only_where_it_is_used(engine, device):
    """Conformance case 5; a weight of 0 does not hide it."""
    table = torch.ones(4, 3, device=device)
    table[2] = torch.nan
    indices = torch.tensor([[0, 1], [1, 2], [3, 3]], device=device)
    out = gather_reduce_sum(table, indices, torch.tensor([[1.0, 1], [1, 0], [0, 0]], device=device))
    assert out.isnan().all(1).tolist() == [False, True, False]


# --- order and bits --------------------------------------------------------------------------------------------------
def test_repeats_bit_for_bit(engine, device, interpreted):
    """Conformance case 29."""
    problem = random_problem(5, 7, 2 if interpreted else 50, 9, torch.float32).to(device)
    expected = answers_of(problem)
    for _ in range(1 if interpreted else 20):
        for name, answer in answers_of(problem).items():
            assert_same_bits(answer.detach().cpu().numpy(), expected[name].detach().cpu().numpy(), name)
    # the order of bags decides only the order of a row's sum
    order = torch.randperm(len(problem.indices), device=device)
    shuffled = scatter_rows(problem.indices[order], problem.weights[order], problem.x[order], 5)
    problem.check({"scatter": shuffled})


def test_bags_of_all_heads_are_the_sum_over_heads(engine, device):
    """Conformance case 36."""
    problem = random_problem(bags=6, places=12, dtype=torch.float32).to(device)
    together = gather_reduce_sum(problem.table, problem.indices, problem.weights)
    heads = gather_reduce_sum(problem.table, problem.indices.view(6, 3, 4), problem.weights.view(6, 3, 4))
    torch.testing.assert_close(heads.sum(1), together)


def test_columns_in_several_places_are_the_whole(engine, device, interpreted):
    """Conformance case 41: column shards of the table; outputs side by side, dot products summed."""
    problem = random_problem(dim=8, bags=2, dtype=torch.float32).to(device)
    whole = answers_of(problem)
    for count in (2,) if interpreted else (2, 4):
        outs, dots, table_grads, weights_grad = [], 0, [], 0
        for part, vectors in zip(problem.table.chunk(count, 1), problem.x.chunk(count, 1), strict=True):
            table, weights = part.clone().requires_grad_(), problem.weights.clone().requires_grad_()
            out = gather_reduce_sum(table, problem.indices, weights)
            out.backward(vectors)
            outs.append(out)
            table_grads.append(table.grad)
            weights_grad = weights_grad + weights.grad
            dots = dots + gather_dot(part, vectors, problem.indices)
        torch.testing.assert_close(torch.cat(outs, 1), whole["sum"])
        torch.testing.assert_close(torch.cat(table_grads, 1), whole["sum.table"])
        torch.testing.assert_close(weights_grad, whole["sum.weights"])
        torch.testing.assert_close(dots, whole["dot"])


# --- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_indices_outside_of_the_table(engine, device, bad):
    """Conformance case 13: named, in every function; dropped where asked for."""
    if device != "cpu":
        pytest.skip("a GPU reports at a later call")
    table, x = torch.ones(4, 3), torch.ones(2, 1, 3)
    indices = torch.tensor([[[0, 1]], [[bad, 2]]])
    calls = [
        lambda **options: gather_reduce_sum(table, indices, **options),
        lambda **options: gather_dot(table, x, indices, **options),
        lambda **options: scatter_rows(indices, None, x, 4, **options),
    ]
    for call in calls:
        with pytest.raises(IndexError, match=rf"\[0, 4\).*got {bad} at indices\[1, 0, 0\]"):
            call()
    for policy in ("drop", "ignore"):
        out, dots, rows = (call(out_of_range=policy) for call in calls)
        assert out.tolist() == [[[2] * 3], [[1] * 3]]
        assert dots.tolist() == [[[3, 3]], [[0, 3]]]
        assert rows.tolist() == [[1] * 3, [1] * 3, [1] * 3, [0] * 3]
    # an empty table has no rows at all
    with pytest.raises(IndexError):
        gather_reduce_sum(torch.ones(0, 3), torch.tensor([[0]]))


@pytest.mark.parametrize(
    ("error", "name", "change"),
    [
        (ValueError, "weights", {"weights": torch.ones(2, 4)}),
        (ValueError, "weights", {"weights": torch.ones(2)}),
        (TypeError, "weights", {"weights": torch.ones(2, 3, dtype=torch.int64)}),
        (ValueError, "params", {"params": torch.ones(4)}),
        (TypeError, "params", {"params": torch.ones(4, 2, dtype=torch.int32)}),
        (TypeError, "indices", {"indices": torch.ones(2, 3)}),
        (TypeError, "indices", {"indices": torch.ones(2, 3, dtype=torch.bool)}),
        (TypeError, "indices", {"indices": [[0, 1, 2]]}),
        (ValueError, "indices", {"indices": torch.tensor(1)}),
        (ValueError, "out_of_range", {"out_of_range": "clamp"}),
        (ValueError, "grad", {"grad": "rows"}),
        (TypeError, "grad_into", {"grad_into": torch.zeros(4, 2, dtype=torch.float16)}),
        (ValueError, "grad_into", {"grad_into": torch.zeros(4, 3)}),
        (ValueError, "grad_into", {"grad_into": torch.zeros(2, 4).t()}),
        (ValueError, "grad", {"grad_into": torch.zeros(4, 2), "grad": "sparse"}),
        (ValueError, "params", {"params": torch.ones(4, 2, device="meta")}),
    ],
)
def test_refusals_of_gather_reduce_sum(error, name, change):
    arguments = {"params": torch.ones(4, 2), "indices": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(error, match=f"`{name}`"):
        gather_reduce_sum(**(arguments | {"weights": torch.ones(2, 3)} | change))


@pytest.mark.parametrize(
    ("error", "name", "change"),
    [
        (ValueError, "x", {"x": torch.ones(2, 3)}),
        (ValueError, "x", {"x": torch.ones(3, 2)}),
        (ValueError, "x", {"x": torch.ones(2, 1, 2)}),
        (ValueError, "x", {"x": torch.ones(2)}),
        (TypeError, "x", {"x": torch.ones(2, 2, dtype=torch.int64)}),
        (ValueError, "table", {"table": torch.ones(1, 4, 2)}),
    ],
)
def test_refusals_of_gather_dot(error, name, change):
    arguments = {"table": torch.ones(4, 2), "indices": torch.zeros(2, 3, dtype=torch.int64), "x": torch.ones(2, 2)}
    with pytest.raises(error, match=f"`{name}`"):
        gather_dot(**(arguments | change))


@pytest.mark.parametrize(
    ("error", "name", "change"),
    [
        (ValueError, "grad", {"grad": torch.ones(3, 2)}),
        (ValueError, "grad", {"grad": torch.ones(2, 3, 2)}),
        (ValueError, "weights", {"weights": torch.ones(2, 2)}),
        (ValueError, "num_rows", {"num_rows": -1}),
        (TypeError, "dtype", {"dtype": torch.int64}),
    ],
)
def test_refusals_of_scatter_rows(error, name, change):
    indices = torch.zeros(2, 3, dtype=torch.int64)
    arguments = {"indices": indices, "weights": torch.ones(2, 3), "grad": torch.ones(2, 2), "num_rows": 4}
    with pytest.raises(error, match=f"`{name}`"):
        scatter_rows(**(arguments | change))
