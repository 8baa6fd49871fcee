"""Sums by group, and layers made of them, whose rows a fused optimizer steps or of which only some learn."""

from typing import Any

import pytest
import torch
from torch import nn

import embedfuse
from embedfuse.torch import FusedOptimizer
from embedfuse.torch.gather.grouped import grouped_gather_sum
from embedfuse.torch.memory import PEER, UltraMem, ValueTable

ROWS, DIM, GROUPS = 9, 6, 4


def drawn(device: Any, slices: int | None) -> tuple[Any, ...]:
    indices = torch.randint(0, ROWS, (2, 3, 5), device=device)
    shape = indices.shape if slices is None else (slices, *indices.shape)
    weights = torch.randn(shape, device=device).requires_grad_()
    return indices, weights, torch.randint(0, GROUPS, indices.shape, device=device)


def judged(table: Any, indices: Any, weights: Any, groups: Any) -> Any:
    chosen = torch.nn.functional.one_hot(groups, GROUPS).to(table.dtype)
    rows = table[indices]
    if weights.dim() == indices.dim():
        return torch.einsum("...k,...ke,...kd->...ed", weights, chosen, rows)
    parts = rows.chunk(len(weights), -1)
    return torch.cat(
        [torch.einsum("...k,...ke,...kd->...ed", w, chosen, part) for w, part in zip(weights, parts, strict=True)], -1
    )


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("slices", [None, 1, 3])
def test_rows_step_as_with_a_dense_gradient(backend: Any, device: Any, slices: Any, update: Any) -> None:
    values = ValueTable(ROWS, DIM, update=update, optimizer=embedfuse.Adagrad(0.1), device=device)
    optimizer = FusedOptimizer(values)
    plain = values.weight.detach().double().requires_grad_()
    judge = torch.optim.Adagrad([plain], 0.1, initial_accumulator_value=0.1, eps=0)
    for _ in range(2):
        indices, weights, groups = drawn(device, slices)
        given = weights.detach().double().requires_grad_()
        out = grouped_gather_sum(values.source, indices, weights, groups, GROUPS)
        expected = judged(plain, indices, given, groups)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        upstream = torch.randn_like(out)
        judge.zero_grad()
        # expanded and strided on its way
        (out * upstream).sum().backward()
        (expected * upstream.double()).sum().backward()
        optimizer.step()
        judge.step()
        torch.testing.assert_close(weights.grad.double(), given.grad, rtol=1e-5, atol=1e-5)
        assert values.weight.grad is None
        touched = plain.grad.abs().sum(1) > 0
        torch.testing.assert_close(values.weight[touched].double(), plain[touched], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("update", ["autograd", "step"])
@pytest.mark.parametrize("slices", [None, 2])
def test_masked_rows_do_not_learn(backend: Any, device: Any, slices: Any, update: Any) -> None:
    rule = "sgd" if update == "step" else None
    values = ValueTable(ROWS, DIM, update=update, optimizer=rule, device=device)
    mask = torch.arange(ROWS, device=device) % 3 == 0
    before = values.weight.detach().clone()
    optimizer = FusedOptimizer(values) if update == "step" else None
    indices, weights, groups = drawn(device, slices)
    out = grouped_gather_sum(values.source, indices, weights, groups, GROUPS, row_mask=mask)
    plain = before.double().requires_grad_()
    expected = judged(plain, indices, weights.detach().double(), groups)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream.double())
    if optimizer is not None:
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()
        found = before - values.weight.detach()
    else:
        found = values.weight.grad
    torch.testing.assert_close(found.double(), plain.grad * mask[:, None], rtol=1e-4, atol=1e-4)
    assert weights.grad is not None and (weights.grad != 0).any()


def test_a_compiled_call_leaves_its_rows_to_the_optimizer() -> None:
    for slices in (None, 2):
        torch._dynamo.reset()
        values = ValueTable(ROWS, DIM, update="step", optimizer="sgd")
        optimizer = FusedOptimizer(values)
        plain = values.weight.detach().clone().requires_grad_()
        indices, weights, groups = drawn("cpu", slices)

        def run(weights: Any, rest: Any = (values.source, indices, groups)) -> Any:
            return grouped_gather_sum(rest[0], rest[1], weights, rest[2], GROUPS)

        out = torch.compile(run, fullgraph=True, backend="aot_eager")(weights)
        expected = judged(plain, indices, weights, groups)
        torch.testing.assert_close(out, expected)
        upstream = torch.randn_like(out)
        out.backward(upstream)
        optimizer.param_groups[0]["lr"] = 1.0
        expected.backward(upstream)
        before = values.weight.detach().clone()
        optimizer.step()
        torch.testing.assert_close(before - values.weight, plain.grad)


@pytest.mark.parametrize("slices", [1, 2])
def test_ultramem_with_fused_rows_trains_like_its_twin(slices: int) -> None:
    sizes: dict[str, Any] = {"dim": 6, "num_keys": 6, "dim_key": 4, "heads": 2, "topk": 6, "blocks": 4}
    sizes |= {"slices": slices, "dim_value": 4}
    plain = UltraMem(**sizes).double()
    values = ValueTable(9, 4, update="step", optimizer="sgd", dtype="float64")
    fused = UltraMem(**sizes, values=values).double()
    fused.load_state_dict(plain.state_dict())
    rows = FusedOptimizer(fused)
    rows.param_groups[0]["lr"] = 0.1
    dense = torch.optim.SGD(plain.parameters(), 0.1)
    others = torch.optim.SGD([p for n, p in fused.named_parameters() if "values" not in n], 0.1)
    for _ in range(3):
        x, upstream = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)
        for module, optimizers in ((plain, [dense]), (fused, [rows, others])):
            module(x).backward(upstream)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for (name, mine), (_, its) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine, its, msg=name)


@pytest.mark.parametrize("update", ["autograd", "step"])
@pytest.mark.parametrize("kind", ["ultramem", "peer", "gated"])
def test_layers_learn_in_the_chosen_rows(kind: str, update: Any, backend: Any, device: Any) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 8, "num_keys": 4, "dim_key": 4, "heads": 2, "topk": 4, "query_norm": None}
    rule = "sgd" if update == "step" else None
    if kind == "ultramem":
        values = ValueTable(4, 4, update=update, optimizer=rule)
        module: nn.Module = UltraMem(**sizes, blocks=4, dim_value=4, values=values).to(device)
        tables = [values]
    else:
        tables = [ValueTable(16, 8, update=update, optimizer=rule) for _ in range(2)]
        peer = PEER(**sizes, gated=kind == "gated", down=tables[0], up=tables[1]).to(device)
        tables += [peer.gate] if peer.gate is not None else []
        module = peer
    mask = torch.arange(tables[0].num_rows, device=device) % 2 == 0
    # that of the first table is the layer's
    tables[0].row_mask = mask
    before = [table.weight.detach().clone() for table in tables]
    optimizer = FusedOptimizer(module, default="sgd") if update == "step" else torch.optim.SGD(module.parameters(), 0.1)
    x = torch.randn(20, 8, device=device)
    module(x).square().sum().backward()
    optimizer.step()
    for table, old in zip(tables, before, strict=True):
        moved = (table.weight.detach() != old).any(1)
        assert not moved[~mask].any() and moved[mask].any()


def test_experts_have_one_mask() -> None:
    module = PEER(8, 4, dim_key=4, heads=2, topk=3)
    module.up.row_mask = torch.ones(16, dtype=torch.bool)
    with pytest.raises(ValueError, match="`row_mask` of `up` must be left to `down`"):
        module(torch.randn(2, 8))
