"""`expert_lookup` against the gathered rows in plain PyTorch: fused and composed, all activations, gated or not."""

import pytest
import torch

import embedfuse
from embedfuse.torch import EmbeddingCollection, FusedOptimizer, use_backend
from embedfuse.torch.gather.expert import ACTIVATIONS, expert_lookup

FUNCTIONS = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "identity": lambda x: x,
}


@pytest.fixture
def engine(placement, backend):
    """Each backend in turn, chosen."""
    with use_backend(placement[0]):
        yield placement[0]


def plain(x, down, up, indices, scores, activation, gate=None):
    """What it means, with all rows in memory."""
    dots = torch.einsum("...d,...kd->...k", x, down[indices])
    if gate is None:
        hidden = FUNCTIONS[activation](dots)
    else:
        hidden = FUNCTIONS[activation](torch.einsum("...d,...kd->...k", x, gate[indices])) * dots
    return torch.einsum("...k,...kd->...d", hidden * scores, up[indices])


def random_layer(
    rows=11, dim=7, out_dim=5, lead=(2, 2), places=3, dtype=torch.float64, device="cpu", gated=False, scale=1.0
):
    """x, down, up, scores, and the gate or None; and indices."""
    tensors = [
        (torch.randn(shape) * scale).to(dtype).to(device).requires_grad_()
        for shape in ((*lead, dim), (rows, dim), (rows, out_dim), (*lead, places), (rows, dim))
    ]
    if not gated:
        tensors[4] = None
    return tensors, torch.randint(0, rows, (*lead, places), device=device)


def call(function, tensors, indices, activation):
    x, down, up, scores, gate = tensors
    return function(x, down, up, indices, scores, activation, gate)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_gathered_rows(engine, device, activation, gated):
    """Conformance case 43: values, all gradients, and second derivatives."""
    dtype = torch.float32 if engine == "triton" else torch.float64
    tensors, indices = random_layer(dtype=dtype, device=device, gated=gated)
    leaves = [tensor for tensor in tensors if tensor is not None]
    upstream = torch.randn(2, 2, 5, dtype=dtype, device=device)
    results = []
    for function in (expert_lookup, plain):
        out = call(function, tensors, indices, activation)
        first = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
        again = torch.autograd.grad(out, leaves, upstream, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in again), leaves)
        results.append([out, *first, *again, *second])
    tolerance = {"rtol": 2e-4, "atol": 2e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(*results, **tolerance)


def test_gradcheck():
    for activation in ACTIVATIONS:
        for gated in (False, True):
            tensors, indices = random_layer(rows=4, dim=3, out_dim=2, lead=(2,), gated=gated)
            leaves = [tensor for tensor in tensors if tensor is not None]

            def run(*given, indices=indices, activation=activation, gated=gated):
                given = list(given) + ([] if gated else [None])
                return call(expert_lookup, given, indices, activation)

            assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True)
            assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_round_once(engine, device, dtype):
    """Within one rounding of the answer of float64: dot products and neurons in between are not rounded to 16 bits."""
    tensors, indices = random_layer(dim=64, out_dim=33, lead=(4,), places=8, dtype=dtype, device=device, scale=0.3)
    out = call(expert_lookup, tensors, indices, "gelu")
    assert out.dtype == dtype
    wide = [None if tensor is None else tensor.detach().double() for tensor in tensors]
    expected = call(plain, wide, indices, "gelu")
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    # Triton's interpreter cuts bfloat16 off where a GPU rounds
    assert ((out.double() - expected).abs() <= 2.1 * unit * expected.abs() + 1e-5).all()
    out.sum().backward()
    for tensor in tensors:
        assert tensor is None or (tensor.grad.dtype == dtype and tensor.grad.isfinite().all())


@pytest.mark.parametrize(("rows", "dim", "out_dim", "bags", "places"), [
    (1, 1, 1, 1, 1), (3, 600, 5, 2, 3), (3, 5, 700, 2, 3), (9, 63, 144, 1, 20), (5, 4, 3, 0, 2), (5, 4, 3, 2, 0),
    (5, 0, 3, 2, 2), (5, 3, 0, 2, 2),
])  # fmt: skip
def test_sizes(engine, device, rows, dim, out_dim, bags, places):
    dtype = torch.float32
    tensors, indices = random_layer(rows, dim, out_dim, (bags,), places, dtype, device, gated=True)
    leaves = [tensor for tensor in tensors if tensor is not None]
    upstream = torch.randn(bags, out_dim, device=device)
    results = []
    for function in (expert_lookup, plain):
        out = call(function, tensors, indices, "silu")
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def test_worked_example(engine, device):
    """Conformance case 43: its numbers."""
    dtype = torch.float32
    down = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=dtype, device=device)
    up = torch.tensor([[1, 0], [0, 1], [1, 1], [-1, 2]], dtype=dtype, device=device)
    x = torch.tensor([[1, 2], [-1, 0.5]], dtype=dtype, device=device)
    scores = torch.tensor([[0.5, 1, -1], [2, 0.25, 0.1]], dtype=dtype, device=device)
    indices = torch.tensor([[0, 2, 2], [3, 0, 2]], device=device)
    assert expert_lookup(x, down, up, indices, scores, "relu").tolist() == [[2.5, 0], [0, 0]]


def test_views_and_mixed_dtypes(engine, device):
    tensors, indices = random_layer(dtype=torch.float32, device=device)
    expected = call(expert_lookup, tensors, indices, "gelu")
    turned = [
        None if tensor is None else tensor.detach().transpose(0, -1).contiguous().transpose(0, -1) for tensor in tensors
    ]
    torch.testing.assert_close(call(expert_lookup, turned, indices, "gelu"), expected)
    x, down, up, scores, _ = tensors
    torch.testing.assert_close(expert_lookup(x, down, up, indices, scores.bfloat16().float(), "gelu"),
                               expert_lookup(x, down, up, indices, scores.bfloat16(), "gelu"))  # fmt: skip
    mixed = expert_lookup(x, down.bfloat16(), up, indices, scores, "gelu")
    torch.testing.assert_close(mixed, expert_lookup(x, down.bfloat16().float(), up, indices, scores, "gelu"))


def test_frozen_tables(engine, device):
    """Only what is needed is made: gradients of `x` and scores alone."""
    tensors, indices = random_layer(dtype=torch.float32, device=device)
    x, down, up, scores, _ = tensors
    results = []
    for function in (expert_lookup, plain):
        out = function(x, down.detach(), up.detach(), indices, scores, "silu")
        results.append(torch.autograd.grad(out, [x, scores], torch.ones_like(out)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    grad = torch.autograd.grad(expert_lookup(x.detach(), down.detach(), up, indices, scores.detach()).sum(), up)
    assert grad[0].any()


def test_transforms_and_compile():
    tensors, indices = random_layer()
    x, down, up, scores, _ = (None if tensor is None else tensor.detach() for tensor in tensors)

    def scalar(function):
        return lambda x, down: function(x, down, up, indices, scores, "gelu").square().sum()

    for transform in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(*(transform(scalar(function))(x, down) for function in (expert_lookup, plain)))
    both = [
        torch.vmap(lambda x, ids, scores, function=function: function(x, down, up, ids, scores, "gelu"))(
            x, indices, scores
        )
        for function in (expert_lookup, plain)
    ]
    torch.testing.assert_close(*both)
    torch._dynamo.reset()
    compiled = torch.compile(expert_lookup, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, plain):
        out = call(function, tensors, indices, "silu")
        results.append(torch.autograd.grad(out.square().sum(), [tensor for tensor in tensors if tensor is not None]))
    torch.testing.assert_close(*results)


def test_a_fused_optimizer_steps_both_tables():
    tensors, indices = random_layer(dtype=torch.float32)
    x, down, up, scores, _ = tensors
    collections = []
    for name, table in (("down", down), ("up", up)):
        config = embedfuse.TableConfig(*table.shape, name=name, combiner="sum", optimizer=embedfuse.SGD(0.1))
        collection = EmbeddingCollection({"experts": embedfuse.FeatureConfig(config)})
        with torch.no_grad():
            collection.tables[name].copy_(table)
        collections.append(collection)
    optimizer = FusedOptimizer(*collections)
    out = expert_lookup(x, *collections, indices, scores, "gelu")
    mine = torch.autograd.grad(
        out.square().sum(),
        [x, scores, *(c.tables[n] for c, n in zip(collections, ("down", "up"), strict=True))],
        allow_unused=True,
    )
    assert mine[2] is None and mine[3] is None
    optimizer.step()
    expected = torch.autograd.grad(plain(x, down, up, indices, scores, "gelu").square().sum(), [x, scores, down, up])
    torch.testing.assert_close(mine[:2], expected[:2], rtol=1e-4, atol=1e-4)
    for collection, name, table, grad in zip(collections, ("down", "up"), (down, up), expected[2:], strict=True):
        torch.testing.assert_close(collection.tables[name], table - 0.1 * grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "`activation`", {"activation": "tanh"}),
        (ValueError, "`x`", {"x": torch.ones(2, 4)}),
        (ValueError, "`scores`", {"scores": torch.ones(2, 4)}),
        (ValueError, "`up`", {"up": torch.ones(5, 3)}),
        (ValueError, "`gate`", {"gate": torch.ones(4, 2)}),
        (ValueError, "`down`", {"down": torch.ones(4)}),
        (IndexError, r"\[0, 4\).*got 4 at indices\[1, 2\]", {"indices": torch.tensor([[0, 1, 2], [0, 1, 4]])}),
    ],
)
@pytest.mark.parametrize("engine", ["cpu", "triton"])
def test_refusals(error, message, change, engine):
    arguments = {
        "x": torch.ones(2, 3), "down": torch.ones(4, 3), "up": torch.ones(4, 5), "scores": torch.ones(2, 3),
        "indices": torch.zeros(2, 3, dtype=torch.int64),
    }  # fmt: skip
    if engine == "triton" and torch.cuda.is_available():
        pytest.skip("a GPU reports at a later call")
    with use_backend(engine), pytest.raises(error, match=message):
        expert_lookup(**(arguments | change))
