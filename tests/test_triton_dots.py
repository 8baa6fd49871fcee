"""`row_grad` with `dots` by the Triton backend, in tiles so small that runs are cut into many segments.

On a GPU where there is one, else in Triton's interpreter, which needs TRITON_INTERPRET=1 in the environment before
anything imports embedfuse.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from triton_cases import (
    DEFAULT,
    DEVICE,
    EPSILON,
    SINGLE,
    SMALL,
    Case,
    close,
    each_id,
    get,
    gradient,
    make,
    needs_kernels,
    put,
    row_of,
    small_update,
)

from embedfuse.plan import COLUMN, DIM, DROP_NONPOSITIVE_WEIGHTS, T_OFFSET, T_SOURCE
from embedfuse.torch.backends import Rows
from embedfuse.torch.backends.triton import TritonBackend

pytestmark = needs_kernels
NONE_LONG = TritonBackend(update=lambda widest: dataclasses.replace(small_update(widest), long=1 << 20))
"""Pieces of runs that are cut are summed side by side with whole runs."""
SUMS = [(0, "sum"), (1, "sum"), (1, "sum"), (2, "sum"), (3, "sum"), (4, "sum")]


def check(backend: TritonBackend, case: Case, layout: str = "plain", grad_dtype: Any = None) -> None:
    """Against plain loops."""
    grad, csr, table = gradient(case, layout, grad_dtype), case.csr(), case.on_device()
    none = torch.zeros(0, device=DEVICE)
    tables = case.tables.copy()
    tables[:, T_SOURCE] = tables[:, T_OFFSET]
    out, dots = torch.zeros_like(table), torch.zeros(len(case.ids), device=DEVICE)
    backend.row_grad(out, put(case.features), csr, none, grad, Rows(table, put(tables)), dots)
    upstream = get(grad)
    sums, sizes = np.zeros_like(case.table), np.zeros_like(case.table)
    expected, magnitude = np.zeros(len(case.ids)), np.zeros(len(case.ids))
    for position, _, feature, row, number, weight in each_id(case):
        g = upstream[row, feature[COLUMN] : feature[COLUMN] + feature[DIM]]
        start = tables[feature[0], T_OFFSET] + number * feature[DIM]
        sums[start : start + feature[DIM]] += weight * g
        sizes[start : start + feature[DIM]] += np.abs(weight * g)
        looked_up = row_of(case, feature, number)
        expected[position], magnitude[position] = looked_up @ g, np.abs(looked_up) @ np.abs(g)
    close(out, sums, sizes, case.dtype)
    # float32 sums of products of what is stored
    bound = 64 * EPSILON[torch.float32] * (magnitude + 1e-3)
    assert (np.abs(get(dots) - expected) <= bound).all()
    # the same bits again
    out_again, dots_again = torch.zeros_like(out), torch.zeros_like(dots)
    backend.row_grad(out_again, put(case.features), csr, none, grad, Rows(table, put(tables)), dots_again)
    assert torch.equal(out, out_again) and torch.equal(dots, dots_again)


@pytest.mark.parametrize("backend", [SMALL, SINGLE, DEFAULT])
def test_dots(backend: TritonBackend) -> None:
    check(backend, make(features=SUMS))
    check(backend, make(features=SUMS, weighted=False, kind=np.int32, seed=1))


@pytest.mark.parametrize("layout", ["transposed", "one row", "one number", "sliced"])
def test_dots_with_any_strides(layout: str) -> None:
    check(SMALL, make(features=SUMS, longest=3, seed=2), layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dots_of_16_bit_tables(dtype: torch.dtype) -> None:
    case = make(shapes=[(9, 8), (5, 16)], features=[(0, "sum"), (1, "sum")], dtype=dtype, kind=np.int32)
    check(SMALL, case)
    check(SMALL, case, grad_dtype=torch.float32)


@pytest.mark.parametrize("backend", [SMALL, SINGLE, NONE_LONG])
@pytest.mark.parametrize("bags", [3, 9, 40])
def test_dots_of_runs_that_are_cut(backend: TritonBackend, bags: int) -> None:
    """A row that most ids are of: whole, cut once, in folds; and others around it."""
    case = make(shapes=[(6, 7)], features=[(0, "sum")], bags=bags, longest=6, seed=bags)
    case.ids[np.random.default_rng(0).random(len(case.ids)) < 0.8] = 3
    check(backend, case)


def test_dots_of_ids_that_are_dropped() -> None:
    case = make(features=SUMS, longest=4, flags=DROP_NONPOSITIVE_WEIGHTS, seed=5)
    assert case.weights is not None
    case.weights[::3] *= -1
    case.ids[1::4] = -1
    case.ids[2::5] = 1000
    check(SMALL, case)


def test_dots_of_wide_rows() -> None:
    check(DEFAULT, make(shapes=[(3, 1030)], features=[(0, "sum")], bags=2, longest=3))
    check(DEFAULT, make(shapes=[(5, 144)], features=[(0, "sum")], bags=4, longest=30))
