"""`embedding_bag` on a GPU: the CPU's numbers, no waiting, CUDA graphs, late reports of bad ids."""

import pytest
import torch
from bag_judge import check_answers, random_batch

from embedfuse.torch.embedding_bag import EmbeddingBag, embedding_bag

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MODES = ["sum", "mean", "sqrtn", "max"]


def pooled(batch, mode, padding, includes_end):
    table = batch.table.clone().requires_grad_()
    weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
    out = embedding_bag(
        batch.ids, table, batch.bounds if includes_end else batch.bounds[:-1], mode=mode, padding_idx=padding,
        per_sample_weights=weights, include_last_offset=includes_end,
    )  # fmt: skip
    out.backward(batch.upstream)
    return [out, table.grad] if weights is None else [out, table.grad, weights.grad]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("includes_end", [False, True])
def test_matches_plain_loops(mode, padding, includes_end):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for weighted in (False, True) if mode != "max" else (False,):
            for dim in (1, 19, 64):
                batch = random_batch(dim=dim, dtype=dtype, weighted=weighted, device="cuda")
                check_answers(batch, mode, padding, pooled(batch, mode, padding, includes_end))


@pytest.mark.parametrize("mode", MODES)
def test_ids_after_the_last_offset_do_not_count(mode):
    table = torch.randn(6, 3, device="cuda", requires_grad=True)
    ids = torch.tensor([1, 2, 3, 4, -7, 99], device="cuda")
    offsets = torch.tensor([0, 2, 4], device="cuda")
    expected = embedding_bag(ids[:4], table, offsets, mode=mode, include_last_offset=True)
    out = embedding_bag(ids, table, offsets, mode=mode, include_last_offset=True)
    assert torch.equal(out, expected)
    upstream = torch.randn_like(out)
    gradients = [torch.autograd.grad(made, table, upstream)[0] for made in (out, expected)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_for_the_device(mode):
    table = torch.randn(50, 16, device="cuda", requires_grad=True)
    ids, starts = torch.randint(0, 50, (40,), device="cuda"), torch.arange(0, 40, 4, device="cuda")
    for step in range(3):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            for form in ({"offsets": starts}, {"offsets": starts, "include_last_offset": True, "padding_idx": 2}):
                embedding_bag(ids, table, mode=mode, **form).sum().backward()
            embedding_bag(ids.view(10, 4), table, mode=mode).sum().backward()
        finally:
            if step == 2:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", MODES)
def test_cuda_graph_of_forward_and_backward(mode):
    module = EmbeddingBag(50, 16, mode=mode, padding_idx=2, include_last_offset=True, device="cuda")
    ids, offsets = torch.randint(0, 50, (40,), device="cuda"), torch.arange(0, 41, 4, device="cuda")

    def step():
        module.weight.grad = None
        out = module(ids, offsets)
        out.square().sum().backward()
        return out

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    captured = module.weight.grad
    for _ in range(2):
        ids.copy_(torch.randint(0, 50, (40,)))
        graph.replay()
        replayed = out.clone(), captured.clone()
        assert torch.equal(replayed[0], step())
        assert torch.equal(replayed[1], module.weight.grad)


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("bad", [-1, 4])
def test_bad_ids_are_reported_late_and_read_nothing(bad, padding):
    table = torch.full((4, 2), 5.0, device="cuda")
    offsets = torch.tensor([0], device="cuda")
    out = embedding_bag(torch.tensor([bad], device="cuda"), table, offsets, mode="sum", padding_idx=padding)
    assert out.tolist() == [[0, 0]]
    good = torch.tensor([0], device="cuda")
    with pytest.raises(IndexError):
        for _ in range(3):
            embedding_bag(good, table, offsets, mode="sum", padding_idx=padding)
            torch.cuda.synchronize()
    embedding_bag(good, table, offsets, mode="sum", padding_idx=padding)


@pytest.mark.parametrize("sparse", [False, True])
def test_options_match_the_cpu(sparse):
    ids, offsets = torch.randint(0, 30, (100,)), torch.arange(0, 100, 7)
    start = torch.randn(30, 6)
    both = []
    for device in ("cpu", "cuda"):
        table = start.clone().to(device).requires_grad_()
        out = embedding_bag(ids.to(device), table, offsets.to(device), 1.0, 2.0, True, "mean", sparse, padding_idx=4)
        out.sum().backward()
        both.append([x.detach().cpu() for x in (out, table, table.grad.to_dense())])
    torch.testing.assert_close(*both)
