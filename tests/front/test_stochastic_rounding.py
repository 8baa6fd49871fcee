"""Stochastic rounding of 16-bit tables: right on average, the same bits again for the same seed, on every backend."""

import os

import pytest
import torch

import embedfuse
from embedfuse.torch import EmbeddingCollection, FusedOptimizer, use_backend
from embedfuse.torch.backends import why_not

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def updated(dtype, rate, seed=0, rows=2000, dim=500, steps=1, device="cpu", rule=None):
    """A table of ones after steps of +rate."""
    table = embedfuse.TableConfig(rows, dim, initializer=1.0, combiner="sum", dtype=dtype, stochastic_rounding=True)
    collection = EmbeddingCollection(embedfuse.FeatureConfig(table), device=device)
    optimizer = FusedOptimizer(collection, default=rule or embedfuse.SGD(rate), seed=seed)
    ids = torch.arange(rows, device=device)
    for _ in range(steps):
        collection(ids).backward(-torch.ones(rows, dim, dtype=collection.tables["table_0"].dtype, device=device))
        optimizer.step()
    return collection.tables["table_0"].detach().float().cpu()


@pytest.mark.parametrize(
    ("backend", "device"),
    [("cpu", "cpu"), ("eager", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(
    ("dtype", "rate", "spacing"), [("float16", 2.0**-13, 2.0**-10), ("bfloat16", 2.0**-10, 2.0**-7)]
)
def test_an_eighth_of_the_elements_goes_up(backend, device, dtype, rate, spacing):
    if device == "cuda" and not ON_GPU:
        pytest.skip("needs a CUDA GPU")
    with use_backend(backend):
        values = updated(dtype, rate, device=device)
        assert set(values.unique().tolist()) == {1.0, 1.0 + spacing}
        assert abs((values > 1).double().mean() - 1 / 8) < 0.001
        assert torch.equal(values, updated(dtype, rate, device=device))
        other = updated(dtype, rate, seed=1, device=device)
        assert 0.2 < (other != values).double().mean() < 0.24
        assert abs(updated(dtype, rate, steps=4, rows=200, device=device).double().mean() - 1 - 4 * rate) < 0.05 * rate
    with use_backend("eager"):
        # the same bits everywhere
        assert torch.equal(values, updated(dtype, rate))


def test_kernels_round_alike_in_the_interpreter():
    if why_not("triton", torch.device("cpu")):
        pytest.skip("needs TRITON_INTERPRET=1")
    found = []
    for backend in ("triton", "eager", "cpu"):
        with use_backend(backend):
            found.append(updated("bfloat16", 2.0**-10, rows=5, dim=7, steps=2))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_dense_rules_round_too_and_other_types_are_refused():
    dense = embedfuse.Adam(2.0**-10, bias_correction=True, lazy_adam=False)
    values = updated("bfloat16", 0, rule=dense, rows=500)
    assert abs((values > 1).double().mean() - 1 / 8) < 0.005
    with pytest.raises(ValueError, match="stochastic_rounding"):
        embedfuse.TableConfig(3, 2, stochastic_rounding=True)
