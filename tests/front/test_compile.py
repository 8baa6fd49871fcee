"""torch.compile, torch.export, opcheck and autocast over the front's ops."""

import pytest
import torch
from plain import batch_for, random_bags, three_features
from torch._dynamo.testing import CompileCounterWithBackend

import embedfuse
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer
from embedfuse.torch.inductor_memory import NOTHING

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Model(torch.nn.Module):
    """Looks the same batch up twice, which a compiler must not merge."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = three_features(items=embedfuse.Adagrad(0.1), cities=embedfuse.FTRL(0.1), **options)
        self.top = torch.nn.Linear(19, 8)

    def forward(self, inputs):
        first, second = self.embeddings(inputs), self.embeddings(inputs)
        return self.top(torch.cat(list(first.values()), 1)) + 0.5 * second["seen"]


@pytest.mark.parametrize(
    ("backend", "update"), [("aot_eager", "step"), ("inductor", "step"), ("aot_eager", "autograd")]
)
def test_training_compiles_whole_and_once(backend, update):
    eager, model = Model(update=update), Model(update=update)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    step_of = [
        FusedOptimizer(m) if update == "step" else torch.optim.SGD(m.embeddings.parameters(), 0.1)
        for m in (eager, model)
    ]
    for step, bags in enumerate((6, 11, 7)):
        inputs = batch_for(eager.embeddings, bags, step, weighted=False)
        gradient = torch.randn(bags, 8)
        for run, optimizer in zip((eager, compiled), step_of, strict=True):
            optimizer.zero_grad()
            out = run(inputs)
            out.backward(gradient)
            optimizer.step()
        for name in eager.embeddings.tables:
            torch.testing.assert_close(eager.embeddings.tables[name], model.embeddings.tables[name])
        # a learning rate that changes is no reason to compile anew
        for optimizer in step_of:
            optimizer.param_groups[0]["lr"] *= 0.5
    # inductor guards the dense layer's own sizes once more
    assert counter.frame_count <= (1 if backend == "aot_eager" else 2)


def test_backward_mode_compiles():
    table = embedfuse.TableConfig(9, 4, combiner="sum", initializer=1.0)
    collection = EmbeddingCollection(embedfuse.FeatureConfig(table), update="backward")
    FusedOptimizer(collection, default=embedfuse.SGD(0.5))
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    weights = torch.ones(3, requires_grad=True)
    for _ in range(2):
        compiled(Bags(torch.tensor([1, 1, 3]), torch.tensor([0, 2, 3]), weights)).sum().backward()
    moved = collection.tables["table_0"].detach()[:, 0]
    torch.testing.assert_close(moved[:4], torch.tensor([1.0, -1, 1, 0]))
    # the gradient of the weights is that of the rows before their update: 4, then 4 · w
    torch.testing.assert_close(weights.grad, torch.tensor([4.0 + 0, 4 + 0, 4 + 2]))


def test_export_of_inference():
    model = Model().eval()
    inputs = batch_for(model.embeddings, 6, 0)
    sizes = {name: [{0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}, None] for name in inputs}
    with torch.no_grad():
        program = torch.export.export(model, (inputs,), dynamic_shapes=(sizes,))
        for bags in (6, 9):
            other = batch_for(model.embeddings, bags, 1)
            torch.testing.assert_close(program.module()(other), model(other))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("most", [None, 0.7])
@pytest.mark.filterwarnings("ignore:a collection with update:UserWarning")
def test_opcheck(weighted, most):
    collection = three_features(update="autograd", max_norm=most)
    (group,) = collection._groups
    from embedfuse.torch.layout import assemble

    inputs = batch_for(collection, 4, 0, weighted)
    ids, offsets, weights, bags = assemble(collection._parts(inputs))
    if weights is not None:
        weights.requires_grad_()
    number, launch, *_ = collection._launch(0, (1, 1, 1), (False,) * 3)
    tables, starts, size = (
        [t.detach().requires_grad_() for t in collection.tables.values()],
        group.arena.starts,
        group.arena.size,
    )
    common = (launch.features, ids, offsets, weights, bags, launch.width, launch.normalised)
    ops = torch.ops.embedfuse
    descriptors = torch.from_numpy(group.arena.descriptors)
    cut = descriptors if most is not None else None
    _, scale = ops.pooled_lookup(tables, starts, size, *common, "drop", 0, cut)
    grad = torch.randn(bags, launch.width, requires_grad=True)
    flat = torch.randn(size, requires_grad=True)
    torch.library.opcheck(ops.pooled_lookup.default, (tables, starts, size, *common, "drop", 0, cut))
    detached = None if weights is None else weights.detach()
    rest = (launch.features, ids, offsets, detached, scale.detach())
    torch.library.opcheck(ops.row_grad.default, (flat.detach(), size, *rest, grad, bags, None, [], [0]))
    detached_tables = [table.detach() for table in tables]
    torch.library.opcheck(
        ops.row_grad.default, (flat.detach(), size, *rest, grad.detach(), bags, descriptors, detached_tables, starts)
    )
    # its whole-graph test would sum up integer outputs and differentiate them
    torch.library.opcheck(ops.prepare_ids.default, (launch.features, ids, offsets, detached, bags, "drop", 0))
    # differentiable in the weights only where nothing is divided by them
    plain = (launch.features, ids, offsets, None, scale.detach())
    torch.library.opcheck(ops.coefficient_grad.default, ([flat.detach()], [0], size, *plain, grad.detach(), bags, None))
    anchor = torch.zeros(1, requires_grad=True)
    torch.library.opcheck(
        ops.lookup_for_update.default, (anchor, flat.detach(), *common, "drop", number, 1, NOTHING),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip
    torch.library.opcheck(
        ops.finish_backward.default,
        (anchor.detach(), grad.detach(), flat.detach(), *rest, bags, weights is not None, number, 1, NOTHING),
    )


def test_autocast_leaves_tables_in_their_type():
    model = Model()
    optimizer = FusedOptimizer(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch_for(model.embeddings, 5, 0))
        scores = torch.randn(3, dtype=torch.bfloat16, requires_grad=True)
        table = EmbeddingCollection(embedfuse.FeatureConfig(embedfuse.TableConfig(4, 2)), update="autograd")
        pooled = table(Bags(torch.tensor([0, 1, 2]), torch.tensor([0, 3]), scores))
    assert pooled.dtype == torch.float32
    pooled.sum().backward()
    assert scores.grad.dtype == torch.bfloat16
    before = model.embeddings.tables["items"].detach().clone()
    out.float().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.embeddings.tables["items"])


def test_weights_train_through_a_compiled_lookup():
    collection = three_features()
    optimizer = FusedOptimizer(collection)
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(3)
    grads = []
    for run in (collection, compiled):
        generator.manual_seed(3)
        inputs = {
            name: random_bags(config.table.vocabulary_size, 5, generator, weighted=True)
            for name, config in collection.features.items()
        }
        for bags in inputs.values():
            bags.weights.requires_grad_()
        sum(out.square().sum() for out in run(inputs).values()).backward()
        grads.append([bags.weights.grad for bags in inputs.values()])
        optimizer.zero_grad()
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("update", ["step", "autograd"])
def test_dense_ids_of_any_width_compile(update):
    """Without an eager call before, which would have planned their launch."""
    table = embedfuse.TableConfig(9, 4, combiner="sum", initializer=0.0)
    collection = EmbeddingCollection(embedfuse.FeatureConfig(table), embedfuse.SGD(1.0), update=update)
    if update == "step":
        optimizer = FusedOptimizer(collection)
    else:
        optimizer = torch.optim.SGD(collection.parameters(), 1.0)
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    for step, width in enumerate((2, 3, 2)):
        out = compiled(torch.ones(5, width, dtype=torch.int64))
        assert out.shape == (5, width, 4)
        optimizer.zero_grad()
        out.sum().backward()
        optimizer.step()
        assert collection.tables["table_0"][1, 0] == -5 * sum((2, 3, 2)[: step + 1])


def test_a_second_lookup_is_refused_when_compiled_too():
    collection = three_features(update="backward")
    FusedOptimizer(collection)
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    inputs = batch_for(collection, 3, 0)
    compiled(inputs)
    with pytest.raises(RuntimeError, match="looked up again"):
        compiled(inputs)
