"""A GPU that is not the current one gives the same numbers, bit for bit."""

import pytest
import torch

import embedfuse
from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, expert_lookup, gather_reduce_sum, product_topk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(device, rows, bags, weighted):
    """Outputs and tables of three steps on batches of different sizes."""
    tables = [TableConfig(rows, dim, name=f"t{dim}", initializer=0.5, combiner="mean") for dim in (8, 20)]
    features = [FeatureConfig(table, name=f"f{number}") for number, table in enumerate([*tables, tables[0]])]
    model = EmbeddingCollection(features, embedfuse.Adagrad(0.1), device=device)
    optimizer = FusedOptimizer(model)
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(0, 8, (bags + step,), generator=generator)
        inputs = []
        for _ in features:
            ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
            weights = torch.rand(len(ids), generator=generator) if weighted else None
            inputs.append(Bags.from_lengths(ids, lengths, weights).to(device))
        out = model.concatenated(inputs)
        out.backward(drawn(*out.shape, seed=step).to(device))
        optimizer.step()
        found.append(out.detach())
    return [*found, *(table.detach() for table in model.tables.values())]


def primitives(device):
    table, weights = (drawn(*shape).to(device).requires_grad_() for shape in ((500, 96), (300, 40)))
    ids = torch.randint(0, 500, (300, 40), generator=torch.Generator().manual_seed(1)).to(device)
    out = gather_reduce_sum(table, ids, weights)
    down, up, x = (drawn(*shape, seed=seed).to(device) for seed, shape in enumerate(((500, 96), (500, 96), (300, 96))))
    return [
        out.detach(), *torch.autograd.grad(out, [table, weights], drawn(300, 96, seed=2).to(device)),
        *product_topk(drawn(50, 64).to(device), drawn(50, 64, seed=3).to(device), 8),
        expert_lookup(x, down, up, ids, weights.detach(), "gelu"),
    ]  # fmt: skip


# sorted in one launch, in two, by blocks that wait for each other, and in many launches
@pytest.mark.parametrize("bags", [20, 900, 20_000, 120_000])
@pytest.mark.parametrize("weighted", [False, True])
def test_training(bags, weighted):
    here = trained("cuda:0", 5000, bags, weighted)
    there = trained("cuda:1", 5000, bags, weighted)
    assert all(tensor.device.index == 1 for tensor in there)
    for first, second in zip(here, there, strict=True):
        assert torch.equal(first.cpu(), second.cpu())


def test_primitives():
    here, there = primitives("cuda:0"), primitives("cuda:1")
    for first, second in zip(here, there, strict=True):
        assert second.device.index == 1
        assert torch.equal(first.cpu(), second.cpu())


def test_the_current_device_stays():
    trained("cuda:1", 100, 20, False)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        trained("cuda:0", 100, 20, True)
        assert torch.cuda.current_device() == 1
