"""Where the gradient of a table can go: dense, coalesced rows, a buffer, or a fused optimizer."""

import pytest
import torch
from gather_judge import random_problem

import embedfuse
from embedfuse.torch import EmbeddingCollection, FusedOptimizer, use_backend
from embedfuse.torch.gather import gather_dot, gather_reduce_sum


@pytest.fixture
def engine(placement, backend):
    """Each backend in turn, chosen."""
    with use_backend(placement[0]):
        yield placement[0]


def both(problem, table, **options):
    """The two functions of one table; a scalar whose upstream gradients are the problem's."""
    out = gather_reduce_sum(table, problem.indices, problem.weights, **options)
    dots = gather_dot(table, problem.x, problem.indices, **options)
    return (out * problem.x).sum() + (dots * problem.scores).sum()


def dense_grad(problem):
    table = problem.table.detach().clone().requires_grad_()
    both(problem, table).backward()
    return table.grad


# --- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_coalesced(engine, device, dtype):
    """Conformance case 21: distinct rows, ascending, and no others."""
    problem = random_problem(rows=20, bags=3, places=4, dtype=dtype).to(device)
    for function, vectors in ((gather_reduce_sum, problem.weights), (gather_dot, None)):
        grads = []
        for kind in ("dense", "sparse"):
            table = problem.table.clone().requires_grad_()
            if function is gather_dot:
                out, upstream = gather_dot(table, problem.x, problem.indices, grad=kind), problem.scores
            else:
                out, upstream = gather_reduce_sum(table, problem.indices, vectors, grad=kind), problem.x
            grads.append(torch.autograd.grad(out, table, upstream)[0])
        dense, sparse = grads
        assert sparse.is_sparse and sparse.is_coalesced() and sparse.dtype == dtype
        assert sparse.indices()[0].tolist() == sorted(set(problem.indices.flatten().tolist()))
        assert torch.equal(sparse.to_dense(), dense)
        untouched = [row for row in range(20) if row not in problem.indices]
        assert untouched and not dense[untouched].any()


def test_rows_drive_torch_optimizers(engine, device):
    problem = random_problem(dtype=torch.float32).to(device)
    table = torch.nn.Parameter(problem.table.clone())
    optimizer = torch.optim.SparseAdam([table], lr=0.1)
    gather_reduce_sum(table, problem.indices, problem.weights, grad="sparse").sum().backward()
    optimizer.step()
    assert not torch.equal(table, problem.table)


def test_rows_that_are_absent_or_none(engine, device):
    table = torch.ones(4, 2, device=device, requires_grad=True)
    indices = torch.tensor([[-1, 2, 9]], device=device)
    gather_reduce_sum(table, indices, grad="sparse", out_of_range="drop").sum().backward()
    assert table.grad.indices().tolist() == [[2]]
    table.grad = None
    nothing = torch.zeros(3, 0, dtype=torch.int64, device=device)
    gather_reduce_sum(table, nothing, grad="sparse").sum().backward()
    assert table.grad._nnz() == 0


# --- into a buffer ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_add_up_in_a_buffer(engine, device, dtype):
    """Conformance case 28: two backwards are the sum, in float32 for a 16-bit table; other rows keep their bits."""
    problem = random_problem(rows=30, bags=3, places=4, dtype=dtype).to(device)
    wide = random_problem(rows=30, bags=3, places=4, dtype=torch.float32).to(device)
    for name in vars(problem):
        setattr(wide, name, getattr(problem, name) if name == "indices" else getattr(problem, name).float())
    buffer = torch.randn(30, 5, device=device)
    start = buffer.clone()
    table = problem.table.clone().requires_grad_()
    weights = problem.weights.clone().requires_grad_()
    for _ in range(2):
        out = gather_reduce_sum(table, problem.indices, weights, grad_into=buffer)
        out.backward(problem.x)
    assert table.grad is None
    assert weights.grad.any()
    plain = wide.table.clone().requires_grad_()
    gather_reduce_sum(plain, wide.indices, wide.weights).backward(wide.x)
    torch.testing.assert_close(buffer, start + 2 * plain.grad)
    untouched = [row for row in range(30) if row not in problem.indices]
    assert torch.equal(buffer[untouched], start[untouched])
    # beyond what bfloat16 can count
    ones = torch.zeros_like(buffer)
    many = torch.zeros(3, 200, dtype=torch.int64, device=device)
    gather_reduce_sum(table, many, grad_into=ones).backward(torch.ones(3, 5, dtype=dtype, device=device))
    assert ones[0].tolist() == [600] * 5


def test_frozen_tables_and_float64_add_nothing_wrong(engine, device):
    if engine == "triton":
        pytest.skip("float64 is for the others")
    problem = random_problem().to(device)
    buffer = torch.zeros(11, 5, dtype=torch.float64, device=device)
    weights = problem.weights.clone().requires_grad_()
    gather_reduce_sum(problem.table, problem.indices, weights, grad_into=buffer).sum().backward()
    assert not buffer.any()
    both(problem, problem.table.clone().requires_grad_(), grad_into=buffer).backward()
    torch.testing.assert_close(buffer, dense_grad(problem))


@pytest.mark.parametrize("options", [{"grad": "sparse"}, {"grad_into": torch.zeros(11, 5, dtype=torch.float64)}])
def test_what_cannot_be_differentiated_again_is_refused(options):
    problem = random_problem()
    table, weights = problem.table.requires_grad_(), problem.weights.requires_grad_()
    out = gather_reduce_sum(table, problem.indices, weights, **options)
    with pytest.raises(NotImplementedError, match="only dense"):
        torch.autograd.grad(out.square().sum(), [table, weights], create_graph=True)
    with pytest.raises(NotImplementedError, match="dense gradients only"):
        torch.func.grad(lambda table: gather_reduce_sum(table, problem.indices, **options).sum())(table)
    compiled = torch.compile(gather_reduce_sum, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="dense gradients only"):
        compiled(table, problem.indices, weights, **options)


# --- a fused optimizer -----------------------------------------------------------------------------------------------
def collection_of(problem, update, optimizer, name="values"):
    config = embedfuse.TableConfig(
        problem.table.shape[0], problem.table.shape[1], name=name, combiner="sum", optimizer=optimizer,
        dtype=str(problem.table.dtype).removeprefix("torch."),
    )  # fmt: skip
    collection = EmbeddingCollection({"ids": embedfuse.FeatureConfig(config)}, update=update)
    with torch.no_grad():
        collection.tables[name].copy_(problem.table)
    return collection


OPTIMIZERS = [embedfuse.SGD(0.1), embedfuse.Adam(0.1), embedfuse.RowWiseAdagrad(0.1)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_a_fused_optimizer_steps_the_rows(engine, device, optimizer):
    """Two lookups of one table, step by step, as an ordinary collection with the same gradients steps it."""
    if device != "cpu" or (engine == "triton" and not isinstance(optimizer, embedfuse.SGD)):
        pytest.skip("once is enough in the interpreter")
    problem = random_problem(dtype=torch.float32)
    mine, plain = (collection_of(problem, "step", optimizer) for _ in range(2))
    optimizers = [FusedOptimizer(mine), FusedOptimizer(plain)]
    for _ in range(2):
        weights = problem.weights.clone().requires_grad_()
        out = gather_reduce_sum(mine, problem.indices, weights)
        dots = gather_dot(mine, problem.x, problem.indices)
        ((out * problem.x).sum() + (dots * problem.scores).sum()).backward()
        assert weights.grad.any()
        assert mine.tables["values"].grad is None
        # the same gradient, from one lookup of every row
        table = plain.tables["values"].detach()
        grad = dense_grad(type(problem)(**(vars(problem) | {"table": table})))
        touched = problem.indices.flatten().unique()
        bags = embedfuse.torch.Bags(touched, torch.arange(len(touched) + 1))
        plain({"ids": bags})["ids"].backward(grad[touched])
        for one in optimizers:
            one.step()
        torch.testing.assert_close(mine.tables["values"], plain.tables["values"])
    # evaluation leaves nothing behind
    with torch.no_grad():
        gather_reduce_sum(mine, problem.indices)
    before = mine.tables["values"].detach().clone()
    optimizers[0].step()
    assert torch.equal(mine.tables["values"], before)


def test_steps_in_backward():
    problem = random_problem(dtype=torch.float32)
    collection = collection_of(problem, "backward", embedfuse.SGD(0.5))
    with pytest.raises(RuntimeError, match="FusedOptimizer"):
        gather_reduce_sum(collection, problem.indices)
    FusedOptimizer(collection)
    weights = problem.weights.clone().requires_grad_()
    out = gather_reduce_sum(collection, problem.indices, weights)
    with pytest.raises(RuntimeError, match="looked up again"):
        gather_dot(collection, problem.x, problem.indices)
    out.backward(problem.x)
    answers = problem.answers()
    expected = problem.table.double() - 0.5 * torch.from_numpy(answers["sum.table"])
    torch.testing.assert_close(collection.tables["values"].detach().double(), expected, rtol=1e-5, atol=1e-5)
    # of the values before the step
    torch.testing.assert_close(weights.grad.double(), torch.from_numpy(answers["sum.weights"]), rtol=1e-5, atol=1e-5)


def test_autograd_collections_are_tables():
    problem = random_problem(dtype=torch.float32)
    collection = collection_of(problem, "autograd", None)
    both(problem, collection).backward()
    torch.testing.assert_close(collection.tables["values"].grad, dense_grad(problem))


def test_compiled_calls_step_the_rows():
    problem = random_problem(dtype=torch.float32)
    results = []
    for compiler in (None, "aot_eager"):
        torch._dynamo.reset()
        collection = collection_of(problem, "step", embedfuse.SGD(0.1))
        optimizer = FusedOptimizer(collection)

        def step(weights, collection=collection):
            return gather_reduce_sum(collection, problem.indices, weights).square().sum()

        run = step if compiler is None else torch.compile(step, fullgraph=True, backend=compiler)
        weights = problem.weights.clone().requires_grad_()
        run(weights).backward()
        optimizer.step()
        results.append((collection.tables["values"].detach(), weights.grad))
    torch.testing.assert_close(*results)


def test_collections_of_another_kind_are_refused():
    first = embedfuse.TableConfig(4, 2, name="first", combiner="mean")
    second = embedfuse.TableConfig(4, 2, name="second", combiner="sum")
    features = {"a": embedfuse.FeatureConfig(first), "b": embedfuse.FeatureConfig(second)}
    indices = torch.zeros(1, 1, dtype=torch.int64)
    for chosen, message in ((features, "one feature"), ({"a": features["a"]}, "combiner")):
        collection = EmbeddingCollection(chosen, update="autograd")
        with pytest.raises(ValueError, match=message):
            gather_reduce_sum(collection, indices)
    collection = EmbeddingCollection({"b": features["b"]}, update="autograd")
    with pytest.raises(ValueError, match="grad_into"):
        gather_reduce_sum(collection, indices, grad="sparse")
