"""`EmbeddingBag` in the place of torch's: signatures, states, training, transforms, compilers."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from bag_judge import judge, random_batch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from embedfuse.torch import one_table, use_backend
from embedfuse.torch.embedding_bag import EmbeddingBag, embedding_bag

MODES = ["sum", "mean", "sqrtn", "max"]
IDS, OFFSETS = torch.tensor([1, 1, 2, 9, 0, 3, 3]), torch.tensor([0, 3, 3, 5])


# --- the same arguments, values and states ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (embedding_bag, F.embedding_bag),
        (EmbeddingBag.__init__, torch.nn.EmbeddingBag.__init__),
        (EmbeddingBag.forward, torch.nn.EmbeddingBag.forward),
        (EmbeddingBag.from_pretrained, torch.nn.EmbeddingBag.from_pretrained),
    ],
)
def test_arguments_are_torchs(ours, theirs):
    described = [
        [(name, value.default, value.kind) for name, value in inspect.signature(function).parameters.items()]
        for function in (ours, theirs)
    ]
    assert described[0] == described[1]


def test_the_old_order_of_arguments_warns():
    table = torch.randn(10, 3)
    with pytest.warns(UserWarning, match="order of arguments"):
        out = embedding_bag(table, IDS, OFFSETS)
    assert torch.equal(out, embedding_bag(IDS, table, OFFSETS))


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": -2, "mode": "sum"}, {"dtype": torch.bfloat16}, {"max_norm": 2.0}]
)
def test_first_values_and_states_are_torchs(options):
    made = []
    for kind in (EmbeddingBag, torch.nn.EmbeddingBag):
        torch.manual_seed(7)
        made.append(kind(10, 3, **options))
    ours, theirs = made
    assert isinstance(ours, torch.nn.EmbeddingBag)
    assert torch.equal(ours.weight, theirs.weight)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    assert not list(ours.buffers())
    for giver, taker in ((ours, theirs), (theirs, ours)):
        giver.reset_parameters()
        taker.load_state_dict(giver.state_dict())
        torch.testing.assert_close(ours(IDS, OFFSETS), theirs(IDS, OFFSETS))
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(IDS, OFFSETS), ours(IDS, OFFSETS))
        assert other.weight is not ours.weight


def test_from_pretrained():
    table = torch.randn(10, 3)
    for freeze in (True, False):
        module = EmbeddingBag.from_pretrained(table, freeze, mode="max", padding_idx=1)
        assert type(module) is EmbeddingBag
        assert module.weight.requires_grad != freeze
        expected = torch.nn.EmbeddingBag.from_pretrained(table, mode="max", padding_idx=1)(IDS, OFFSETS)
        assert torch.equal(module(IDS, OFFSETS), expected)


# --- training --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sparse", "make"),
    [
        (False, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)),
        (False, lambda parameters: torch.optim.Adagrad(parameters, 0.1)),
        (True, lambda parameters: torch.optim.SGD(parameters, 0.1)),
        (True, lambda parameters: torch.optim.Adagrad(parameters, 0.1)),
        (True, lambda parameters: torch.optim.SparseAdam(parameters, 0.1)),
    ],
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_model_trains_as_with_torch(mode, sparse, make):
    if mode == "max" and sparse:
        pytest.skip("torch has no sparse gradients of max")
    losses, tables = [], []
    for kind in (torch.nn.EmbeddingBag, EmbeddingBag):
        torch.manual_seed(3)
        bag = kind(20, 6, mode=mode, sparse=sparse, padding_idx=5)
        head = torch.nn.Linear(6, 1)
        optimizers = [make(bag.parameters()), torch.optim.SGD(head.parameters(), 0.1)]
        losses.append([])
        for _ in range(6):
            ids, offsets = torch.randint(0, 20, (30,)), torch.tensor([0, 4, 4, 12, 25])
            weights = torch.rand(30) if mode == "sum" else None
            loss = (head(bag(ids, offsets, weights)).squeeze(1) - torch.arange(5.0)).square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses[-1].append(float(loss.detach()))
        tables.append(bag.weight.detach())
    torch.testing.assert_close(*losses, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(*tables, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
def test_sparse_gradients_hold_each_row_once(mode, weighted):
    batch = random_batch(weighted=weighted)
    gradients = []
    for sparse in (True, False):
        table = batch.table.clone().requires_grad_()
        weights = batch.weights.clone().requires_grad_() if weighted else None
        out = embedding_bag(
            batch.ids, table, batch.bounds[:-1], mode=mode, sparse=sparse, per_sample_weights=weights, padding_idx=2
        )
        inputs = [table, weights] if weighted else [table]
        gradients.append(torch.autograd.grad(out, inputs, batch.upstream))
    (sparse_grad, *of_weights), (dense, *expected) = gradients
    assert sparse_grad.is_coalesced()
    assert sparse_grad.indices()[0].tolist() == sorted(set(batch.ids.tolist()) - {2})
    assert torch.equal(sparse_grad.to_dense(), dense)
    torch.testing.assert_close(of_weights, expected, rtol=0, atol=1e-13)


def test_traced_sparse_gradients_touch_no_other_row():
    features = one_table.descriptor(torch.empty(10, 3), "sum", 1, False)
    ids, offsets = torch.tensor([7, 3, -1, 7, 3, 7]), torch.tensor([0, 4, 6])
    no_scale, upstream = torch.empty(0), torch.ones(2, 3)
    names, values = torch.ops.embedfuse.padded_row_grad(10, features, ids, offsets, None, no_scale, upstream, 2)
    assert names.tolist() == [3, 7, 7, 7, 7, 7]
    assert values[:, 0].tolist() == [2, 3, 0, 0, 0, 0]


def test_two_backwards_add_up():
    for sparse in (False, True):
        table = torch.randn(10, 3, requires_grad=True)
        for _ in range(2):
            embedding_bag(IDS, table, OFFSETS, mode="sum", sparse=sparse).sum().backward()
        once = torch.bincount(IDS, minlength=10)[:, None].expand(10, 3)
        assert torch.equal(table.grad.to_dense(), 2.0 * once)


# --- derivatives of any order ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_twice_differentiable(mode):
    table = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)

    def run(table):
        return embedding_bag(IDS, table, OFFSETS, mode=mode, padding_idx=2, scale_grad_by_freq=False)

    assert torch.autograd.gradcheck(run, (table,), fast_mode=False)
    assert torch.autograd.gradgradcheck(run, (table,), fast_mode=False)


def test_twice_differentiable_with_weights():
    table = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, dtype=torch.float64, requires_grad=True)

    def run(table, weights, mode="sum"):
        return embedding_bag(IDS, table, OFFSETS, mode=mode, per_sample_weights=weights, padding_idx=1)

    assert torch.autograd.gradgradcheck(run, (table, weights))
    for mode in ("mean", "sqrtn"):
        assert torch.autograd.gradcheck(lambda *both: run(*both, mode=mode), (table, weights))  # noqa: B023
        fixed = weights.detach()
        assert torch.autograd.gradgradcheck(lambda table: run(table, fixed, mode), (table,))  # noqa: B023
        (gradient,) = torch.autograd.grad(run(table, weights, mode).square().sum(), weights, create_graph=True)
        with pytest.raises(NotImplementedError, match="normalise the weights yourself"):
            gradient.sum().backward()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_function_transforms(mode):
    table = torch.randn(10, 3)

    def run(function):
        return lambda table: function(IDS, table, OFFSETS, mode=mode, padding_idx=3)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        for transform in (torch.func.jacrev, lambda f: torch.func.grad(lambda x: f(x).square().sum())):
            torch.testing.assert_close(transform(run(embedding_bag))(table), transform(run(F.embedding_bag))(table))
        batched = IDS[torch.stack([torch.randperm(7) for _ in range(3)])]
        out = torch.vmap(lambda ids: embedding_bag(ids, table, OFFSETS, mode=mode))(batched)
    expected = torch.stack([embedding_bag(ids, table, OFFSETS, mode=mode) for ids in batched])
    assert torch.equal(out, expected)
    # none of what a transform sees is remembered
    embedding_bag(IDS, table.clone().requires_grad_(), OFFSETS, mode=mode, padding_idx=3).sum().backward()


def test_functional_call():
    module = EmbeddingBag(10, 3)
    gradient = torch.func.grad(
        lambda parameters, ids, offsets: torch.func.functional_call(module, parameters, (ids, offsets)).square().sum()
    )(dict(module.named_parameters()), IDS, OFFSETS)["weight"]
    module(IDS, OFFSETS).square().sum().backward()
    torch.testing.assert_close(gradient, module.weight.grad)


def test_forward_mode_is_refused_and_not_wrong():
    """Torch's own refuses too."""
    table = torch.randn(10, 3)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda table: embedding_bag(IDS, table, OFFSETS), (table,), (table,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        embedding_bag(IDS, torch.autograd.forward_ad.make_dual(table, table), OFFSETS)


def test_a_lookup_in_inference_mode_spoils_no_later_one():
    module = EmbeddingBag(10, 13)
    with torch.inference_mode():
        module(IDS, OFFSETS)
    module(IDS, OFFSETS).sum().backward()


def test_shapes_without_numbers():
    with FakeTensorMode():
        module = EmbeddingBag(10, 17)
        assert module(torch.tensor([1, 2, 3]), torch.tensor([0, 2])).shape == (2, 17)
    module = EmbeddingBag(10, 17, device="meta", mode="max", padding_idx=1)
    assert module(torch.empty((3, 2), dtype=torch.int64, device="meta")).shape == (3, 17)
    module = EmbeddingBag(10, 17)
    module(IDS, OFFSETS).sum().backward()


# --- ops and compilers -----------------------------------------------------------------------------------------------
def test_ops_keep_their_contract():
    features = one_table.descriptor(torch.empty(10, 3), "sum", 1, False)
    offsets = torch.tensor([0, 3, 3, 5, 7])
    table = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    ops = torch.ops.embedfuse
    _, winners = ops.max_lookup(table, features, IDS, offsets, 4, 3, "raise")
    upstream = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, dtype=torch.float64, requires_grad=True)
    for op, arguments in (
        (ops.max_lookup, (table, features, IDS, offsets, 4, 3, "raise")),
        (ops.max_grad, (table.detach(), 30, features, IDS, offsets, winners, upstream, 4)),
        (ops.lookup_with_sparse_grad, (table, features, IDS, offsets, weights, 4, False, "raise")),
        (ops.padded_row_grad, (10, features, IDS, offsets, None, torch.zeros(0), upstream.detach(), 4)),
    ):
        torch.library.opcheck(op.default, arguments)
    quick = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.checked_offsets.default, (OFFSETS, 7, False), test_utils=quick)
    torch.library.opcheck(ops.shorten_rows.default, (table.detach().clone(), IDS, 1.0, 2.0), test_utils=quick)


def sizes():
    """Batches of changing size."""
    for count, bags in ((7, 3), (9, 4), (30, 11), (41, 6)):
        offsets = torch.randint(0, count, (bags,)).sort()[0]
        offsets[0] = 0
        yield torch.randint(0, 10, (count,)), offsets


@pytest.mark.parametrize(
    ("backend", "weighted", "options"),
    [
        ("aot_eager", False, {"mode": "sum"}),
        ("aot_eager", True, {"mode": "mean", "padding_idx": 3}),
        ("aot_eager", False, {"mode": "sqrtn", "include_last_offset": True}),
        ("inductor", False, {"mode": "max"}),
        ("aot_eager", False, {"mode": "sum", "max_norm": 1.0, "scale_grad_by_freq": True}),
        ("aot_eager", True, {"mode": "sum", "sparse": True}),
    ],
)
def test_compiles_whole_and_for_all_sizes(backend, weighted, options):
    torch._dynamo.reset()
    eager, module = EmbeddingBag(10, 3, **options), EmbeddingBag(10, 3, **options)
    module.load_state_dict(eager.state_dict())
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for ids, offsets in sizes():
        weights = torch.rand(ids.shape[0]) if weighted else None
        both = []
        upstream = None
        for model, owner in ((eager, eager), (compiled, module)):
            owner.weight.grad = None
            out = model(ids, offsets, weights)
            upstream = torch.randn(out.shape) if upstream is None else upstream
            out.backward(upstream)
            both.append((out.detach(), owner.weight.grad.to_dense(), owner.weight.detach()))
        torch.testing.assert_close(*both)
    # once for the first size, once for all others
    assert counter.frame_count <= 2


def test_compiled_calls_check_what_they_read():
    torch._dynamo.reset()
    compiled = torch.compile(EmbeddingBag(10, 3), fullgraph=True, backend="aot_eager")
    compiled(IDS, OFFSETS)
    with pytest.raises(IndexError):
        compiled(IDS + 4, OFFSETS)
    with pytest.raises(ValueError, match="must not decrease"):
        compiled(IDS, torch.tensor([0, 5, 3, 7]))


def test_compiled_function_serves_tables_of_any_shape():
    torch._dynamo.reset()
    compiled = torch.compile(embedding_bag, fullgraph=True, backend="eager")
    for rows, dim in ((10, 3), (12, 3), (30, 4)):
        table = torch.randn(rows, dim)
        assert torch.equal(compiled(IDS, table, OFFSETS), embedding_bag(IDS, table, OFFSETS))


def test_a_trace_that_would_fix_sizes_is_refused():
    with warnings.catch_warnings(), pytest.raises(NotImplementedError, match=r"torch\.export"):
        warnings.simplefilter("ignore")
        torch.jit.trace(EmbeddingBag(10, 3), (IDS, OFFSETS))


def test_exports_with_any_number_of_ids_and_bags():
    module = EmbeddingBag(10, 3, padding_idx=2, include_last_offset=True).requires_grad_(False)
    dynamic = ({0: torch.export.Dim("ids")}, {0: torch.export.Dim("bags", min=3)})
    offsets = torch.tensor([0, 3, 3, 7])
    for strict in (False, True):
        exported = torch.export.export(module, (IDS, offsets), dynamic_shapes=dynamic, strict=strict).module()
        for ids, starts in sizes():
            assert torch.equal(exported(ids, starts), module(ids, starts))


@pytest.mark.parametrize("mode", MODES)
def test_each_backend_gives_the_judges_answer_through_the_ops(mode):
    """What a compiled graph runs; ids after the last offset do not count there either."""
    batch = random_batch(weighted=mode == "sum")
    expected = judge(batch.ids, batch.bounds, batch.table, mode, batch.weights, 3)
    ids = torch.cat([batch.ids, torch.tensor([-7, 99])])
    weights = None if batch.weights is None else torch.cat([batch.weights, torch.ones(2)])
    torch._dynamo.reset()
    compiled = torch.compile(embedding_bag, fullgraph=True, backend="eager")
    for backend in ("eager", "cpu"):
        with use_backend(backend):
            out = compiled(
                ids, batch.table, batch.bounds, mode=mode, per_sample_weights=weights, include_last_offset=True,
                padding_idx=3,
            )  # fmt: skip
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_two_in_one_graph():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = EmbeddingBag(5, 3), EmbeddingBag(7, 2, mode="sum")

        def forward(self, ids):
            return torch.cat([self.first(ids), self.second(ids), self.first(ids + 1)], 1)

    model = Both()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for ids in (torch.tensor([[1, 2], [3, 0]]), torch.tensor([[1, 2, 2]])):
        torch.testing.assert_close(compiled(ids), model(ids))
