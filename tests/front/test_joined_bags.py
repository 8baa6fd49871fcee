"""All features of a batch in three tensors: the same numbers as one `Bags` for each."""

import copy
from types import SimpleNamespace

import pytest
import torch

import embedfuse
from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, JoinedBags


def collection_of(combiner="mean", device="cpu", **more):
    user = TableConfig(40, 5, combiner=combiner, name="users")
    item = TableConfig(30, 8, combiner="sum", name="items")
    features = {"user": FeatureConfig(user), "item": FeatureConfig(item), "seen": FeatureConfig(item)}
    return EmbeddingCollection(features, embedfuse.Adagrad(0.1), device=device, **more)


def batch_of(weighted=False, bags=7, kind=torch.int64):
    made = {}
    for name, rows in (("user", 40), ("item", 30), ("seen", 30)):
        lengths = torch.randint(0, 4, (bags,))
        ids = torch.randint(0, rows, (int(lengths.sum()),), dtype=kind)
        weights = torch.randn(len(ids)).requires_grad_() if weighted else None
        made[name] = Bags.from_lengths(ids, lengths, weights)
    return made


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("update", ["step", "backward", "autograd"])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_trains_like_one_bags_for_each_feature(backend, device, update, combiner, kind, weighted):
    apart, joined = (collection_of(combiner, device, update=update) for _ in range(2))
    joined.load_state_dict(apart.state_dict())
    fused = update != "autograd"
    optimizers = [FusedOptimizer(one) if fused else torch.optim.SGD(one.parameters(), 0.1) for one in (apart, joined)]
    for bags in (7, 3):
        batch = batch_of(weighted, bags, kind)
        whole = JoinedBags.join({name: Bags(b.ids, b.offsets, b.weights) for name, b in batch.items()}).to(device)
        assert len(whole) == bags and whole.features == 3
        weights = None
        if weighted:
            weights = whole.weights.detach().requires_grad_()
            whole = JoinedBags(whole.ids, whole.offsets, weights, names=whole.names)
        outs = [apart({name: one.to(device) for name, one in batch.items()}), joined(whole)]
        upstream = {name: torch.randn_like(out) for name, out in outs[0].items()}
        for out, optimizer in zip(outs, optimizers, strict=True):
            for name in upstream:
                torch.testing.assert_close(out[name], outs[0][name], rtol=0, atol=0)
            optimizer.zero_grad()
            sum((out[name] * upstream[name]).sum() for name in upstream).backward()
            optimizer.step()
        for name, table in apart.tables.items():
            torch.testing.assert_close(joined.tables[name], table, rtol=0, atol=0)
        if weighted:
            theirs = torch.cat([one.weights.grad for one in batch.values()])
            torch.testing.assert_close(weights.grad.cpu(), theirs, rtol=1e-6, atol=1e-6)


def test_concatenated_and_two_lookups_before_a_step():
    first, second = (collection_of() for _ in range(2))
    second.load_state_dict(first.state_dict())
    one, other = FusedOptimizer(first), FusedOptimizer(second)
    for _ in range(2):
        batch = batch_of()
        upstream = torch.randn(7, 21)
        first.concatenated(batch).backward(upstream)
        # joined and apart in one step
        second.concatenated(JoinedBags.join(batch)).backward(upstream)
    batch = batch_of()
    for collection in (first, second):
        collection.concatenated(batch).sum().backward()
    one.step()
    other.step()
    for name, table in first.tables.items():
        torch.testing.assert_close(second.tables[name], table)


def test_keyed_jagged_tensor_and_back():
    batch = batch_of(weighted=True)
    joined = JoinedBags.join(batch)
    keyed = SimpleNamespace(
        keys=lambda: ["user", "item", "seen"], values=lambda: joined.ids, offsets=lambda: joined.offsets.int(),
        weights_or_none=lambda: joined.weights,
    )  # fmt: skip
    again = JoinedBags.from_keyed_jagged(keyed)
    assert again.names == ("user", "item", "seen")
    for mine, theirs in zip(again.split(), batch.values(), strict=True):
        assert mine.to_lists() == theirs.to_lists()
        torch.testing.assert_close(mine.weights, theirs.weights)
    for same in (copy.copy(again), again.to("cpu"), copy.deepcopy(JoinedBags.join(batch_of()))):
        assert same.features == 3 and len(same) == 7
    assert "3 features, 7 bags" in repr(again)


def test_mixed_ids_and_weights_of_some():
    joined = JoinedBags.join(
        [
            Bags.from_lists([[1], []]),
            Bags(torch.tensor([2, 3], dtype=torch.int32), torch.tensor([0, 1, 2]), torch.ones(2)),
        ]
    )
    assert joined.ids.tolist() == [1, 2, 3] and joined.offsets.tolist() == [0, 1, 1, 2, 3]
    assert joined.weights.tolist() == [1.0, 1.0, 1.0] and joined.names == 2


@pytest.mark.parametrize("compiler", ["aot_eager"])
def test_compiles_whole_and_once(compiler):
    from torch._dynamo.testing import CompileCounterWithBackend

    eager, model = (collection_of() for _ in range(2))
    model.load_state_dict(eager.state_dict())
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    optimizers = [FusedOptimizer(eager), FusedOptimizer(model)]
    for bags in (7, 4, 11):
        batch = JoinedBags.join(batch_of(bags=bags))
        for run, optimizer in zip((eager, compiled), optimizers, strict=True):
            sum(out.square().sum() for out in run(batch).values()).backward()
            optimizer.step()
        for name, table in eager.tables.items():
            torch.testing.assert_close(model.tables[name], table)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JoinedBags(torch.arange(3), torch.tensor([0, 1, 3]), names=3), r"\[F \* B \+ 1\] for 3 features"),
        (lambda: JoinedBags(torch.arange(3), torch.tensor([0, 1, 3]), names=[]), "for 0 features"),
        (lambda: JoinedBags(torch.arange(3), torch.tensor([0, 2, 1]), names=1), "offsets"),
        (lambda: JoinedBags.join([]), "one batch size"),
        (lambda: JoinedBags.join([Bags.from_lists([[1]]), Bags.from_lists([[1], [2]])]), "one batch size"),
        (lambda: collection_of()(JoinedBags.join(list(batch_of().values())[:2])), "features of the collection"),
        (
            lambda: collection_of()(JoinedBags.join(dict(reversed(batch_of().items())))),
            r"in their order, \['user', 'item', 'seen'\], got \['seen', 'item', 'user'\]",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("names", ["user", True])
def test_names_are_no_text(names):
    with pytest.raises(TypeError, match="`names` must be a sequence of names"):
        JoinedBags(torch.tensor([1]), torch.tensor([0, 1]), names=names)


def test_defaults_and_lengths_of_rows_and_export():
    table = TableConfig(10, 4, combiner="mean", name="a", max_norm=0.3)
    features = {"x": FeatureConfig(table, default_id=3), "y": FeatureConfig(table, default_id=1)}
    collection = EmbeddingCollection(features)
    batch = {name: Bags.from_lists([[1, -1], [], [2, 3, 3], [-1]]) for name in features}
    joined = JoinedBags.join(batch)
    for name, out in collection(batch).items():
        assert torch.equal(collection(joined)[name], out)
    size = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(collection, (joined,), dynamic_shapes=([[size, size, None]],))
    other = JoinedBags.join({name: Bags.from_lists([[7]] * 4) for name in features})
    for name, out in collection(other).items():
        torch.testing.assert_close(program.module()(other)[name], out)


def test_refuses_what_has_no_place_in_one_launch():
    half = TableConfig(9, 4, name="half", dtype="bfloat16")
    several = EmbeddingCollection([FeatureConfig(TableConfig(9, 4, name="whole")), FeatureConfig(half)])
    joined = JoinedBags.join([Bags.from_lists([[1]]), Bags.from_lists([[2]])])
    with pytest.raises(ValueError, match="one storage type"):
        several(joined)
    sequence = EmbeddingCollection([FeatureConfig(TableConfig(9, 4), max_sequence_length=3) for _ in range(2)])
    with pytest.raises(ValueError, match="max_sequence_length"):
        sequence(joined)
    with pytest.raises(IndexError, match=r"feature '1' must lie in \[0, 9\)"):
        EmbeddingCollection([FeatureConfig(TableConfig(9, 4)) for _ in range(2)])(
            JoinedBags.join([Bags.from_lists([[1]]), Bags.from_lists([[9]])])
        )


@pytest.mark.parametrize("what", ["ids", "offsets"])
def test_a_batch_written_before_the_step_is_noticed(what):
    collection = collection_of()
    optimizer = FusedOptimizer(collection)
    joined = JoinedBags.join(batch_of())
    collection.concatenated(joined).sum().backward()
    before = {name: table.detach().clone() for name, table in collection.tables.items()}
    getattr(joined, what).zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        optimizer.step()
    for name, table in collection.tables.items():
        assert torch.equal(table, before[name])
    optimizer.zero_grad()
    optimizer.step()
