"""The gather functions under everything that differentiates, batches, casts, traces or compiles."""

import warnings

import pytest
import torch
from gather_judge import random_problem
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from embedfuse.torch import use_backend
from embedfuse.torch.gather import gather_dot, gather_reduce_sum, scatter_rows

func = torch.func


@pytest.fixture(params=["eager", "cpu"])
def engine(request):
    """Backends whose numbers may be compared to the last bit of float64."""
    with use_backend(request.param):
        yield request.param


def plain_sum(table, indices, weights):
    return torch.einsum("...k,...kd->...d", weights, table[indices])


def plain_dot(table, x, indices):
    return torch.einsum("...kd,...d->...k", table[indices], x)


def plain_scatter(indices, weights, grad, rows):
    values = weights[..., None] * grad[..., None, :]
    return values.new_zeros(rows, grad.shape[-1]).index_add(0, indices.flatten(), values.flatten(0, -2))


PROBLEM = random_problem(rows=5, dim=3, bags=4, places=3)
# ours, plain, and the two inputs to differentiate
CASES = {
    "sum": (
        lambda table, weights: gather_reduce_sum(table, PROBLEM.indices, weights),
        lambda table, weights: plain_sum(table, PROBLEM.indices, weights),
        (PROBLEM.table, PROBLEM.weights),
    ),
    "dot": (
        lambda table, x: gather_dot(table, x, PROBLEM.indices),
        lambda table, x: plain_dot(table, x, PROBLEM.indices),
        (PROBLEM.table, PROBLEM.x),
    ),
    "scatter": (
        lambda weights, grad: scatter_rows(PROBLEM.indices, weights, grad, 5),
        lambda weights, grad: plain_scatter(PROBLEM.indices, weights, grad, 5),
        (PROBLEM.weights, PROBLEM.x),
    ),
}
each_function = pytest.mark.parametrize("name", CASES)


@each_function
def test_gradcheck_and_gradgradcheck(engine, name):
    """Conformance case 26; forward mode too, and forward mode over backward."""
    ours, _, inputs = CASES[name]
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(ours, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, inputs, check_fwd_over_rev=True)


@each_function
def test_third_derivatives(engine, name):
    ours, plain, inputs = CASES[name]
    results = []
    for function in (ours, plain):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        value = function(*leaves).pow(3).sum()
        for _ in range(3):
            grads = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum(grad.pow(2).sum() for grad in grads)
        results.append(value)
    torch.testing.assert_close(*results)


@each_function
def test_frozen_inputs(engine, name):
    """Conformance case 24: each alone, and neither."""
    ours, plain, inputs = CASES[name]
    for which in ((True, False), (False, True)):
        leaves = [tensor.clone().requires_grad_(learns) for tensor, learns in zip(inputs, which, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = [torch.autograd.grad(function(*leaves).square().sum(), wanted) for function in (ours, plain)]
        torch.testing.assert_close(*grads)
    assert not ours(*inputs).requires_grad


def test_what_is_not_needed_is_not_made(engine, monkeypatch):
    """No gradient of weights that need none, and the table is not kept for it."""
    from embedfuse.torch.gather import functions as gather_functions

    made = []
    for name in ("gather_sum", "gather_dot", "scatter_sum"):
        body = getattr(gather_functions.bodies, name)
        monkeypatch.setattr(
            gather_functions.bodies, name, lambda *given, name=name, body=body: made.append(name) or body(*given)
        )
    table = PROBLEM.table.clone().requires_grad_()
    out = gather_reduce_sum(table, PROBLEM.indices, PROBLEM.weights)
    with torch.no_grad():
        table.zero_()
    out.sum().backward()
    assert made == ["gather_sum", "scatter_sum"]
    made.clear()
    weights = PROBLEM.weights.clone().requires_grad_()
    gather_reduce_sum(PROBLEM.table, PROBLEM.indices, weights).sum().backward()
    assert made == ["gather_sum", "gather_dot"]
    made.clear()
    x = PROBLEM.x.clone().requires_grad_()
    gather_dot(PROBLEM.table, x, PROBLEM.indices).sum().backward()
    assert made == ["gather_dot", "gather_sum"]


@each_function
def test_function_transforms(engine, name):
    """Conformance case 27: grad, jvp, and every pair of modes but forward in forward."""
    ours, plain, inputs = CASES[name]

    def scalar(function):
        return lambda *given: function(*given).sin().sum()

    tangents = tuple(torch.randn_like(tensor) for tensor in inputs)
    for transform in (
        lambda f: func.grad(scalar(f), (0, 1))(*inputs),
        lambda f: func.jvp(f, inputs, tangents),
        lambda f: func.vjp(f, *inputs)[1](f(*inputs)),
        lambda f: func.jacrev(f, (0, 1))(*inputs),
        lambda f: func.jacfwd(f, (0, 1))(*inputs),
        lambda f: func.hessian(scalar(f), (0, 1))(*inputs),
        lambda f: func.jacrev(func.jacrev(scalar(f), (0, 1)), (0, 1))(*inputs),
        lambda f: func.jacrev(func.jacfwd(scalar(f), (0, 1)), (0, 1))(*inputs),
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop")
            mine = transform(ours)
        torch.testing.assert_close(mine, transform(plain))
    # torch itself would lose terms, without a word
    with pytest.raises(NotImplementedError, match="jacfwd of jacrev"):
        func.jacfwd(func.jacfwd(ours))(*inputs)
    with pytest.raises(NotImplementedError, match="linearize"):
        func.linearize(ours, *inputs)


BATCHES = [(0, None, None), (None, 0, 0), (0, 0, 0), (1, None, 0), (2, 1, 1), (None, None, 0), (0, 2, None)]


@pytest.mark.parametrize("dims", BATCHES)
def test_vmap_is_one_call(engine, dims, monkeypatch):
    """Conformance case 27: batched tables, indices and weights, in every place, as a loop; and their gradients."""
    from embedfuse.torch.gather import functions as gather_functions

    calls = []
    body = gather_functions.bodies.gather_sum
    monkeypatch.setattr(gather_functions.bodies, "gather_sum", lambda *given: calls.append(1) or body(*given))

    def stacked(tensor, dim, change):
        return tensor if dim is None else torch.stack([tensor, change(tensor), tensor.flip(0)], dim)

    table = stacked(PROBLEM.table, dims[0], lambda tensor: tensor * 2)
    indices = stacked(PROBLEM.indices, dims[1], lambda tensor: (tensor + 1) % 5)
    weights = stacked(PROBLEM.weights, dims[2], lambda tensor: tensor - 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")
        out = torch.vmap(gather_reduce_sum, dims)(table, indices, weights)
        assert len(calls) == 1
        torch.testing.assert_close(out, torch.vmap(plain_sum, dims)(table, indices, weights))

        def loss(function):
            return lambda table, indices, weights: function(table, indices, weights).sin().sum()

        grads = [
            torch.vmap(func.grad(loss(function), (0, 2)), dims)(table, indices, weights)
            for function in (gather_reduce_sum, plain_sum)
        ]
        torch.testing.assert_close(*grads)
        x = stacked(PROBLEM.x, dims[2], lambda tensor: tensor + 1)
        order = (dims[0], dims[2], dims[1])
        torch.testing.assert_close(
            torch.vmap(gather_dot, order)(table, x, indices), torch.vmap(plain_dot, order)(table, x, indices)
        )
        rest = (dims[1], dims[2], dims[2], None)
        if rest != (None,) * 4:
            torch.testing.assert_close(
                torch.vmap(scatter_rows, rest)(indices, weights, x, 5),
                torch.vmap(plain_scatter, rest)(indices, weights, x, 5),
            )


def test_vmap_of_indices_outside_of_their_own_table(engine):
    """An index of the first table must not reach into the second."""
    tables = torch.randn(2, 4, 3)
    indices = torch.tensor([[[0, 5]], [[1, 2]]])
    with pytest.raises(IndexError):
        torch.vmap(gather_reduce_sum)(tables, indices)
    out = torch.vmap(lambda table, ids: gather_reduce_sum(table, ids, out_of_range="drop"))(tables, indices)
    torch.testing.assert_close(out, torch.stack([tables[0, :1], tables[1, 1:3].sum(0, keepdim=True)]))


def test_vmap_in_vmap(engine):
    tables = torch.randn(2, 3, 5, 4)
    indices = torch.randint(0, 5, (2, 3, 6, 2))
    out = torch.vmap(torch.vmap(lambda table, ids: gather_reduce_sum(table, ids)))(tables, indices)
    torch.testing.assert_close(out, torch.stack([
        torch.stack([table[ids].sum(-2) for table, ids in zip(*pair, strict=True)])
        for pair in zip(tables, indices, strict=True)
    ]))  # fmt: skip


def test_rival_fault_autocast(engine):
    """Conformance case 11: a float32 table with the bfloat16 scores of a linear layer; torch's own op refuses."""
    table = torch.randn(7, 4, requires_grad=True)
    query = torch.nn.Linear(4, 4)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        scores = query(x)
        assert scores.dtype == torch.bfloat16
        indices = torch.randint(0, 7, (3, 4))
        out = gather_reduce_sum(table, indices, scores)
        dots = gather_dot(table, scores, indices)
        assert out.dtype == dots.dtype == torch.float32
        (out.sum() + dots.sum() + scatter_rows(indices, scores, x, 7).sum()).backward()
    assert table.grad.dtype == torch.float32
    assert query.weight.grad.any()


# --- ops and compilers -----------------------------------------------------------------------------------------------
def test_ops_keep_their_contract(engine):
    ops, problem = torch.ops.embedfuse, PROBLEM
    ids, offsets = problem.indices.flatten(), torch.arange(5) * 3
    table, weights, x = (
        tensor.clone().requires_grad_() for tensor in (problem.table, problem.weights.flatten(), problem.x)
    )
    for op, arguments in (
        (ops.gather_sum, (table, weights, ids, offsets, "raise")),
        (ops.gather_sum, (table, None, ids, offsets, "drop")),
        (ops.gather_dot, (table, x, ids, offsets, "raise")),
        (ops.scatter_sum, (x, weights, ids, offsets, 5, torch.float64, "raise")),
        (ops.scatter_sum, (x, None, ids, offsets, 5, torch.float32, "ignore")),
    ):
        torch.library.opcheck(op.default, arguments)


def layer(table, x, indices, weights):
    """All three functions one after the other."""
    dots = gather_dot(table, x, indices)
    out = gather_reduce_sum(table, indices, torch.softmax(dots * weights, -1))
    return out.square().sum() + scatter_rows(indices, weights, out, table.shape[0]).square().sum()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_whole_and_once_for_all_sizes(compiler):
    """Conformance case 46."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for bags in (3, 4, 7, 12, 5):
        problem = random_problem(bags=bags, dtype=torch.float32)
        grads = []
        for function in (layer, compiled):
            leaves = [tensor.clone().requires_grad_() for tensor in (problem.table, problem.x, problem.weights)]
            value = function(leaves[0], leaves[1], problem.indices, leaves[2])
            grads.append((value.detach(), torch.autograd.grad(value, leaves)))
        torch.testing.assert_close(*grads)
    # once for the first size, once for all others
    assert counter.frame_count <= 2
    with pytest.raises(IndexError):
        compiled(problem.table, problem.x, problem.indices + 11, problem.weights)


def test_shapes_without_numbers():
    with FakeTensorMode():
        table, indices = torch.randn(10, 17), torch.zeros(2, 3, 4, dtype=torch.int64)
        assert gather_reduce_sum(table, indices, torch.randn(2, 3, 4)).shape == (2, 3, 17)
        assert gather_dot(table, torch.randn(2, 3, 17), indices).shape == (2, 3, 4)
        assert scatter_rows(indices, None, torch.randn(2, 3, 17), 6).shape == (6, 17)
    table = torch.empty(10, 17, device="meta")
    assert gather_reduce_sum(table, torch.empty((3, 2), dtype=torch.int64, device="meta")).shape == (3, 17)


def test_inference_mode_spoils_no_later_call(engine):
    table = torch.randn(10, 19, requires_grad=True)
    indices = torch.tensor([[1, 2]])
    with torch.inference_mode():
        gather_reduce_sum(table, indices)
    gather_reduce_sum(table, indices).sum().backward()
    assert table.grad.sum() == 38


def test_exports(engine):
    class Memory(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(10, 4), requires_grad=False)

        def forward(self, indices, weights):
            return gather_reduce_sum(self.table, indices, weights)

    module, dim = Memory(), torch.export.Dim("tokens")
    given = torch.randint(0, 10, (3, 2)), torch.randn(3, 2)
    exported = torch.export.export(module, given, dynamic_shapes=({0: dim}, {0: dim})).module()
    for count in (3, 5, 8):
        indices, weights = torch.randint(0, 10, (count, 2)), torch.randn(count, 2)
        assert torch.equal(exported(indices, weights), module(indices, weights))
