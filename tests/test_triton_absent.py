"""Zeros in the rows of a gradient that no id names, by the Triton backend: afterwards, and in those rows only.

On a GPU where there is one, else in Triton's interpreter, which needs TRITON_INTERPRET=1 in the environment before
anything imports embedfuse.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from triton_cases import DEFAULT, DEVICE, close, get, gradient, make, needs_kernels, put

from embedfuse import reference
from embedfuse.torch.backends import Csr, absent_rows

pytestmark = needs_kernels


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ids of each batch whose absent rows were looked for."""
    from embedfuse.torch.backends import passes

    found: list[int] = []
    real = absent_rows.fill_absent

    def noting(runs, given, *others):  # type: ignore[no-untyped-def]
        # and not of the batches that it is written down for
        if isinstance(given.number, int):
            found.append(given.number)
        real(runs, given, *others)

    monkeypatch.setattr(passes, "fill_absent", noting)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "rows", "named"), [
    (256, 40, range(40)), (256, 40, range(7, 33)), (260, 65, [0, 64]), (300, 33, [31, 32]), (1027, 3, [1]),
    (512, 1, [0]), (256, 100, range(0, 100, 3)),
])  # fmt: skip
def test_rows_that_no_id_names_are_zero(
    dim: int, rows: int, named: Sequence[int], dtype: torch.dtype, launched: list[int]
) -> None:
    case = make([(rows, dim)], [(0, "sum")], 20, 9, dtype=dtype)
    case.ids = np.random.default_rng(rows).choice(np.array(named), len(case.ids))
    # absent ones sort behind all rows
    case.ids[::5], case.ids[3::7] = -1, rows
    grad = gradient(case)
    out = torch.full((rows * dim,), torch.nan, dtype=dtype, device=DEVICE)
    unscaled = torch.zeros(0, device=DEVICE)
    DEFAULT.row_grad(out, put(case.features), case.csr(), unscaled, grad, fill=True)
    assert launched == [len(case.ids)]
    csr = reference.Csr(case.ids, case.offsets, case.weights, case.bags)
    arguments = (rows * dim, case.tables, case.features, csr, np.zeros(0), get(grad))
    close(out, *(reference.row_grad(*arguments, absolute) for absolute in (False, True)), dtype)


@pytest.mark.parametrize("ids", [[], [0], [3] * 200, [0] * 150 + [99] * 20])
def test_few_ids_and_many_alike(ids: list[int], launched: list[int]) -> None:
    case = make([(100, 128)], [(0, "sum")], 1, 1, weighted=False)
    out = torch.full((100 * 128,), torch.nan, device=DEVICE)
    csr = Csr(torch.tensor(ids, dtype=torch.int64, device=DEVICE), put(np.array([0, len(ids)])), None, 1)
    DEFAULT.row_grad(out, put(case.features), csr, out.new_empty(0), out.new_ones(1, 128), fill=True)
    expected = torch.bincount(csr.ids, minlength=100).float()[:, None].expand(100, 128)
    assert torch.equal(out.view(100, 128), expected)
    # for few ids zeros are written to all rows instead
    assert launched == ([len(ids)] if len(ids) > 50 else [])


def test_several_tables_are_zero_before(launched: list[int]) -> None:
    case = make([(5, 256), (4, 256)], [(0, "sum"), (1, "sum")], 6, 9)
    out = torch.full((len(case.table),), torch.nan, device=DEVICE)
    expected = torch.zeros_like(out)
    for target, fill in ((out, True), (expected, False)):
        DEFAULT.row_grad(target, put(case.features), case.csr(), out.new_empty(0), gradient(case), fill=fill)
    assert torch.equal(out, expected) and launched == []
