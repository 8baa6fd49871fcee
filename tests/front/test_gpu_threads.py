"""Threads whose first work on a GPU is ours: nothing has made the device's context theirs before."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import embedfuse
from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import EmbeddingCollection, FusedOptimizer, Warmup, gather_reduce_sum, warmup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def in_a_new_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def made(update="step"):
    feature = FeatureConfig(TableConfig(1000, 8, initializer=0.5, combiner="sum"), output_shape=(1,))
    model = EmbeddingCollection(feature, embedfuse.Adagrad(0.1), update=update, device="cuda")
    return model, FusedOptimizer(model)


@pytest.mark.parametrize("ids", [10, 9000, 50_000])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_training_in_a_new_thread(ids, update):
    batch = torch.arange(ids, device="cuda").view(-1, 1) % 1000
    tables = []
    for first in (lambda work: work(), in_a_new_thread):
        model, optimizer = made(update)

        def step(model=model, optimizer=optimizer):
            model(batch).sum().backward()
            if model.update == "step":
                optimizer.step()

        # known to all threads after the first model's turn
        first(step)
        first(step)
        tables.append(next(iter(model.tables.values())).detach().clone())
    assert torch.equal(*tables)


def test_lookups_and_gradients_in_a_new_thread():
    table = torch.randn(500, 16, device="cuda", requires_grad=True)
    ids = torch.randint(0, 500, (40, 6), device="cuda")
    weights = torch.randn(40, 6, device="cuda", requires_grad=True)

    def work():
        out = gather_reduce_sum(table, ids, weights)
        return [out.detach(), *torch.autograd.grad(out.sum(), [table, weights])]

    for here, there in zip(work(), in_a_new_thread(work), strict=True):
        assert torch.equal(here, there)
    model, _ = made()
    batch = torch.arange(10, device="cuda").view(-1, 1)
    with torch.no_grad():
        assert torch.equal(model(batch), in_a_new_thread(lambda: torch.no_grad()(model)(batch)))


def test_the_first_backward_after_warmup():
    # an expanded gradient is launched by nobody before us
    model, optimizer = made("backward")
    assert isinstance(warmup(model, optimizer), Warmup)
    in_a_new_thread(lambda: model(torch.arange(10, device="cuda").view(-1, 1)).sum().backward())
    assert not torch.equal(model.tables[next(iter(model.tables))][:10], torch.full((10, 8), 0.5, device="cuda"))
