"""What only a GPU can show: no waiting, few launches, CUDA graphs, large addresses, and the CPU's numbers."""

import pytest
import torch
from plain import batch_for, loss_of, random_bags, three_features, upstream

import embedfuse
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

RULES = {
    "sgd": embedfuse.SGD(0.1),
    "momentum": embedfuse.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": embedfuse.Adagrad(0.1),
    "rowwise_adagrad": embedfuse.RowWiseAdagrad(0.1),
    "adam": embedfuse.Adam(0.01),
    "adam_corrected": embedfuse.Adam(0.01, bias_correction=True),
    "adam_dense": embedfuse.Adam(0.01, bias_correction=True, lazy_adam=False),
    "adamw": embedfuse.AdamW(0.01),
    "ftrl": embedfuse.FTRL(0.1, l1_regularization_strength=0.01),
    "adagrad_momentum": embedfuse.AdagradMomentum(0.1, momentum=0.9, epsilon=0.1),
    "one_by_one": embedfuse.Adagrad(0.1, use_gradient_accumulation=False),
}


def on_gpu(inputs):
    return {name: bags.to("cuda", non_blocking=True) for name, bags in inputs.items()}


def many_tables(count, **options):
    tables = [embedfuse.TableConfig(20 + number, 8 + 4 * (number % 3)) for number in range(count)]
    return EmbeddingCollection(
        {f"f{number}": embedfuse.FeatureConfig(table) for number, table in enumerate(tables)},
        optimizer=embedfuse.RowWiseAdagrad(0.1), device="cuda", **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_gpu_trains_as_the_cpu_does(name):
    models = [three_features(items=RULES[name], cities=RULES["sgd"], device=device) for device in ("cpu", "cuda")]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [FusedOptimizer(model) for model in models]
    for step in range(5):
        batches = [batch_for(models[0], 9, 10 * step + micro, weighted=micro == 1) for micro in range(2)]
        for model, optimizer in zip(models, optimizers, strict=True):
            device = model.tables["items"].device
            for batch in batches:
                out = model({k: bags.to(device) for k, bags in batch.items()})
                loss_of(out, {k: g.to(device) for k, g in upstream(out, step).items()}).backward()
            optimizer.step()
        for table in models[0].tables:
            torch.testing.assert_close(models[1].tables[table].cpu(), models[0].tables[table], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["raise", "drop", "ignore"])
def test_nothing_waits_for_the_device(policy):
    collection = three_features(device="cuda", out_of_range=policy)
    optimizer = FusedOptimizer(collection)
    batches = [on_gpu(batch_for(collection, 9, seed, weighted=True)) for seed in range(4)]
    for step, batch in enumerate(batches):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            out = collection(batch)
            sum(value.sum() for value in out.values()).backward()
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
        finally:
            if step == len(batches) - 1:
                torch.cuda.set_sync_debug_mode("default")


def kernels_of(collection, optimizer, batch):
    def step():
        collection.concatenated(batch).backward(upstream)
        optimizer.step()

    with torch.no_grad():
        upstream = torch.ones_like(collection.concatenated(batch))
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")


@pytest.mark.plain_memory
def test_500_tables_cost_about_as_many_launches_as_5():
    counts = []
    for tables in (5, 500):
        collection = many_tables(tables)
        optimizer = FusedOptimizer(collection)
        # about as many ids, since few and many are sorted by other kernels
        counts.append(kernels_of(collection, optimizer, on_gpu(batch_for(collection, 8000 // tables, 0))))
    # concatenating the inputs takes a launch for every 128 of them or so
    assert counts[1] <= 2 * counts[0], counts


def test_cuda_graph_of_a_whole_step():
    eager, captured = (
        three_features(items=embedfuse.Adam(0.01, bias_correction=True), device="cuda") for _ in range(2)
    )
    captured.load_state_dict(eager.state_dict())
    optimizers = [FusedOptimizer(eager), FusedOptimizer(captured)]

    # a graph needs inputs of one shape: one id a bag
    def ids(seed):
        generator = torch.Generator().manual_seed(seed)
        return {
            n: torch.randint(0, c.table.vocabulary_size, (16,), generator=generator).cuda()
            for n, c in eager.features.items()
        }

    static = ids(0)

    def run(model, optimizer, batch):
        sum(out.square().sum() for out in model(batch).values()).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(captured, optimizers[1], static)
            run(eager, optimizers[0], static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(captured, optimizers[1], static)
    for seed in range(1, 4):
        for name, value in ids(seed).items():
            static[name].copy_(value)
        graph.replay()
        run(eager, optimizers[0], ids(seed))
    torch.cuda.synchronize()
    for table in eager.tables:
        assert torch.equal(eager.tables[table], captured.tables[table])


def test_bad_ids_are_reported_late_and_train_nothing():
    table = embedfuse.TableConfig(5, 2, combiner="sum")
    collection = EmbeddingCollection(embedfuse.FeatureConfig(table), device="cuda")
    optimizer = FusedOptimizer(collection, default=embedfuse.SGD(1.0))
    before = collection.tables["table_0"].detach().clone()
    out = collection(Bags.from_lists([[5, 1]], device="cuda"))
    torch.testing.assert_close(out.detach(), before[1:2])
    out.sum().backward()
    optimizer.step()
    moved = (before - collection.tables["table_0"].detach()).abs().sum(1).cpu()
    assert moved.tolist() == [0, 2, 0, 0, 0]
    torch.cuda.synchronize()
    good = Bags.from_lists([[0]], device="cuda")
    with pytest.raises(IndexError):
        for _ in range(3):
            collection(good)
            torch.cuda.synchronize()
    collection(good)


def test_rows_beyond_two_to_the_31_elements():
    table = embedfuse.TableConfig(17_000_000, 128, dtype="float16", combiner="sum", initializer=0.0)
    collection = EmbeddingCollection(embedfuse.FeatureConfig(table), device="cuda")
    optimizer = FusedOptimizer(collection, default=embedfuse.SGD(1.0))
    last = Bags.from_lists([[16_999_999]], device="cuda")
    collection(last).sum().backward()
    optimizer.step()
    weight = collection.tables["table_0"].detach()
    assert (weight[-1] == -1).all() and not weight[:-1].any()
    assert (collection(last) == -1).all()


def test_46_million_copies_of_one_id():
    table = embedfuse.TableConfig(3, 4, combiner="sum", initializer=0.0)
    collection = EmbeddingCollection(embedfuse.FeatureConfig(table), device="cuda")
    optimizer = FusedOptimizer(collection, default=embedfuse.SGD(1e-6))
    count = 46_000_000
    bags = Bags(torch.ones(count, dtype=torch.int32, device="cuda"), torch.tensor([0, count], device="cuda"))
    collection(bags).sum().backward()
    optimizer.step()
    torch.testing.assert_close(collection.tables["table_0"][1].cpu(), torch.full((4,), -46.0))


def test_a_million_copies_with_random_gradients_repeat_bit_for_bit():
    results = []
    generator = torch.Generator(device="cuda").manual_seed(0)
    gradient = torch.randn(1_000_000, 8, device="cuda", generator=generator)
    for _ in range(20):
        table = embedfuse.TableConfig(3, 8, combiner="sum", initializer=0.5)
        collection = EmbeddingCollection(embedfuse.FeatureConfig(table), device="cuda")
        optimizer = FusedOptimizer(collection, default=embedfuse.Adagrad(0.1))
        collection(torch.zeros(1_000_000, dtype=torch.int64, device="cuda")).backward(gradient)
        optimizer.step()
        results.append(
            (collection.tables["table_0"].detach(), optimizer.state_dict()["state"]["table_0"]["accumulators"])
        )
    for table, state in results[1:]:
        assert torch.equal(table, results[0][0]) and torch.equal(state, results[0][1])


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_training_on_the_gpu(backend):
    eager, model = (three_features(items=embedfuse.Adagrad(0.1), device="cuda") for _ in range(2))
    model.load_state_dict(eager.state_dict())
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizers = [FusedOptimizer(eager), FusedOptimizer(model)]
    for step, bags in enumerate((6, 11, 7)):
        batch = on_gpu(batch_for(eager, bags, step))
        for run, optimizer in zip((eager, compiled), optimizers, strict=True):
            sum(out.square().sum() for out in run(batch).values()).backward()
            optimizer.step()
        for table in eager.tables:
            torch.testing.assert_close(eager.tables[table], model.tables[table])


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_on_the_gpu(unscale):
    collection = three_features(items=embedfuse.Adam(0.1), device="cuda")
    optimizer = FusedOptimizer(collection)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    batch = on_gpu(batch_for(collection, 6, 0))
    before = {name: table.detach().clone() for name, table in collection.tables.items()}
    for step, bad in enumerate((True, False)):
        out = collection(batch)
        loss = sum(value.sum() for value in out.values()) * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(table, before[name]) for name, table in collection.tables.items())
        assert same == bad
        assert int(optimizer.state_dict()["state"]["items"]["step"]) == step
    assert scaler.get_scale() == 512.0


def test_move_to_the_gpu_and_back():
    collection = three_features(items=embedfuse.Adagrad(0.1))
    optimizer = FusedOptimizer(collection)
    collection.to("cuda")
    batch = batch_for(collection, 6, 0)
    out = collection(on_gpu(batch))
    loss_of(out, {k: g.cuda() for k, g in upstream(out, 1).items()}).backward()
    optimizer.step()
    collection.cpu()
    with torch.no_grad():
        for name, value in collection(batch).items():
            assert not torch.equal(value, out[name].cpu()) or not value.any()
    with pytest.raises(ValueError, match="device"):
        collection(on_gpu(batch))


def test_jagged_inputs_pinned_and_moved():
    bags = random_bags(30, 5, torch.Generator().manual_seed(0)).pin_memory().to("cuda", non_blocking=True)
    assert bags.ids.is_cuda and bags.offsets.is_cuda


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hot", [0.0, 0.5])
def test_large_updates_repeat_bit_for_bit(hot, dtype):
    # so many ids that long runs are summed on a stream of their own
    table = embedfuse.TableConfig(5000, 40, combiner="sum", dtype=dtype, optimizer=embedfuse.RowWiseAdagrad(0.1))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5000, (1 << 18,), generator=generator)
    ids[torch.rand(len(ids), generator=generator) < hot] = 7
    bags = Bags(ids, torch.arange(0, len(ids) + 1, 64)).to("cuda")
    gradients = torch.randn(len(bags), 40, generator=generator).to("cuda", getattr(torch, dtype))
    results = []
    for _ in range(4):
        torch.manual_seed(0)
        collection = EmbeddingCollection({"f": embedfuse.FeatureConfig(table)}, device="cuda")
        optimizer = FusedOptimizer(collection)
        for _ in range(3):
            collection({"f": bags})["f"].backward(gradients)
            optimizer.step()
        results.append(collection.tables["table_0"].detach().clone())
    assert results[0].isfinite().all()
    for other in results[1:]:
        assert torch.equal(results[0], other)
