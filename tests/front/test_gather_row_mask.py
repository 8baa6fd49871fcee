"""Tables of which some rows learn. Conformance case 30: masked rows get no gradient, and their state stays."""

import pytest
import torch

import embedfuse
from embedfuse.torch import FusedOptimizer, ProductKeyMemory, ValueTable, gather_reduce_sum


def drawn(device, dtype=torch.float32):
    table = torch.randn(12, 5, device=device, dtype=dtype).requires_grad_()
    indices = torch.randint(0, 12, (4, 3, 6), device=device)
    weights = torch.randn(4, 3, 6, device=device).requires_grad_()
    mask = torch.zeros(12, dtype=torch.bool, device=device)
    mask[::3] = True
    return table, indices, weights, mask


@pytest.mark.parametrize("sink", ["dense", "sparse", "buffer"])
def test_masked_rows_get_no_gradient(backend, device, sink):
    table, indices, weights, mask = drawn(device)
    buffer = torch.zeros(12, 5, device=device) if sink == "buffer" else None
    out = gather_reduce_sum(
        table, indices, weights, row_mask=mask, grad_into=buffer, grad="sparse" if sink == "sparse" else "dense"
    )
    upstream = torch.randn_like(out)
    out.backward(upstream)
    plain, given = table.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    expected = torch.einsum("bck,bckd->bcd", given, plain[indices])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    expected.backward(upstream.double())
    found = {"dense": lambda: table.grad, "sparse": lambda: table.grad.to_dense(), "buffer": lambda: buffer}[sink]()
    torch.testing.assert_close(found.double(), plain.grad * mask[:, None], rtol=1e-5, atol=1e-5)
    assert (found[~mask] == 0).all() and (found[mask] != 0).any()
    # the weights of masked rows learn as ever
    torch.testing.assert_close(weights.grad.double(), given.grad, rtol=1e-5, atol=1e-5)
    if sink == "sparse":
        assert mask[table.grad.coalesce().indices()[0]].all()


@pytest.mark.parametrize("update", ["step", "backward", "autograd"])
def test_masked_rows_are_not_stepped(backend, device, update):
    fused = update != "autograd"
    values = ValueTable(12, 5, update=update, optimizer=embedfuse.Adam(0.1) if fused else None, device=device)
    optimizer = FusedOptimizer(values) if fused else torch.optim.Adam(values.parameters(), 0.1)
    _, indices, weights, mask = drawn(device)
    values.row_mask = mask
    before = values.weight.detach().clone()
    for _ in range(2):
        values(indices, weights.detach()).square().sum().backward()
        optimizer.step()
    moved = (values.weight.detach() != before).any(1)
    assert not moved[~mask].any() and moved[mask].all()
    if fused:
        state = optimizer.state_dict()["state"]["weight"]
        for slot in ("momenta", "velocities"):
            assert (state[slot][~mask] == 0).all() and (state[slot][mask] != 0).any()
    values.row_mask = None
    values(indices, weights.detach()).square().sum().backward()
    optimizer.step()
    assert (values.weight.detach() != before).any(1)[indices.unique()].all()


def test_a_memory_learns_in_the_chosen_slots():
    memory = ProductKeyMemory(16, num_keys=4, heads=2, topk=3, query_norm=None)
    memory.values.row_mask = torch.arange(16) < 5
    assert "row_mask" not in "".join(memory.state_dict())
    memory(torch.randn(20, 16)).square().sum().backward()
    grad = memory.values.weight.grad
    assert (grad[5:] == 0).all() and (grad[:5] != 0).any()


def test_refusals():
    table, indices, weights, mask = drawn("cpu")
    with pytest.raises(TypeError, match="`row_mask` must be bool"):
        gather_reduce_sum(table, indices, weights, row_mask=mask.long())
    with pytest.raises(ValueError, match=r"`row_mask` must be \[12\].*got \[11\]"):
        gather_reduce_sum(table, indices, weights, row_mask=mask[1:])
    with pytest.raises(NotImplementedError, match="`row_mask`"):
        torch.func.grad(lambda t: gather_reduce_sum(t, indices, row_mask=mask).sum())(table)
    out = gather_reduce_sum(table, indices, weights, row_mask=mask)
    with pytest.raises(NotImplementedError, match="differentiated again"):
        torch.autograd.grad(out.sum(), table, create_graph=True)
