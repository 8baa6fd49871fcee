"""The native engine at its extremes: sizes, threads, instruction sets, arrays of other libraries."""

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_judge import (
    NUMERICAL,
    RULES,
    Batch,
    make_batch,
    make_update,
    random_tensor,
)

from embedfuse import cpu
from embedfuse.torch.backends import Csr, Rows
from embedfuse.torch.backends.cpu import BACKEND


def copies_of_one_id(count: int, bags: int, dim: int) -> Batch:
    batch = make_batch([(7, dim)], [(0, "sum", 0)], bags=bags, absent=False)
    offsets = np.linspace(0, count, bags + 1).astype(np.int64)
    return replace(batch, ids=np.full(count, 3), offsets=offsets)


def test_4096_duplicates_in_bfloat16() -> None:
    batch = copies_of_one_id(4096, 4096, 3)
    out = torch.zeros(batch.size, dtype=torch.bfloat16)
    grad = torch.ones(batch.bags, 3, dtype=torch.bfloat16)
    BACKEND.row_grad(out, torch.from_numpy(batch.features), batch.csr(out.dtype), torch.empty(0), grad)
    assert out[5 + 9 : 5 + 12].tolist() == [4096.0] * 3


def test_3000000_copies_of_one_id() -> None:
    batch = copies_of_one_id(3_000_000, 1000, 4)
    update = make_update(batch, [RULES[0]], torch.float32)
    update.table.zero_()
    cpu.row_update(update, batch.csr(torch.float32), None, torch.ones(1000, 4), [cpu.rule_number("sgd")], threads=2)
    expected = torch.zeros(batch.size)
    expected[5 + 12 : 5 + 16] = -torch.tensor(0.1) * 3_000_000
    assert torch.equal(update.table, expected)


def test_table_of_more_than_32_bits() -> None:
    rows = 2**32 + 9
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    table = np.frombuffer(mmap.mmap(-1, 2 * rows, flags=flags), np.float16)
    batch = make_batch([(7, 1)], [(0, "sum", 0)], absent=False)
    features = batch.features.copy()
    features[0, :3] = 0, 0, rows
    ids = np.array([rows - 1, 5, rows - 1, 2**31, rows, 5 + 2**32])
    csr = Csr(*(torch.from_numpy(array) for array in (ids, np.array([0, 3, 6]))), None, 2)
    grad = np.array([[1.0], [10.0]], np.float16)
    cpu.row_grad(table, features, csr, None, grad)
    assert table[[rows - 1, 5, 2**31, 5 + 2**32]].tolist() == [2.0, 1.0, 10.0, 10.0]
    out = np.empty((2, 1), np.float16)
    assert cpu.pooled_lookup(table, features, csr, out) == 4
    assert out.tolist() == [[5.0], [20.0]]


def test_empty_batches() -> None:
    for bags in (0, 3):
        batch = make_batch([(7, 5), (3, 2)], [(0, "mean", 0), (1, "sum", 0)], bags=3, longest=0)
        batch = replace(batch, bags=bags, offsets=np.zeros(2 * bags + 1, np.int64))
        features, csr = torch.from_numpy(batch.features), batch.csr(torch.float32)
        arena, grad = random_tensor(batch.size, torch.float32), torch.ones(bags, 7)
        out, scale = BACKEND.pooled_lookup(arena, features, csr, 7, True, "raise")
        assert torch.equal(out, torch.zeros(bags, 7))
        out, winners = BACKEND.max_lookup(arena, features, csr, 7, "raise")
        assert torch.equal(out, torch.zeros(bags, 7)) and bool((winners == -1).all())
        assert BACKEND.coefficient_grad(arena, features, csr, scale, grad).shape == (0,)
        found = torch.zeros(batch.size)
        BACKEND.row_grad(found, features, csr, scale, grad)
        BACKEND.max_grad(found, features, csr, winners, grad)
        assert not found.any()
        update = make_update(batch, [RULES[0], RULES[3]], torch.float32)
        before = update.table.clone()
        cpu.row_update(update, csr, scale, grad, [0, 2])
        assert torch.equal(update.table, before)


def test_half_precision_numbers_convert_as_in_numpy() -> None:
    table = np.arange(2**16, dtype=np.uint16).view(np.float16)
    batch = make_batch([(2**16, 1)], [(0, "sum", 0)], absent=False)
    features = batch.features.copy()
    features[0, 1] = 0
    csr = Csr(torch.arange(2**16), torch.arange(2**16 + 1), None, 2**16)
    out = np.empty((2**16, 1), np.float16)
    assert cpu.pooled_lookup(table, features, csr, out) is None
    np.testing.assert_array_equal(out[:, 0], table)
    # and every other float32 near them, halfway cases included, on the way back
    values = np.unique(np.abs(table[np.isfinite(table)])).astype(np.float32)
    steps = np.concatenate([values, (values[1:] + values[:-1]) / 2, [65519.0, 65520.0, 1e9]]).astype(np.float32)
    grads = np.concatenate([steps, np.nextafter(steps, np.float32(np.inf)), -np.nextafter(steps, np.float32(0))])
    features[0, 2] = len(grads)
    csr = Csr(torch.arange(len(grads)), torch.arange(len(grads) + 1), None, len(grads))
    for kind in (torch.float16, torch.bfloat16):
        found = torch.zeros(len(grads), dtype=kind)
        cpu.row_grad(found, features, csr, None, grads[:, None])
        torch.testing.assert_close(found, torch.from_numpy(grads).to(kind), rtol=0, atol=0)


@pytest.mark.parametrize("shapes", [[(3000, 16)], [(500, 16)] * 9], ids=["one table", "many tables"])
def test_threads_change_no_bit(shapes: list[tuple[int, int]]) -> None:
    reads = [(table, "mean", 0) for table in range(len(shapes))]
    max_norms = [(np.inf, 3.0)[table % 2] for table in range(len(shapes))] if len(shapes) > 1 else [3.9]
    batch = make_batch(shapes, reads, bags=20_000 // len(shapes), weighted=True, max_norms=max_norms)
    batch.ids[::3] = 1
    features, csr = torch.from_numpy(batch.features), batch.csr(torch.float32)
    own: list[tuple[str, tuple[float, ...]] | None] = [RULES[3 + 3 * (t % 2)] for t in range(len(shapes))]
    numbers = [cpu.rule_number(rule[0]) for rule in own if rule]
    arena, grad = random_tensor(batch.size, torch.float32), random_tensor((batch.bags, batch.width), torch.float32)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        out, scale = BACKEND.pooled_lookup(arena, features, csr, batch.width, True, "drop")
        pooled, winners = BACKEND.max_lookup(arena, features, csr, batch.width, "drop")
        sums, won = torch.zeros(batch.size), torch.zeros(batch.size)
        BACKEND.row_grad(
            sums, features, csr, scale, grad.t().contiguous().t(), Rows(arena, torch.from_numpy(batch.tables))
        )
        BACKEND.max_grad(won, features, csr, winners, grad)
        update = make_update(batch, own, torch.float32)
        norm = cpu.row_square_sum(update, csr, scale, grad, threads=threads)
        cpu.row_update(update, csr, scale, grad, numbers, threads=threads)
        coefficients = BACKEND.coefficient_grad(arena, features, csr, scale, grad)
        rows, _, offsets, weights, places = BACKEND.prepare_ids(features, csr, None, "drop")
        assert weights is not None
        results.append([out, scale, pooled, sums, won, torch.tensor(norm), update.table, update.slots, coefficients,
                        rows, offsets, weights, places])  # fmt: skip
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


def run_python(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("isa", [name for name in cpu.isas() if name != cpu.isa()])
def test_other_instruction_sets(isa: str) -> None:
    files = sorted(str(file) for file in Path(__file__).parent.glob("test_cpu_*.py"))
    arguments = ["-q", "-x", "-p", "no:cacheprovider", *files, "-k", NUMERICAL]
    code = (
        f"import sys, pytest, embedfuse.cpu; assert embedfuse.cpu.isa() == {isa!r}; sys.exit(pytest.main({arguments}))"
    )
    done = run_python(code, EMBEDFUSE_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("name", ["sse9", "AVX2"])
def test_unknown_instruction_set_is_refused(name: str) -> None:
    done = run_python("import embedfuse.cpu as c; c.isa()", EMBEDFUSE_CPU_ISA=name)
    assert done.returncode != 0
    assert f"`EMBEDFUSE_CPU_ISA` must be one of {', '.join(cpu.isas())} on this machine, got '{name}'" in done.stderr


def test_numpy_alone() -> None:
    done = run_python(
        """
import sys
from types import SimpleNamespace
import numpy as np
from embedfuse import cpu
from embedfuse.plan import PlannedFeature, plan_group
group = plan_group([(4, 3)], [PlannedFeature(0, "mean")])
csr = SimpleNamespace(ids=np.array([0, 2, 2], np.int32), offsets=np.array([0, 1, 3]), weights=None, bags=2)
table = np.arange(32, dtype=np.float32)
out, scale = np.empty((2, 3), np.float32), np.empty(2, np.float32)
assert cpu.pooled_lookup(table, group.features, csr, out, scale) is None
assert out.tolist() == [[0, 1, 2], [6, 7, 8]] and scale.tolist() == [1, 0.5]
grad = np.zeros(32, np.float32)
cpu.row_grad(grad, group.features, csr, scale, np.ones((2, 6), np.float32)[:, ::2])
assert grad[:12].tolist() == [1] * 3 + [0] * 3 + [1] * 3 + [0] * 3
assert "torch" not in sys.modules
"""
    )
    assert done.returncode == 0, done.stderr


def test_wrong_arrays_are_refused() -> None:
    batch = make_batch([(7, 4)], [(0, "sum", 0)])
    arena, features, csr = np.zeros(batch.size, np.float32), batch.features, batch.csr(torch.float32)
    out = np.zeros((batch.bags, 4), np.float32)
    with pytest.raises(TypeError, match="`out` must be of type float32, got float64"):
        cpu.pooled_lookup(arena, features, csr, out.astype(np.float64))
    with pytest.raises(ValueError, match="`out` must be contiguous"):
        cpu.pooled_lookup(arena, features, csr, out.T)
    with pytest.raises(ValueError, match="`features` must have 12 columns, got 9"):
        cpu.pooled_lookup(arena, features[:, :9], csr, out)
    with pytest.raises(TypeError, match="`rows` must be of the type of `out`, float32, got"):
        rows = Rows(torch.zeros(9, dtype=torch.float16), torch.from_numpy(batch.tables))
        cpu.row_grad(arena, features, csr, None, out, rows)
    with pytest.raises(TypeError, match="`ids` must be int32 or int64"):
        cpu.pooled_lookup(arena, features, csr._replace(ids=csr.ids.double()), out)
    with pytest.raises(TypeError, match="`dtype` must be one of float32, float16"):
        cpu.pooled_lookup(arena.astype(np.int32), features, csr, out)


def test_large_pages_change_no_value() -> None:
    array = np.empty(2**20, np.float32)
    assert cpu.prefer_large_pages(array) in (True, False)
    array[:] = 3
    assert float(array.sum()) == 3 * 2**20
    assert cpu.prefer_large_pages(torch.empty(2**20)) == cpu.prefer_large_pages(array)
    assert not cpu.prefer_large_pages(np.empty(3, np.float32))


def test_the_backend_serves_cpu_tensors_only() -> None:
    assert BACKEND.supports(torch.device("cpu"), torch.bfloat16) is None
    assert "memory of the CPU" in str(BACKEND.supports(torch.device("meta"), torch.float32))
    assert "not torch.int64" in str(BACKEND.supports(torch.device("cpu"), torch.int64))


def test_sources_are_in_sight_of_the_build() -> None:
    rules = Path(cpu.__file__).parent / "rules" / "registry.h"
    if rules.exists():
        assert all(f'RULE("{name}"' in rules.read_text() for name in cpu.rule_names())
