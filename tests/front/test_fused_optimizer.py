"""`FusedOptimizer` against torch optimizers on one plain model with summed gradients."""

import copy
import math

import pytest
import torch
from plain import Plain, batch_for, loss_of, three_features, upstream

import embedfuse
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, use_backend
from embedfuse.torch.backends import why_not

PAIRS = {
    "sgd": (embedfuse.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "adagrad": (
        embedfuse.Adagrad(0.1, epsilon=1e-10),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1, eps=1e-10),
    ),
    "adam": (
        embedfuse.Adam(0.05, bias_correction=True, epsilon=1e-8, lazy_adam=False),
        lambda p: torch.optim.Adam(p, 0.05),
    ),
    "momentum": (
        # every row moves in torch: so it must here, and momentum of rows that are not looked up is lazy
        embedfuse.SGD(0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    ),
}


def every_row(collection, bags, seed, weighted=False):
    """A batch in which each row of each table occurs."""
    inputs = batch_for(collection, bags, seed, weighted)
    for name, config in collection.features.items():
        old = inputs[name]
        ids = torch.cat([old.ids, torch.arange(config.table.vocabulary_size)])
        offsets = torch.cat([old.offsets, torch.tensor([len(ids)])])
        weights = None if old.weights is None else torch.cat([old.weights, torch.rand(len(ids) - len(old.ids))])
        inputs[name] = Bags(ids, offsets, weights)
    return inputs


@pytest.fixture(params=PAIRS)
def pair(request):
    mine, theirs = PAIRS[request.param]
    collection = three_features(items=mine, cities=mine)
    plain = Plain(collection)
    return collection, FusedOptimizer(collection), plain, theirs(list(plain.tables.values()))


def backward(model, inputs, seed, factor=1.0):
    out = model(inputs)
    (loss_of(out, upstream(out, seed)) * factor).backward()


def test_training_equals_torch(pair):
    collection, optimizer, plain, theirs = pair
    for step in range(6):
        inputs = every_row(collection, 5, step, weighted=step % 2 == 1)
        optimizer.zero_grad()
        theirs.zero_grad()
        backward(collection, inputs, step)
        backward(plain, inputs, step)
        optimizer.step()
        theirs.step()
        plain.check(collection)


def test_accumulation_over_micro_batches(pair):
    collection, optimizer, plain, theirs = pair
    for step in range(3):
        theirs.zero_grad()
        for micro in range(3):
            # of different sizes
            inputs = every_row(collection, 3 + micro, 10 * step + micro, weighted=micro == 1)
            backward(collection, inputs, micro)
            backward(plain, inputs, micro)
        optimizer.step()
        theirs.step()
        plain.check(collection)


def test_two_losses_and_three_lookups_of_one_table(pair):
    collection, optimizer, plain, theirs = pair
    batches = [every_row(collection, 4, seed) for seed in range(3)]
    for model in (collection, plain):
        outputs = [model(batch) for batch in batches]
        loss_of(outputs[0], upstream(outputs[0], 1)).backward()
        second = loss_of(outputs[1], upstream(outputs[1], 2)) + loss_of(outputs[2], upstream(outputs[2], 3))
        second.backward()
    optimizer.step()
    theirs.step()
    plain.check(collection)


def test_one_graph_backwarded_twice(pair):
    collection, optimizer, plain, theirs = pair
    inputs = every_row(collection, 4, 1)
    for model in (collection, plain):
        loss = loss_of(out := model(inputs), upstream(out, 1))
        loss.backward(retain_graph=True)
        loss.backward()
    optimizer.step()
    theirs.step()
    plain.check(collection)


def test_zero_grad_drops_what_waits(pair):
    collection, optimizer, plain, theirs = pair
    inputs = every_row(collection, 4, 1)
    backward(collection, inputs, 1)
    optimizer.zero_grad()
    optimizer.step()
    plain.check(collection, rtol=0, atol=0)
    assert all(state.steps.sum() == 0 for states in optimizer._states for state in states)
    backward(collection, inputs, 2)
    backward(plain, inputs, 2)
    optimizer.step()
    theirs.step()
    plain.check(collection)


def test_scheduler(pair):
    collection, optimizer, plain, theirs = pair
    ours = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    other = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 1 / (1 + step))
    for step in range(4):
        inputs = every_row(collection, 4, step)
        theirs.zero_grad()
        backward(collection, inputs, step)
        backward(plain, inputs, step)
        optimizer.step()
        theirs.step()
        ours.step()
        other.step()
        plain.check(collection)


def test_freezing_a_table(pair):
    collection, optimizer, plain, theirs = pair
    for step in range(4):
        freeze = step in (1, 2)
        collection.tables["items"].requires_grad_(not freeze)
        plain.tables["items"].requires_grad_(not freeze)
        inputs = every_row(collection, 4, step)
        theirs.zero_grad()
        before = collection.tables["items"].detach().clone()
        backward(collection, inputs, step)
        backward(plain, inputs, step)
        optimizer.step()
        theirs.step()
        if freeze:
            assert torch.equal(collection.tables["items"].detach(), before)
        plain.check(collection)
    for table in collection.tables.values():
        table.requires_grad_(False)
    out = collection(every_row(collection, 4, 0))
    assert not any(value.requires_grad for value in out.values())


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_by_norm_together_with_dense_parameters(pair, limit):
    collection, optimizer, plain, theirs = pair
    dense = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for step in range(3):
        inputs = every_row(collection, 4, step)
        theirs.zero_grad()
        for parameter in dense:
            parameter.grad = torch.randn(3, generator=torch.Generator().manual_seed(step))
        backward(collection, inputs, step)
        backward(plain, inputs, step)
        norm = optimizer.clip_grad_norm_(limit, [dense[0]])
        expected = torch.nn.utils.clip_grad_norm_([*plain.tables.values(), dense[1]], limit)
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(dense[0].grad, dense[1].grad)
        optimizer.step()
        theirs.step()
        plain.check(collection)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("where", ["nowhere", "tables", "both"])
def test_grad_scaler(pair, unscale, where):
    collection, optimizer, plain, theirs = pair
    ours, other = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))
    dense = [torch.nn.Parameter(torch.ones(())) for _ in range(2)]
    tops = [torch.optim.SGD([parameter], 0.1) for parameter in dense]
    for step in range(5):
        inputs = every_row(collection, 4, step)
        bad = where != "nowhere" and step == 2
        for model, optim, top, scale, parameter in (
            (collection, optimizer, tops[0], ours, dense[0]), (plain, theirs, tops[1], other, dense[1]),
        ):  # fmt: skip
            optim.zero_grad()
            top.zero_grad()
            out = model(inputs)
            gradients = upstream(out, step)
            if bad:
                gradients["city"][1, 1] = math.inf
            loss = loss_of(out, gradients) + parameter * (math.inf if bad and where == "both" else 1.0)
            # inf - inf would be NaN, which is just as bad
            scale.scale(loss).backward()
            if unscale:
                scale.unscale_(optim)
            scale.step(optim)
            scale.step(top)
            scale.update()
        assert ours.get_scale() == other.get_scale()
        plain.check(collection)
        torch.testing.assert_close(dense[0], dense[1])
    steps = {int(s) for states in optimizer._states for state in states for s in state.steps}
    assert steps == {4 if where != "nowhere" else 5}


def test_evaluation_changes_nothing():
    collection = three_features(items=embedfuse.Adam(0.1, epsilon=1e-18), cities=embedfuse.Adam(0.1, epsilon=1e-18))
    optimizer = FusedOptimizer(collection)
    for _ in range(5):
        with torch.no_grad():
            collection(batch_for(collection, 3, 0))
        collection(batch_for(collection, 3, 0))
        optimizer.step()
    table = embedfuse.TableConfig(2, 1, combiner="sum", initializer=1.0)
    one = EmbeddingCollection(embedfuse.FeatureConfig(table))
    adam = FusedOptimizer(one, default=embedfuse.Adam(0.1, bias_correction=True, sum_inside_sqrt=False, epsilon=1e-18))
    with torch.no_grad():
        for _ in range(5):
            one(torch.tensor([0]))
    one(torch.tensor([0])).sum().backward()
    adam.step()
    torch.testing.assert_close(one.tables["table_0"].detach(), torch.tensor([[0.9], [1.0]]))
    assert all(int(s) == 0 for states in optimizer._states for state in states for s in state.steps)


def test_lazy_adam_is_sparse_adam():
    mine = embedfuse.Adam(0.05, bias_correction=True, epsilon=1e-12)
    collection = three_features(items=mine, cities=mine)
    optimizer = FusedOptimizer(collection)
    plain = Plain(collection)
    theirs = torch.optim.SparseAdam(list(plain.tables.values()), 0.05, eps=1e-12)
    for step in range(20):
        inputs = batch_for(collection, 4, step)
        theirs.zero_grad()
        backward(collection, inputs, step)
        backward(plain, inputs, step)
        for name, table in plain.tables.items():
            used = [b.ids for k, b in inputs.items() if collection.features[k].table.name == name]
            rows = torch.cat(used).unique()
            table.grad = torch.sparse_coo_tensor(
                rows[None], table.grad[rows], table.shape, is_coalesced=True, check_invariants=False
            )
        optimizer.step()
        theirs.step()
        plain.check(collection, rtol=1e-4, atol=1e-5)


def test_one_step_for_each_contribution():
    def run(together):
        table = embedfuse.TableConfig(3, 1, combiner="sum", initializer=0.0)
        collection = EmbeddingCollection(embedfuse.FeatureConfig(table))
        rule = embedfuse.Adagrad(1.0, use_gradient_accumulation=together)
        optimizer = FusedOptimizer(collection, default=rule)
        out = collection(Bags.from_lists([[1, 2], [1], [-1, 1]]))
        (out * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
        optimizer.step()
        return collection.tables["table_0"].detach()[:, 0].tolist(), optimizer.state_dict()["state"]["table_0"]

    rows, state = run(True)
    assert rows[1] == pytest.approx(-6 / math.sqrt(36.1))
    rows, state = run(False)
    assert rows == pytest.approx(
        [0, -1 / math.sqrt(1.1) - 2 / math.sqrt(5.1) - 3 / math.sqrt(14.1), -1 / math.sqrt(1.1)]
    )
    assert state["accumulators"][1].item() == pytest.approx(14.1)


def test_per_table_optimizers_and_groups():
    collection = three_features(
        items=embedfuse.Adagrad(0.1), cities=embedfuse.FTRL(0.2, l1_regularization_strength=0.1)
    )
    optimizer = FusedOptimizer(collection)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert set(optimizer.state_dict()["state"]["cities"]) == {"accumulators", "linears", "step"}
    accumulators = optimizer.state[collection.tables["items"]]["accumulators"]
    backward(collection, batch_for(collection, 4, 0), 0)
    optimizer.step()
    assert accumulators.shape == (30, 8) and accumulators.max() > 0.1
    shared = three_features(items=None, cities=None, optimizer="adagrad")
    assert len(FusedOptimizer(shared).param_groups) == 1


def test_learning_rate_as_a_function():
    rates = iter([1.0, 0.5, 0.25])
    current = {"rate": next(rates)}
    table = embedfuse.TableConfig(2, 1, combiner="sum", initializer=0.0)
    collection = EmbeddingCollection(embedfuse.FeatureConfig(table))
    optimizer = FusedOptimizer(collection, default=embedfuse.SGD(lambda: current["rate"]))
    for rate in (1.0, 0.5, 0.25):
        current["rate"] = rate
        collection(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert collection.tables["table_0"][1].item() == -1.75


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_save_and_resume_is_bit_identical(name):
    rule = PAIRS[name][0]
    collection = three_features(items=rule, cities=embedfuse.FTRL(0.3))
    optimizer = FusedOptimizer(collection)
    for step in range(3):
        backward(collection, batch_for(collection, 4, step), step)
        optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5
    saved = copy.deepcopy((collection.state_dict(), optimizer.state_dict()))
    other = three_features(items=rule, cities=embedfuse.FTRL(0.3))
    resumed = FusedOptimizer(other)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for model, optim in ((collection, optimizer), (other, resumed)):
        for step in range(3, 6):
            backward(model, batch_for(model, 4, step), step)
            optim.step()
    for table in ("items", "cities"):
        assert torch.equal(collection.tables[table], other.tables[table])


def test_backward_mode_equals_step_mode_and_refuses_the_rest():
    collection = three_features(update="backward", items=embedfuse.Adagrad(0.1), cities=embedfuse.Adagrad(0.1))
    with pytest.raises(RuntimeError, match="FusedOptimizer"):
        collection(batch_for(collection, 3, 0))
    optimizer = FusedOptimizer(collection)
    other = three_features(items=embedfuse.Adagrad(0.1), cities=embedfuse.Adagrad(0.1))
    other.load_state_dict(collection.state_dict())
    reference = FusedOptimizer(other)
    for step in range(3):
        inputs = batch_for(collection, 4, step)
        backward(collection, inputs, step)
        backward(other, inputs, step)
        reference.step()
        for name in other.tables:
            assert torch.equal(collection.tables[name], other.tables[name])
        optimizer.step()
    out = collection(inputs)
    with pytest.raises(RuntimeError, match="looked up again"):
        collection(inputs)
    with torch.no_grad():
        collection(inputs)
    before = collection.tables["items"].detach().clone()
    collection.discard()
    loss_of(collection(inputs), upstream(out, 0)).backward()
    assert not torch.equal(before, collection.tables["items"])


def test_refusals():
    collection = three_features(items=None, cities=None)
    with pytest.raises(ValueError, match="no optimizer"):
        FusedOptimizer(collection)
    with pytest.raises(ValueError, match="at least one EmbeddingCollection"):
        FusedOptimizer(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="autograd"):
        FusedOptimizer(three_features(update="autograd"))
    first, second = FusedOptimizer(three_features()), FusedOptimizer(three_features(items=embedfuse.Adagrad(0.1)))
    with pytest.raises(ValueError):
        first.load_state_dict(second.state_dict())
    state = first.state_dict()
    del state["state"]["items"]
    with pytest.raises(ValueError, match="items"):
        first.load_state_dict(state)
    with pytest.raises(ValueError, match="max_norm"):
        first.clip_grad_norm_(-1.0)


def test_two_collections_in_one_model():
    model = torch.nn.ModuleDict({"a": three_features(), "b": three_features()})
    optimizer = FusedOptimizer(model)
    assert set(optimizer.state_dict()["state"]) == {"a.items", "a.cities", "b.items", "b.cities"}
    for name in ("a", "b"):
        plain = Plain(model[name])
        inputs = batch_for(model[name], 4, 1)
        backward(model[name], inputs, 1)
        backward(plain, inputs, 1)
        optimizer.step()
        torch.optim.SGD(plain.tables.values(), 0.1).step()
        plain.check(model[name])


def test_a_refused_lookup_leaves_nothing_open():
    collection = three_features(update="backward")
    FusedOptimizer(collection)
    inputs = batch_for(collection, 3, 0)
    with pytest.raises(IndexError):
        collection({**inputs, "city": Bags.from_lists([[7], [], []])})
    backward(collection, inputs, 1)


@pytest.mark.parametrize("name", ["eager", "cpu", "triton"])
def test_a_table_frozen_between_two_backwards_of_a_dense_step(name):
    if why_not(name, torch.device("cpu")):
        pytest.skip(f"{name} does not serve a CPU here")
    adam = embedfuse.Adam(0.05, bias_correction=True, epsilon=1e-8, lazy_adam=False)
    tables = [embedfuse.TableConfig(8, 4, 1.0, adam, name=table) for table in "ab"]
    collection = EmbeddingCollection({table.name: embedfuse.FeatureConfig(table) for table in tables})
    optimizer = FusedOptimizer(collection)
    plain = {table: torch.ones(8, 4, requires_grad=True) for table in "ab"}
    theirs = torch.optim.Adam(plain.values(), 0.05)
    inputs = {"a": torch.tensor([3, 6]), "b": torch.tensor([2, 5])}
    with use_backend(name):
        for trained in ("ab", "a"):
            for table in "ab":
                collection.tables[table].requires_grad_(table in trained)
            rows = collection(inputs)
            for table in trained:
                (rows[table].sum() * 0.5).backward(retain_graph=True)
                (plain[table][inputs[table]].sum() * 0.5).backward()
        optimizer.step()
    theirs.step()
    for table in "ab":
        torch.testing.assert_close(collection.tables[table].detach(), plain[table].detach())
