"""`row_grad` with `dots`: the gradients of rows and of weights in one pass, on every backend, against the judge."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import CASES, Case, build, each, numbers, one
from checks import check_row_grad_with_dots
from tolerance import assert_close, assert_same_bits
from torch import Tensor

from embedfuse import reference
from embedfuse.plan import DROP_NEGATIVE_IDS, DROP_NONPOSITIVE_WEIGHTS, T_OFFSET, T_SOURCE
from embedfuse.torch.backends import Backend, Rows

DTYPES = ("float32", "bfloat16", "float16", "float64")
DROPPING = (one(0, "sum", DROP_NEGATIVE_IDS), one(1, "sum", DROP_NONPOSITIVE_WEIGHTS), one(0))
SHAPES = {
    "odd widths": Case("", ((7, 63), (9, 144), (5, 1)), each(3), 5, weights="signed"),
    "wide": Case("", ((6, 1030),), each(1), 3, (0, 5), weights="positive"),
    "hot row": Case("", ((20, 9),), each(1), 5, (20, 60), ids="hot", weights="signed"),
    "one row": Case("", ((4, 65),), each(1), 3, (90, 90), ids="same", weights="positive"),
    "absent and dropped": Case("", ((10, 12), (6, 3)), DROPPING, 7, (-2, 4), weights="signed", absent=0.4),
    "no weights": Case("", ((10, 12),), each(1), 6),
    "int32": Case("", ((30, 16),), each(1), 9, weights="positive", absent=0.2, index="int32"),
    "cut": Case("", ((8, 20, 2.0), (9, 6), (5, 4, 0.0)), each(3), 6, weights="signed"),
    "cut and hot": Case("", ((20, 9, 1.7),), each(1), 4, (30, 60), ids="hot", weights="signed"),
    "nothing": Case("", ((4, 3),), each(1), 4, (0, 0)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_gradients(name: str, dtype: str, backend: Backend, device: str, interpreted: bool) -> None:
    reason = backend.supports(torch.device(device), getattr(torch, dtype))
    if reason or (interpreted and dtype != "float32" and name not in ("odd widths", "cut")):
        pytest.skip(reason or "too slow in the interpreter")
    work = build(replace(SHAPES[name], dtype=dtype), device)
    first = check_row_grad_with_dots(work, backend)
    # bit for bit the same again
    for again, before in zip(check_row_grad_with_dots(work, backend), first, strict=True):
        assert_same_bits(numbers(again), numbers(before), name)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "one number for all": lambda grad: torch.ones((), dtype=grad.dtype, device=grad.device).expand(grad.shape),
    "one row for all": lambda grad: grad[:1].expand(grad.shape),
    "one column for all": lambda grad: grad[:, :1].expand(grad.shape),
    "transposed": lambda grad: grad.t().contiguous().t(),
    "part of a wider one": lambda grad: torch.nn.functional.pad(grad, (3, 5), value=torch.nan)[:, 3:-5],
    "float32": lambda grad: grad.float(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_any_strides(form: str, dtype: str, backend: Backend, device: str) -> None:
    work = build(Case("", ((5, 8), (4, 16)), each(2), 5, weights="signed", dtype=dtype), device)
    check_row_grad_with_dots(replace(work, grad=FORMS[form](work.grad)), backend)


def test_several_records(backend: Backend, device: str) -> None:
    check_row_grad_with_dots(build(replace(CASES["shared_table"], features=each(2)), device, records=3), backend)


@pytest.mark.parametrize("max_norm", [np.inf, 1.5])
def test_rows_are_read_and_written_where_the_tables_say(max_norm: float, backend: Backend, device: str) -> None:
    """Features know neither place."""
    work = build(Case("", ((9, 8, max_norm), (7, 4, max_norm)), each(2), 6, weights="positive"), device)
    table, features, csr, grad = work.judged()
    tables = work.group.tables.copy()
    # both tables at other places, and the second one in front
    tables[:, T_SOURCE], tables[:, T_OFFSET] = [64, 0], [32, 128]
    moved = np.full(200, np.nan)
    for (rows, dim, _), old, new in zip(work.case.tables, work.group.tables[:, T_OFFSET], tables[:, T_SOURCE],
                                        strict=True):  # fmt: skip
        moved[new : new + rows * dim] = table[old : old + rows * dim]
    source = torch.from_numpy(moved).float().to(device)
    none = torch.zeros(0, device=device)
    out, dots = torch.zeros(300, device=device), torch.zeros(len(csr.ids), device=device)
    rows = Rows(source, torch.from_numpy(tables).to(device))
    backend.row_grad(out, work.features, work.csr, none, work.grad, rows, dots)
    expected = reference.row_grad(300, tables, features, csr, numbers(none), grad, table=moved)
    assert_close(numbers(out), expected, 1e-4, "row_grad")
    assert_close(numbers(dots), reference.row_dots(moved, tables, features, csr, grad), 1e-4, "dots")
    assert_close(numbers(dots), reference.coefficient_grad(table, features, csr, numbers(none), grad), 1e-4, "dots")


def test_dots_need_rows(backend: Backend, device: str) -> None:
    work = build(CASES["plain"], device)
    none, dots = torch.zeros(0, device=device), torch.zeros(len(work.csr.ids), device=device)
    with pytest.raises(ValueError, match="`rows` must be given"):
        backend.row_grad(torch.zeros_like(work.table), work.features, work.csr, none, work.grad, None, dots)


def test_threads_do_not_matter() -> None:
    """Rows with more ids than one thread sums, and many others."""
    backend = pytest.importorskip("embedfuse.torch.backends.cpu").BACKEND
    for dtype in ("float32", "bfloat16"):
        case = Case("", ((3000, 70), (40, 5)), each(2), 300, (20, 40), ids="hot", weights="positive", dtype=dtype)
        work = build(case)
        assert work.longest > 4096
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(check_row_grad_with_dots(work, backend))
        for out, dots in results[1:]:
            assert_same_bits(numbers(out), numbers(results[0][0]), dtype)
            assert_same_bits(numbers(dots), numbers(results[0][1]), dtype)


@pytest.mark.parametrize("name", ["weighted", "shared_table", "absent", "dropping", "cut", "cut_odd"])
def test_the_judge_of_dots(name: str) -> None:
    """Where bags are not divided they are the gradients of weights."""
    case = CASES[name]
    work = build(replace(case, dtype="float64", features=tuple(replace(f, combiner="sum") for f in case.features)))
    table, features, csr, grad = work.judged()
    expected = reference.coefficient_grad(table, features, csr, np.zeros(0), grad)
    assert expected.any()
    assert_close(reference.row_dots(table, work.group.tables, features, csr, grad), expected, 1e-12, "dots")
