"""Tables that layers share, memories in a stack, parameter groups, and the use of slots."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from embedfuse.torch import FusedOptimizer
from embedfuse.torch.memory import (
    MemoryPlus,
    ProductKeyMemory,
    UltraMem,
    ValueTable,
    memory_positions,
    param_groups,
    place_memories,
    plot_usage,
    record_usage,
    usage_counts,
    usage_stats,
)


class Layer(nn.Module):
    """Something with a block to replace."""

    def __init__(self) -> None:
        super().__init__()
        self.feed_forward = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.feed_forward(x)
        return out


# --- tables --------------------------------------------------------------------------------------------------------


def test_a_table_is_an_embedding_bag() -> None:
    bag = nn.EmbeddingBag(9, 4, mode="sum")
    table = ValueTable(9, 4)
    table.load_state_dict(bag.state_dict())
    ids, weights = torch.randint(0, 9, (3, 5)), torch.randn(3, 5)
    torch.testing.assert_close(table(ids, weights), bag(ids, per_sample_weights=weights))
    torch.testing.assert_close(table(ids[None], None)[0], bag(ids))
    other = ValueTable(9, 4)
    other.load_state_dict(table.state_dict())
    assert torch.equal(other.weight, bag.weight)


def test_negative_ids_are_absent() -> None:
    table = ValueTable(3, 2, initializer=1.0)
    assert table(torch.tensor([[0, -1], [-1, -1]]), torch.tensor([[2.0, 5.0], [1.0, 1.0]])).tolist() == [[2, 2], [0, 0]]


def test_a_table_of_zeros() -> None:
    assert ValueTable(3, 2, initializer=0.0).weight.abs().sum() == 0


def test_sparse_gradients_suit_sparse_adam() -> None:
    table = ValueTable(9, 4, grad="sparse")
    before = table.weight.detach().clone()
    optimizer = torch.optim.SparseAdam([table.weight], 0.1)
    table(torch.tensor([[1, 1, 7]])).sum().backward()
    optimizer.step()
    assert (table.weight != before).any(1).nonzero().flatten().tolist() == [1, 7]
    with torch.no_grad():
        table(torch.tensor([[1]]))


def test_two_layers_share_rows() -> None:
    pool = ValueTable(25, 6)
    model = nn.Sequential(MemoryPlus(6, 5, pool, topk=2), MemoryPlus(6, 5, pool, topk=2))
    assert model[0].values is model[1].values
    assert sum(parameter is pool.weight for parameter in model.parameters()) == 1
    groups = param_groups(model, 1e-3, 1e-2, weight_decay=0.1)
    assert [group["lr"] for group in groups] == [1e-3, 1e-2] and groups[1]["params"] == [pool.weight]
    assert groups[0]["weight_decay"] == 0.1 and groups[1]["weight_decay"] == 0
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    x = torch.randn(4, 6)
    model(x).sum().backward()
    both = pool.weight.grad
    pool.weight.grad = None
    middle = model[0](x)
    model[1](middle.detach()).sum().backward()
    second = pool.weight.grad
    pool.weight.grad = None
    leaf = middle.detach().requires_grad_()
    model[1](leaf).sum().backward()
    pool.weight.grad = None
    model[0](x).backward(leaf.grad)
    assert both is not None and second is not None and pool.weight.grad is not None
    torch.testing.assert_close(both, second + pool.weight.grad)


def test_shared_rows_step_once_for_all_layers() -> None:
    pools = [ValueTable(25, 6), ValueTable(25, 6, update="step", optimizer="sgd")]
    models = [nn.Sequential(*(MemoryPlus(6, 5, pool, topk=2) for _ in range(2))) for pool in pools]
    models[1].load_state_dict(models[0].state_dict())
    rows = FusedOptimizer(models[1])
    rows.param_groups[0]["lr"] = 0.1
    x = torch.randn(4, 6)
    for model in models:
        model(x).square().sum().backward()
    torch.optim.SGD([pools[0].weight], 0.1).step()
    rows.step()
    torch.testing.assert_close(pools[1].weight, pools[0].weight)


def test_rates_are_checked() -> None:
    with pytest.raises(ValueError, match="`value_lr` must be above 0, got 0"):
        param_groups(Layer(), 0.1, 0)
    assert len(param_groups(Layer(), 0.1, 0.1)) == 1


# --- stacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "arguments", "expected"),
    [
        (24, {}, [4, 12, 20]),
        (12, {"spacing": 2}, [4, 6, 8]),
        (6, {}, [1, 3, 5]),
        (1, {"count": 1}, [0]),
        (4, {"count": 2}, [1, 3]),
    ],
)
def test_where_memories_go(layers: int, arguments: dict[str, int], expected: list[int]) -> None:
    assert memory_positions(layers, **arguments) == expected


def test_impossible_places_are_named() -> None:
    with pytest.raises(ValueError, match="`count` must be at most the number of layers, 2, got 3"):
        memory_positions(2)
    with pytest.raises(ValueError, match="`spacing` must keep 3 memories inside of 6 layers, got 4"):
        memory_positions(6, spacing=4)


def test_memories_take_their_places() -> None:
    layers = nn.ModuleList(Layer() for _ in range(6))
    made = place_memories(layers, MemoryPlus(6, 5, topk=2, heads=3, qk_norm=True))
    assert [isinstance(layer.feed_forward, MemoryPlus) for layer in layers] == [False, True] * 3
    assert len({id(memory.values) for memory in made}) == 1
    assert len({id(memory.keys.keys) for memory in made}) == 3
    assert [(memory.keys.topk, memory.keys.heads) for memory in made] == [(2, 3)] * 3
    assert all(memory.keys.scale is not None for memory in made)
    assert made[0].gate is not None and made[0].out is not None and made[0].query.half_width == 3
    x = torch.randn(2, 6)
    for layer in layers:
        x = layer(x)
    x.sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_wrong_places_are_named() -> None:
    layers = nn.ModuleList(Layer() for _ in range(3))
    memory = MemoryPlus(6, 5, topk=2)
    with pytest.raises(ValueError, match=r"`positions` must be different layers from 0 to 2, got \[3\]"):
        place_memories(layers, memory, positions=[3])
    with pytest.raises(ValueError, match="`attribute` must name a module of each layer to replace, got 'mlp'"):
        place_memories(layers, memory, attribute="mlp")


# --- use -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "kl", "gini", "hold"),
    [
        ([1, 0, 0, 0], math.log(4), 1 - 2 / 4, (1, 1, 1)),
        ([1, 1, 1, 1], 0.0, -1 / 4, (2, 4, 4)),
        ([2, 1, 1, 0], 0.34657, 1 - 2 * (0 + 0.25 + 0.5 + 1) / 4, (1, 3, 3)),
    ],
)
def test_known_statistics(counts: list[float], kl: float, gini: float, hold: tuple[int, int, int]) -> None:
    found = usage_stats(torch.tensor(counts), top1=torch.tensor([1.0, 0, 0, 0]))
    assert found.kl == pytest.approx(kl, abs=1e-5) and found.gini == pytest.approx(gini)
    assert (found.hold_50, found.hold_90, found.hold_99) == hold
    assert found.used == sum(count > 0 for count in counts) / 4 and found.top1_used == 0.25
    assert found.describe()["num_slots"] == 4


def test_counts_are_those_of_bincount() -> None:
    ids, weights = torch.randint(0, 7, (4, 5)), torch.rand(4, 5, dtype=torch.float64)
    torch.testing.assert_close(usage_counts(ids, 7), torch.bincount(ids.flatten(), minlength=7).double())
    torch.testing.assert_close(usage_counts(ids, 7, weights), torch.bincount(ids.flatten(), weights.flatten(), 7))
    assert usage_counts(torch.tensor([-1, 2]), 3).tolist() == [0, 0, 1]


def test_recording_sees_what_was_read(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": ProductKeyMemory(6, 5, heads=2, topk=2), "b": UltraMem(6, 6, heads=2, topk=2)})
    x, mask = torch.randn(4, 6), torch.tensor([True, True, False, True])
    with record_usage(model) as uses:
        for module in model.values():
            module(x, mask)
    model["a"](x)
    assert set(uses) == {"a", "b"}
    for use in uses.values():
        # three tokens, two heads, two slots each
        assert use.counts.sum() == 12 and use.top1.sum() == 6
    assert uses["a"].weights.sum() == pytest.approx(6)
    found = uses["a"].stats()
    assert 0 < (found.top1_used or 0) <= found.used <= 12 / 25 and found.weighted_kl is not None
    plot_usage(uses, tmp_path / "use.png")
    assert (tmp_path / "use.png").read_bytes()[:4] == b"\x89PNG"


def test_wrong_uses_are_named() -> None:
    with (
        pytest.raises(ValueError, match="`model` must contain a memory layer, got Linear"),
        record_usage(nn.Linear(1, 1)),
    ):
        pass
    with pytest.raises(ValueError, match="`counts` must not all be 0"):
        usage_stats(torch.zeros(3))
    with pytest.raises(ValueError, match="`weights` must have one entry a slot"):
        usage_stats(torch.ones(3), torch.ones(2))
    wrong: Any = torch.ones(2)
    with pytest.raises(ValueError, match="`weights` must have the shape of `ids`"):
        usage_counts(torch.tensor([1]), 3, wrong)
