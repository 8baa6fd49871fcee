"""How much work a sparse lookup is: the same whatever its options, one gather a device, no waiting on a GPU."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from embedfuse.torch import Bags, fused_safe_embedding_lookup_sparse
from embedfuse.torch.backends import select
from embedfuse.torch.sparse_lookup import spread

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
VIEWS = ("as_strided", "detach", "reshape", "view", "select", "slice", "split", "split_with_sizes", "narrow")
"""Operations that do nothing but describe memory anew."""
OPTIONS = [
    {"combiner": combiner, "max_norm": most, "default_id": default, "prune": prune, "partition_strategy": strategy}
    for combiner, most, default, prune, strategy in itertools.product(
        ("sum", "mean", "sqrtn"), (None, 0.5), (None, 3), (False, True), ("div", "mod")
    )
]  # fmt: skip


def shards_on(device, count, rows=40):
    table = torch.randn(rows, 16)
    return [piece.clone().to(device).requires_grad_() for piece in table.tensor_split(count)]


def counted(function, device):
    """How often each operation of PyTorch ran, or each kernel on a GPU."""
    function()
    extra = [ProfilerActivity.CUDA] if device == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *extra]) as profiler:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
    if device == "cuda":
        return {event.key: event.count for event in profiler.key_averages() if event.device_type.name == "CUDA"}
    return {
        event.key: event.count
        for event in profiler.key_averages()
        if event.key.startswith("aten::") and event.key.removeprefix("aten::") not in VIEWS
    }


@pytest.mark.plain_memory
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_options_cost_no_launch(weighted, shards, device):
    params = shards_on(device, shards)
    bags = Bags.from_lists([[1, 5, 5], [], [39, 0]], [[1.0, 2.0, 0.5], [], [1.0, 1.0]] if weighted else None).to(device)
    counts = []
    # every combination of shards and options goes through the same steps
    for options in OPTIONS[:: 1 if device == "cuda" else 5]:

        def step(options=options):
            fused_safe_embedding_lookup_sparse(params, bags, **options).sum().backward()

        counts.append(counted(step, device))
    for options, found in zip(OPTIONS[:: 1 if device == "cuda" else 5], counts, strict=True):
        assert sum(found.values()) == sum(counts[0].values()), (options, found.items() ^ counts[0].items())


@pytest.mark.parametrize("shards", [1, 4])
def test_one_preparation_one_gather_one_backward(shards, monkeypatch):
    params = shards_on("cpu", shards)
    backend, calls = select(torch.device("cpu"), torch.float32), []
    for name in ("prepare_ids", "pooled_lookup", "row_grad", "coefficient_grad"):
        real = getattr(backend, name)
        monkeypatch.setattr(
            backend, name, lambda *given, name=name, real=real, **more: (calls.append(name), real(*given, **more))[1]
        )
    bags = Bags.from_lists([[1, -5, 5], [], [39, 0]], [[1.0, 2.0, 0.5], [], [1.0, 1.0]])
    bags.weights.requires_grad_()
    fused_safe_embedding_lookup_sparse(params, bags, None, "mean", 3, max_norm=0.5).sum().backward()
    assert sorted(calls) == ["coefficient_grad", "pooled_lookup", "prepare_ids", "row_grad"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shards", [1, 4])
def test_nothing_waits_for_the_device(shards, weighted):
    params = shards_on("cuda", shards)
    bags = Bags.from_lists([[1, 5, 5], [], [39, 0]], [[1.0, 2.0, 0.5], [], [1.0, 1.0]] if weighted else None).to("cuda")

    def step():
        fused_safe_embedding_lookup_sparse(params, bags, None, "mean", 3, max_norm=0.5).sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("strategy", ["div", "mod"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.5, "default_id": 7}])
@pytest.mark.parametrize("device", DEVICES)
def test_shards_on_several_devices(device, options, weighted, strategy, combiner, monkeypatch):
    homes = ["cpu"] * 4
    if device == "cpu":
        # "cpu:0" is another name of "cpu"
        monkeypatch.setattr(spread, "home_of", lambda table: torch.device("cpu:0" if id(table) in elsewhere else "cpu"))
    else:
        homes = ["cpu", "cuda:0", "cpu", f"cuda:{torch.cuda.device_count() - 1}"]
    table = torch.randn(40, 16)
    pieces = [table[k::4] for k in range(4)] if strategy == "mod" else table.split(10)
    here = [piece.clone().requires_grad_() for piece in pieces]
    scattered = [piece.clone().to(home).requires_grad_() for piece, home in zip(pieces, homes, strict=True)]
    elsewhere = {id(piece) for piece in scattered[1::2]}
    lists = [[1, 5, 5, -1], [], [39, 0], [12, 13, 14, 15, 16], [-1]]
    bags = Bags.from_lists(lists)
    upstream = torch.randn(5, 16)
    results = []
    for params in (here, scattered):
        weights = torch.linspace(-0.5, 2.0, len(bags.ids), requires_grad=True) if weighted else None
        given = Bags(bags.ids, bags.offsets, weights)
        out = fused_safe_embedding_lookup_sparse(
            params, given, combiner=combiner, partition_strategy=strategy, **options
        )
        out.backward(upstream)
        results.append([out, *([weights.grad] if weighted else []), *(piece.grad.cpu() for piece in params)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
