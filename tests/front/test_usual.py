"""Lookups and steps like the ones before: whatever happens between them, all is as it is the long way."""

import copy
import gc
import random
from typing import Any

import pytest
import torch
from repeating import repeat

from embedfuse import SGD, Adagrad, FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, JoinedBags
from embedfuse.torch.backends import use_backend

NAMES = ("a", "b", "c")


class Side:
    """A collection and its optimizer; `long` if every lookup and step is to go the long way.

    With `types` its tables are of two, so that there is a lookup of each.
    """

    def __init__(self, update: Any, long: bool, types: bool = False) -> None:
        self.long, self.types = long, types
        torch.manual_seed(3)
        kinds = ("float32", "float64" if types else "float32")
        tables = [TableConfig(9, dim, name=f"t{dim}", dtype=kind) for dim, kind in zip((4, 3), kinds, strict=True)]
        features = {
            "a": FeatureConfig(tables[0]), "b": FeatureConfig(tables[1]), "c": FeatureConfig(tables[0]),
        }  # fmt: skip
        self.collection = EmbeddingCollection(features, Adagrad(0.1), update=update)
        self.optimizer: Any = None if update == "autograd" else FusedOptimizer(self.collection)
        self.out: Any = None

    def forget(self) -> None:
        if self.long:
            self.collection._usual.clear()
            if self.optimizer is not None:
                self.optimizer._usual.clear()


def _bags(rng: random.Random) -> dict[str, Any]:
    bags = rng.choice([1, 2, 2, 2, 5] * 3 + [0])
    lengths = [rng.choice([0, 1, 2, 3]) for _ in range(3 * bags)]
    number = sum(lengths)
    ids = torch.tensor([rng.randrange(9) for _ in range(number)], dtype=rng.choice([torch.int64] * 9 + [torch.int32]))
    if rng.random() < 0.05 and number:
        ids[rng.randrange(number)] = 9
    if rng.random() < 0.1:
        ids = torch.stack([ids, ids], 1)[:, 0]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    weights = None
    if rng.random() < 0.3:
        weights = torch.rand(number, dtype=rng.choice([torch.float32] * 5 + [torch.float64]))
    names = rng.choice([3] * 8 + [NAMES] * 8 + [("b", "a", "c"), 1])
    return {
        "ids": ids, "offsets": offsets, "weights": weights, "names": names, "learned": rng.random() < 0.4,
        "mode": rng.choice([None] * 12 + ["no_grad", "inference"]), "seed": rng.random(),
        "form": rng.choice(["joined"] * 5 + ["nest"] * 5 + ["ids", "matrix"]),
    }  # fmt: skip


def _look_up(side: Side, given: dict[str, Any]) -> Any:
    weights = given["weights"]
    if weights is not None:
        weights = weights.clone().requires_grad_(given["learned"])
    side.forget()
    if given["form"] == "matrix":
        found = side.collection(dict.fromkeys(NAMES, torch.arange(12).view(6, -1) % 9))
        out = torch.cat([found[name].flatten(1) for name in NAMES], 1)
        side.out = (out, None) if out.requires_grad else None
        return out.detach(), out.requires_grad
    if given["form"] == "joined" and not side.types:
        inputs: Any = JoinedBags(given["ids"], given["offsets"], weights, names=given["names"])
    else:
        inputs = dict(zip(NAMES, JoinedBags(given["ids"], given["offsets"], weights, names=3).split(), strict=True))
        if given["form"] == "ids":
            some = NAMES if given["seed"] < 0.5 else NAMES[1:]
            inputs.update(dict.fromkeys(some, torch.arange(len(given["offsets"]) // 3)))
        elif given["seed"] < 0.1 and len(inputs["b"]) > 1:
            # of another number of bags
            inputs["b"] = Bags(inputs["b"].ids[:1], torch.tensor([0, len(inputs["b"].ids[:1])]))
    if given["mode"] is not None:
        with torch.no_grad() if given["mode"] == "no_grad" else torch.inference_mode():
            return side.collection(inputs)["b"] if given["form"] == "nest" else side.collection.concatenated(inputs)
    if given["form"] == "nest" and given["seed"] < 0.5:
        found = side.collection(inputs)
        if len({len(found[name]) for name in NAMES}) > 1:
            return found["b"].detach(), found["b"].requires_grad
        out = torch.cat([found[name] for name in NAMES], 1)
    else:
        out = side.collection.concatenated(inputs)
    side.out = (out, weights) if out.requires_grad else None
    return out.detach(), out.requires_grad


def _backward(side: Side, given: dict[str, Any]) -> Any:
    if side.out is None:
        return None
    out, weights = side.out
    side.out = None
    side.forget()
    generator = torch.Generator().manual_seed(int(1000 * given["seed"]))
    grad = torch.randn(out.shape, generator=generator).to(out.dtype)
    out.backward(grad.t().contiguous().t() if given["seed"] < 0.2 else grad)
    if given["seed"] > 0.97:
        grad.add_(1)
    return None if weights is None else weights.grad


def _step(side: Side, given: dict[str, Any]) -> Any:
    if side.optimizer is None:
        return
    side.forget()
    if given["seed"] < 0.15:
        side.optimizer.grad_scale, side.optimizer.found_inf = torch.tensor(4.0), torch.tensor(given["seed"] < 0.05)
    try:
        side.optimizer.step()
    finally:
        for name in ("grad_scale", "found_inf"):
            side.optimizer.__dict__.pop(name, None)


def _table(side: Side, seed: float) -> torch.nn.Parameter:
    return list(side.collection.tables.values())[seed < 0.5]


def _other(side: Side, given: dict[str, Any]) -> Any:
    """Anything that a user may do in between."""
    seed, collection, optimizer = given["seed"], side.collection, side.optimizer
    which = int(seed * 1000) % 13
    table = _table(side, seed)
    if which == 0:
        table.requires_grad_(not table.requires_grad)
    elif which == 1:
        collection.requires_grad_(seed < 0.3)
    elif which == 2:
        collection.requires_grad_(True)
    elif which == 3:
        table.data = table.data.clone()
    elif which == 4:
        table.data = table.data.t().contiguous().t()
    elif which == 5:
        collection.to(torch.float64 if seed < 0.2 else torch.float32)
    elif which == 6:
        collection.out_of_range = "drop" if seed < 0.5 else "raise"
    elif which == 7 and optimizer is not None:
        optimizer.param_groups[0]["lr"] = seed
    elif which == 8 and optimizer is not None:
        return optimizer.clip_grad_norm_(0.1)
    elif which == 9:
        collection.load_state_dict({k: v + 1 for k, v in collection.state_dict().items()}, assign=seed < 0.5)
    elif which == 10:
        # the same tables, moved by the other one
        other = copy.copy(collection)
        other.concatenated(JoinedBags(torch.tensor([1, 2, 3]), torch.arange(4), names=3))
        other.to(torch.float64 if seed < 0.2 else torch.float32)
    elif which == 11:
        collection.discard() if optimizer is None or seed < 0.5 else optimizer.zero_grad()
    elif which == 12 and optimizer is not None:
        optimizer.load_state_dict(optimizer.state_dict())
    return None


def _tried(call: Any, side: Side, given: dict[str, Any]) -> Any:
    try:
        return call(side, given)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return type(error), str(error)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and all(map(_same, one, other))
    return bool(one == other)


def _calls(rng: random.Random) -> list[Any]:
    """Mostly in the order of a training loop."""
    calls: list[Any] = []
    for _ in range(30):
        for call in (_look_up, _backward, _step):
            if rng.random() < 0.3:
                calls.append(rng.choice([_other] * 9 + [_look_up, _backward, _step]))
            if rng.random() < 0.95:
                calls.append(call)
    return calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("types", [False, True])
@pytest.mark.parametrize("update", ["step", "backward", "autograd"])
def test_anything_may_happen_in_between(update: str, types: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = repeat(monkeypatch)
    rng = random.Random(7)
    for _ in range(90 if not types else 40):
        sides = Side(update, False, types), Side(update, True, types)
        done: list[Any] = []
        for call in _calls(rng):
            given = _bags(rng)
            done.append((call.__name__, given))
            found = [_tried(call, side, given) for side in sides]
            assert _same(*found), done[-6:]
            for one, other in zip(*(side.collection.parameters() for side in sides), strict=True):
                assert _same(one.detach(), other.detach()), done[-6:]
            # not after what happens in between, which asking for the state would settle
            if call is _step and update != "autograd":
                states = [side.optimizer.state_dict()["state"] for side in sides]
                assert all(_same(states[0][t][s], states[1][t][s]) for t in states[0] for s in states[0][t])
    assert repeats.lookups > (30 if update == "autograd" else 200)
    assert repeats.steps > 60 or update == "autograd"


def test_nests_of_one_batch_size_go_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = repeat(monkeypatch)
    collection = Side("step", False).collection
    parts: list[Any] = []
    inner = collection._parts
    monkeypatch.setattr(collection, "_parts", lambda inputs: parts.append(inputs) or inner(inputs))
    bags, ids = Bags(torch.tensor([1, 2, 8]), torch.tensor([0, 1, 3])), torch.tensor([3, 0])
    for values in ((bags, bags, bags), (ids, ids, ids), (bags, ids, bags)):
        inputs = dict(zip(NAMES, values, strict=True))
        # the first makes it, the second is the first of its kind
        collection(inputs), collection(inputs)
        before = repeats.lookups
        collection(inputs), collection.concatenated(inputs)
        assert repeats.lookups == before + 2
    assert not parts
    # what must be looked at feature by feature is looked up as before, too
    for values in ((ids[:, None],) * 3, (bags, ids[:1], bags), (bags, ids[:, None].expand(2, 3), ids)):
        inputs = dict(zip(NAMES, values, strict=True))
        collection(inputs), collection(inputs)
        before = repeats.lookups
        collection(inputs), collection(inputs)
        assert repeats.lookups == before + 2
    assert len(parts) == 12


def test_a_rate_that_counts_is_asked_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats, asked = repeat(monkeypatch), 0

    def rate() -> float:
        nonlocal asked
        asked += 1
        return 0.1 if asked % 3 else 0.2

    collection = EmbeddingCollection({"a": FeatureConfig(TableConfig(9, 4))}, SGD(rate))
    optimizer = FusedOptimizer(collection)
    before = asked
    for number in range(12):
        collection.concatenated(JoinedBags(torch.tensor([1, 2]), torch.arange(3), names=1)).sum().backward()
        optimizer.step()
        assert asked == before + number + 1
    # all but the first, and the first of its kind
    assert repeats.steps == 10


def test_memory_of_before_a_move_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    repeat(monkeypatch)
    collection = EmbeddingCollection({"a": FeatureConfig(TableConfig(9, 4))}, "sgd")
    optimizer = FusedOptimizer(collection)
    for _ in range(4):
        collection.concatenated(JoinedBags(torch.tensor([1, 2]), torch.arange(3), names=1)).sum().backward()
        optimizer.step()
    buffer = weakref.ref(collection._groups[0].arena.buffer)
    collection.to(torch.float64)
    assert buffer() is None


def _trained(update: Any = "step", rate: Any = 0.1, combiner: Any = "sum") -> tuple[EmbeddingCollection, Any]:
    torch.manual_seed(1)
    tables = [TableConfig(9, dim, name=f"t{dim}", combiner=combiner) for dim in (4, 3)]
    collection = EmbeddingCollection({t.name: FeatureConfig(t) for t in tables}, SGD(rate), update=update)
    return collection, FusedOptimizer(collection)


def _joined(weights: Any = None, bags: int = 2) -> JoinedBags:
    return JoinedBags(torch.arange(2 * bags) % 9, torch.arange(2 * bags + 1), weights, names=2)


def _steps(collection: EmbeddingCollection, optimizer: Any, count: int) -> None:
    for _ in range(count):
        collection.concatenated(_joined()).sum().backward()
        optimizer.step()


def test_a_table_that_was_replaced_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat(monkeypatch)
    collection, optimizer = _trained()
    _steps(collection, optimizer, 3)
    old = collection.tables["t4"]
    collection.load_state_dict({k: v.clone() for k, v in collection.state_dict().items()}, assign=True)
    collection.concatenated(_joined()).sum().backward()
    old.square().sum().backward()
    before = collection.tables["t4"].detach().clone()
    optimizer.step()
    assert not torch.equal(before, collection.tables["t4"])


def test_settings_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat(monkeypatch)
    collection, optimizer = _trained()
    _steps(collection, optimizer, 3)
    collection.update = "autograd"
    collection.concatenated(_joined()).sum().backward()
    assert collection.tables["t4"].grad is not None and not collection._ledger.records
    collection, _ = _trained()
    collection.update = "backward"
    optimizer = FusedOptimizer(collection)
    collection.concatenated(_joined())
    with pytest.raises(RuntimeError, match="looked up again"):
        collection.concatenated(_joined())


def test_rates_that_drop_the_gradient_or_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = repeat(monkeypatch)
    leaf, drops = torch.nn.Parameter(torch.tensor(0.1)), False

    def rate() -> float:
        # only where gradients are off
        leaf.mul_(1.0)
        if drops:
            optimizer.zero_grad()
        return float(leaf)

    with torch.no_grad():
        collection, optimizer = _trained(rate=rate)
    _steps(collection, optimizer, 4)
    assert repeats.steps > 0
    drops, before = True, collection.tables["t4"].detach().clone()
    for _ in range(2):
        _steps(collection, optimizer, 1)
        collection._usual.clear()
        optimizer._usual.clear()
    assert torch.equal(before, collection.tables["t4"])


def test_refused_steps_ask_for_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat(monkeypatch)
    asked: list[int] = []
    collection, optimizer = _trained(rate=lambda: 0.1 + 0 * len(asked) + (asked.append(1) or 0))
    _steps(collection, optimizer, 4)
    collection.concatenated(_joined()).sum().backward()
    collection.tables["t4"].data = torch.zeros(5, 4)
    before = len(asked)
    with pytest.raises(ValueError, match="keep its shape"):
        optimizer.step()
    assert len(asked) == before


@pytest.mark.parametrize("chosen", ["eager", "cpu", "triton"])
def test_tables_without_memory(chosen: str) -> None:
    if chosen == "triton" and torch.cuda.is_available():
        pytest.skip("on a GPU Triton serves no CPU")
    with use_backend(chosen):
        table = TableConfig(9, 4, name="a")
        collection = EmbeddingCollection({"a": FeatureConfig(table)}, device="meta")
        nothing = torch.zeros(3, dtype=torch.int64, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
        for _ in range(2):
            assert collection.concatenated(JoinedBags(*nothing, names=1)).shape == (3, 4)


def test_weights_inside_of_transforms() -> None:
    collection, _ = _trained()
    weights = torch.rand(4, requires_grad=True)
    flat, spec = torch.utils._pytree.tree_flatten(_joined(weights))

    def look_up(given: torch.Tensor) -> torch.Tensor:
        return collection.concatenated(torch.utils._pytree.tree_unflatten([*flat[:2], given], spec))

    upstream = torch.rand(2, 7)
    (wanted,) = torch.autograd.grad(look_up(weights), weights, upstream)
    # the C++ engine reads no tensors that a transform has wrapped
    with use_backend("eager"):
        _, back = torch.func.vjp(look_up, weights.detach())
        (found,) = back(upstream)
    assert wanted.abs().min() > 0 and torch.allclose(found, wanted)


def test_what_backward_reads_is_free_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for repeats in (False, True):
        if repeats:
            repeat(monkeypatch)
        collection, optimizer = _trained(combiner="mean")
        losses, before = [], None
        for number in range(8):
            loss = collection.concatenated(_joined(bags=50)).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss)
            live = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == (100,)]
            if number == 3:
                before = len(live)
        assert len(live) == before
        # what a graph holds besides: no buffer, no scale, not its own result
        (one,) = (node[0].one for node in losses[-1].grad_fn.next_functions)
        assert one.table is None and one.scale is None and one.out is None


def test_steps_of_two_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats, partly = repeat(monkeypatch), 0
    rng = random.Random(5)
    towers = []
    for _ in range(2):
        torch.manual_seed(4)
        tables = [TableConfig(9, 4, name="user"), TableConfig(9, 3, name="item", dtype="float64")]
        towers.append(torch.nn.ModuleList([
            EmbeddingCollection({"user": FeatureConfig(tables[0]), "both": FeatureConfig(tables[1])}, Adagrad(0.1)),
            EmbeddingCollection({"item": FeatureConfig(tables[1])}, SGD(0.1)),
        ]))  # fmt: skip
    optimizers = [FusedOptimizer(tower) for tower in towers]
    for _ in range(120):
        # mostly each once; another type of ids is another kind of step
        looked_up = [number for number in (0, 1, 0, 1) if rng.random() < (0.9 if number else 0.4)][-2:]
        kinds = [rng.choice([torch.int64] * 4 + [torch.int32]) for _ in looked_up]
        ids = [torch.tensor([rng.randrange(9) for _ in range(5)], dtype=kind) for kind in kinds]
        before = repeats.steps
        for tower, optimizer in zip(towers, optimizers, strict=True):
            for number, own in zip(looked_up, ids, strict=True):
                features = tower[number].features
                out = tower[number]({name: Bags(own, torch.tensor([0, 2, 2, 5])) for name in features})
                sum(piece.pow(2).sum() for piece in out.values()).backward()
            if optimizer is optimizers[1]:
                optimizer._usual.clear()
            optimizer.step()
            assert not tower[0]._ledger.records and not tower[1]._ledger.records
        waited = sum(1 + (number == 0) for number in set(looked_up))
        partly += 0 < repeats.steps - before < waited
        for one, other in zip(*(tower.parameters() for tower in towers), strict=True):
            assert torch.equal(one, other)
        states = [optimizer.state_dict()["state"] for optimizer in optimizers]
        assert all(
            _same(states[0][table][slot], states[1][table][slot]) for table in states[0] for slot in states[0][table]
        )
    assert repeats.steps > 60 and partly > 0


def test_schedules_are_followed_and_bad_rates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = repeat(monkeypatch)
    made = []
    for _ in range(2):
        torch.manual_seed(4)
        tables = [TableConfig(9, 4, optimizer=SGD(0.1), name="a"), TableConfig(9, 4, optimizer=Adagrad(0.2), name="b")]
        features = {"a": FeatureConfig(tables[0]), "b": FeatureConfig(tables[1])}
        model = torch.nn.ModuleList([
            EmbeddingCollection(features), EmbeddingCollection({"c": FeatureConfig(tables[1])}),
        ])  # fmt: skip
        made.append((model, FusedOptimizer(model)))
    (model, optimizer), (plain, other) = made
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (optimizer, other)]

    def backward() -> None:
        for one in (model, plain):
            ids = torch.tensor([1, 2, 2])
            out = torch.cat([*one[0]({"a": ids, "b": ids}).values(), *one[1]({"c": ids}).values()], 1)
            out.pow(2).sum().backward()

    for number in range(10):
        backward()
        other._usual.clear()
        before = repeats.steps
        optimizer.step(), other.step()
        assert repeats.steps == before + (2 if number > 1 else 0)
        for schedule in schedules:
            schedule.step()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    backward()
    tables = [table.detach().clone() for table in model.parameters()]
    right, optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"], float("nan")
    with pytest.raises(ValueError, match="learning_rate"):
        optimizer.step()
    assert all(map(torch.equal, tables, model.parameters()))
    optimizer.param_groups[1]["lr"] = right
    other._usual.clear()
    optimizer.step(), other.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def _three(*names: str) -> list[EmbeddingCollection]:
    return [EmbeddingCollection([FeatureConfig(TableConfig(10, 4, initializer=1.0, name=name))]) for name in names]


def test_a_step_that_is_refused_is_made_of_no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = repeat(monkeypatch)
    one, two, other = _three("a", "b", "c")
    optimizer, ids = FusedOptimizer(one, two, other, default="sgd"), torch.arange(3)
    for _ in range(4):
        one([ids])[0].sum().backward(), two([ids])[0].sum().backward()
        optimizer.step()
    assert repeats.steps > 0
    kept, other.tables["c"].data = other.tables["c"].data, torch.ones(5, 4)
    # one could be stepped as before, and two not
    one([ids])[0].sum().backward(), two([ids.int()])[0].sum().backward()
    before = [tables.detach().clone() for tables in (one.tables["a"], two.tables["b"])]
    with pytest.raises(ValueError, match="keep its shape"):
        optimizer.step()
    assert torch.equal(before[0], one.tables["a"]) and torch.equal(before[1], two.tables["b"])
    other.tables["c"].data = kept
    optimizer.step()
    assert not torch.equal(before[0], one.tables["a"]) and not torch.equal(before[1], two.tables["b"])


def test_a_shallow_copy_is_stepped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat(monkeypatch)
    (collection,) = _three("a")
    optimizer = FusedOptimizer(collection, copy.copy(collection), default=SGD(0.25))
    for number in range(4):
        collection([torch.arange(3)])[0].sum().backward()
        optimizer.step()
        assert collection.tables["a"][0, 0] == 1 - 0.25 * (number + 1)
