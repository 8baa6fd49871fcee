"""Feature columns on a GPU: the CPU's numbers, from features of either place, without waiting where ids are there."""

from pathlib import Path

import pytest
import torch
from column_cases import FEATURES, RECORD, columns_of, random_lists

import embedfuse
from embedfuse.torch import Bags, FusedOptimizer
from embedfuse.torch import feature_column as fc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

WITHOUT_FILE = [name for name in RECORD["cases"] if not name.startswith("file")]


def on_gpu(feature):
    return feature.to("cuda") if isinstance(feature, (torch.Tensor, Bags)) else feature


@pytest.mark.parametrize("do_fusion", [True, False])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("name", WITHOUT_FILE)
def test_numbers_are_the_cpus(name, place, do_fusion):
    text = RECORD["cases"][name]["columns"]
    here = fc.InputLayer(columns_of(text, Path(), do_fusion=do_fusion))
    there = fc.InputLayer(columns_of(text, Path(), do_fusion=do_fusion), device="cuda")
    there.load_state_dict(here.state_dict())
    features = FEATURES if place == "cpu" else {key: on_gpu(value) for key, value in FEATURES.items()}
    out = there(features)
    assert out.is_cuda
    torch.testing.assert_close(out.cpu(), here(FEATURES), rtol=1e-5, atol=1e-6)


def columns(do_fusion=True):
    ids = [fc.categorical_column_with_identity(key, 30, default) for key, default in (("a", None), ("b", 3))]
    listed = fc.categorical_column_with_vocabulary_list("b", [4, 8, 15, 16, 23])
    pairs = fc.bucketized_column(fc.numeric_column("x", 2), [-1, 0, 1])
    options = {"do_fusion": do_fusion}
    return [
        fc.embedding_column(ids[0], 8, max_norm=1.0, **options),
        *fc.shared_embedding_columns([ids[1], fc.weighted_categorical_column(ids[0], "w")], 16, "sum", **options),
        fc.indicator_column(listed),
        fc.numeric_column("x", 2),
        fc.embedding_column(pairs, 4, "sqrtn", **options),
    ]


def batch(seed, device):
    generator = torch.Generator().manual_seed(seed)
    a = Bags.from_lists(random_lists(16, 4, 30, seed))
    weights = torch.nested.nested_tensor_from_jagged(torch.rand(a.ids.shape[0], generator=generator), a.offsets)
    b = torch.randint(-1, 30, (16, 3), generator=generator)
    x = torch.randn(16, 2, generator=generator)
    return {key: value.to(device) for key, value in {"a": a, "w": weights, "b": b, "x": x}.items()}


@pytest.mark.parametrize("do_fusion", [True, False])
def test_ids_on_the_gpu_are_not_waited_for(do_fusion):
    layer = fc.InputLayer(columns(do_fusion), "adagrad", device="cuda")
    batches = [batch(seed, "cuda") for seed in range(3)]
    layer(batches[0]).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in batches:
            layer(one).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_training_is_the_cpus():
    layers = [fc.InputLayer(columns(), embedfuse.Adagrad(0.1), device=device) for device in ("cpu", "cuda")]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [FusedOptimizer(layer) for layer in layers]
    for seed in range(3):
        for layer, optimizer, device in zip(layers, optimizers, ("cpu", "cuda"), strict=True):
            layer(batch(seed, device)).square().sum().backward()
            optimizer.step()
    for name, table in layers[0].tables.named_tables():
        torch.testing.assert_close(dict(layers[1].tables.named_tables())[name].cpu(), table, rtol=1e-4, atol=1e-5)


def test_sequences_and_linear_models():
    text = RECORD["linear"]["linear"]["columns"]
    models = [fc.LinearModel(columns_of(text, Path()), units=2, device=device) for device in ("cpu", "cuda")]
    for weight in models[0].parameters():
        torch.nn.init.normal_(weight)
    models[1].load_state_dict(models[0].state_dict())
    torch.testing.assert_close(models[1](FEATURES).cpu(), models[0](FEATURES), rtol=1e-5, atol=1e-5)
    sequence = [fc.embedding_column(fc.sequence_categorical_column_with_identity("a", 30), 4)]
    layers = [fc.SequenceInputLayer(sequence, device=device) for device in ("cpu", "cuda")]
    layers[1].load_state_dict(layers[0].state_dict())
    ids = batch(0, "cpu")["a"]
    expected, lengths = layers[0]({"a": ids})
    for given in (ids, ids.to("cuda")):
        out, found = layers[1]({"a": given})
        assert torch.equal(out.cpu(), expected) and torch.equal(found.cpu(), lengths)


def test_a_layer_moves():
    layer = fc.InputLayer(columns())
    expected = layer(batch(0, "cpu"))
    layer.to("cuda")
    torch.testing.assert_close(layer(batch(0, "cuda")).cpu(), expected, rtol=1e-5, atol=1e-6)
