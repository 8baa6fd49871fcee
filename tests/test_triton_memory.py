"""Kernels of memory layers by themselves."""

import pytest
import torch
from triton_cases import DEVICE, needs_kernels

from embedfuse.torch.backends import triton_memory

pytestmark = needs_kernels


@pytest.mark.parametrize("dim", [1, 3, 64, 100, 1030])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_where_no_id_is(dtype: torch.dtype, kind: torch.dtype, dim: int) -> None:
    rows = 37
    ids = torch.randint(-3, rows + 3, (20,), dtype=kind, device=DEVICE)
    # fresh memory holds NaN
    found = triton_memory.zeros_elsewhere(ids, rows, dim, dtype)
    named = torch.zeros(rows, dtype=torch.bool)
    named[[i for i in ids.tolist() if 0 <= i < rows]] = True
    assert found.shape == (rows, dim) and found.dtype == dtype
    assert (found.cpu()[~named] == 0).all() and found.cpu()[named].isnan().all()


@pytest.mark.parametrize(("number", "rows", "dim"), [(0, 5, 4), (3, 0, 4), (3, 5, 0), (2500, 3, 2)])
def test_zeros_of_nothing_and_for_many_ids(number: int, rows: int, dim: int) -> None:
    ids = torch.randint(0, 2, (number,), device=DEVICE)
    found = triton_memory.zeros_elsewhere(ids, rows, dim, torch.float32).cpu()
    assert found.shape == (rows, dim)
    for row in range(rows):
        assert (found[row] == 0).all() == (row not in ids.tolist() or dim == 0)
