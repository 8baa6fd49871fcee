"""Gradients of tables most of whose rows are named: zeros are written where no id is, and nowhere else."""

import pytest
import torch

from embedfuse.torch import gather_reduce_sum, scatter_rows
from embedfuse.torch.gather import bodies


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_every_row_is_written(backend, device, bad, weighted, monkeypatch):
    # as if the table were large; fresh memory holds NaN
    monkeypatch.setattr(bodies, "MANY_NUMBERS", 1)
    table = torch.randn(20, 7, device=device).requires_grad_()
    indices = torch.randint(0, 20, (5, 4), device=device)
    if bad:
        indices[1, 1:3], indices[4] = torch.tensor([-1, 20]), 20
    weights = torch.randn(5, 4, device=device).requires_grad_() if weighted else None
    out = gather_reduce_sum(table, indices, weights, out_of_range="drop")
    upstream = torch.randn_like(out)
    out.backward(upstream)
    inside = (indices >= 0) & (indices < 20)
    used = inside.double() * (1 if weights is None else weights.detach().double())
    expected = torch.zeros(20, 7, dtype=torch.float64, device=device)
    expected.index_add_(0, torch.where(inside, indices, 0).view(-1), (used[..., None] * upstream[:, None]).view(-1, 7))
    torch.testing.assert_close(table.grad.double(), expected, rtol=1e-5, atol=1e-5)
    again = scatter_rows(indices, None if weights is None else weights.detach(), upstream, 20, out_of_range="drop")
    torch.testing.assert_close(again.double(), expected, rtol=1e-5, atol=1e-5)
