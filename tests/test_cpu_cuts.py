"""The native engine on rows cut to a length, rows in other places, and prepared ids."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_judge import (
    DTYPES,
    RULES,
    Array,
    Batch,
    close,
    counted,
    cut_arena,
    judge_coefficients,
    judge_cut,
    judge_lookup,
    judge_row_sums,
    judge_scale,
    judge_update,
    make_batch,
    make_update,
    random_tensor,
)

from embedfuse import cpu
from embedfuse.plan import DEFAULT_ID, MAX_NORM, NO_MAX_NORM, STRIDE, T_SOURCE, TABLE_WIDTH
from embedfuse.torch.backends import BadId, Csr, Prepared, Rows, Shards
from embedfuse.torch.backends.cpu import BACKEND


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cut_rows(dtype: torch.dtype, weighted: bool, ids_dtype: Any) -> None:
    for dim in (1, 3, 63, 130, 4100):
        reads = [(0, "mean", 0), (1, "sum", 1), (0, "sqrtn", 2), (2, "mean_by_count", 0), (3, "sum", 0)]
        # about half of the rows are longer; all; none
        max_norms = [float(np.sqrt(dim)) * 0.9, 0.0, np.inf, 1.0]
        batch = make_batch([(11, dim), (30, 5), (4, 2), (8, dim)], reads, weighted=weighted, ids_dtype=ids_dtype,
                           max_norms=max_norms)  # fmt: skip
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        arena, csr = random_tensor(batch.size, dtype), batch.csr(dtype)
        features, tables = torch.from_numpy(batch.features), torch.from_numpy(batch.tables)
        values = arena.double().numpy()
        shortened = cut_arena(batch, values)

        out, scale = BACKEND.pooled_lookup(arena, features, csr, batch.width, True, "drop")
        close(out, judge_lookup(batch, shortened), dtype, 200.0 if weighted else 4.0)
        close(scale, judge_scale(batch), kind, 200.0)
        grad = random_tensor((batch.bags, batch.width), dtype, seed=8)
        coefficients = BACKEND.coefficient_grad(arena, features, csr, scale, grad)
        upright = torch.from_numpy(shortened)
        close(coefficients, judge_coefficients(batch, upright, scale, grad), kind, 400.0)

        sums = judge_cut(batch, values, judge_row_sums(batch, scale.double().numpy(), grad.double().numpy()))
        found, expected = torch.zeros(batch.size, dtype=dtype), np.zeros(batch.size)
        BACKEND.row_grad(found, features, csr, scale, grad, Rows(arena, tables))
        for (table, row), g in sums.items():
            start = int(batch.tables[table, 0]) + row * len(g)
            expected[start : start + len(g)] = g
            if max_norms[table] == 0:
                assert not found[start : start + len(g)].any()
        close(found, expected, dtype, 20.0)

        own: list[tuple[str, tuple[float, ...]] | None] = [RULES[3], RULES[0], None, RULES[5]]
        update = make_update(batch, own, dtype)
        update.table.copy_(arena)
        total = sum(float(g @ g) for (table, _), g in sums.items() if table != 2)
        close(np.array(cpu.row_square_sum(update, csr, scale, grad)), np.array(total), kind, 40.0)
        rows, collected = cpu.collect_rows(update, csr, scale, grad, 0)
        assert rows.tolist() == sorted(row for table, row in sums if table == 0)
        for row, g in zip(rows.tolist(), collected, strict=True):
            close(g, sums[0, row], kind, 100.0)
        stepped, slots = judge_update(batch, replace(update), own, sums, 0.5)
        numbers = [-1 if rule is None else cpu.rule_number(rule[0]) for rule in own]
        cpu.row_update(update, csr, scale, grad, numbers, grad_scale=0.5)
        close(update.table, stepped, dtype, 100.0)
        close(update.slots, slots, kind, 400.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_max_pooling_of_cut_rows(dtype: torch.dtype) -> None:
    for dim in (3, 63, 130):
        batch = make_batch([(20, dim), (8, 3)], [(0, "sum", 0), (1, "sum", 2)], weighted=True,
                           max_norms=[float(np.sqrt(dim)), 1.5])  # fmt: skip
        arena, features = random_tensor(batch.size, dtype), torch.from_numpy(batch.features)
        out, winners = BACKEND.max_lookup(arena, features, batch.csr(dtype), batch.width, "drop")
        shortened, kind = cut_arena(batch, arena.double().numpy()), torch.float64
        free = batch.features.copy()
        free[:, MAX_NORM] = NO_MAX_NORM
        expected, first = BACKEND.max_lookup(
            torch.from_numpy(shortened), torch.from_numpy(free), batch.csr(kind), batch.width, "drop"
        )
        close(out, expected.numpy(), dtype)
        np.testing.assert_array_equal(winners.numpy(), first.numpy())


def test_a_row_too_long_for_its_square_is_cut() -> None:
    batch = make_batch([(3, 4)], [(0, "sum", 0)], max_norms=[2.0])
    arena = torch.full((batch.size,), 1e30)
    csr = Csr(torch.tensor([1]), torch.tensor([0, 1]), None, 1)
    out, _ = BACKEND.pooled_lookup(arena, torch.from_numpy(batch.features), csr, 4, False, "raise")
    torch.testing.assert_close(out, torch.ones(1, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_overlap_or_lie_apart(dtype: torch.dtype) -> None:
    for stride in (1, 5, 9, 70):
        batch = make_batch([(40, 9), (6, 5)], [(0, "mean", 0), (1, "sum", 0), (0, "sum", 0)])
        spread = batch.features.copy()
        spread[[0, 2], STRIDE] = stride
        spread[[0, 2], 1] = 3
        arena = random_tensor(batch.size + 40 * 70, dtype)
        joined = arena.clone()
        start = int(batch.tables[0, 0])
        joined[start : start + 360] = torch.cat([arena[3 + stride * row :][:9] for row in range(40)])
        joined[int(batch.tables[1, 0]) :] = arena[int(batch.tables[1, 0]) :]
        grad, csr = random_tensor((batch.bags, batch.width), dtype), batch.csr(dtype)
        results = []
        for table, described in ((arena, spread), (joined, batch.features)):
            features = torch.from_numpy(described)
            out, scale = BACKEND.pooled_lookup(table, features, csr, batch.width, True, "drop")
            largest, winners = BACKEND.max_lookup(table, features, csr, batch.width, "drop")
            slopes = BACKEND.coefficient_grad(table, features, csr, scale, grad)
            sums = torch.zeros(batch.size, dtype=dtype)
            BACKEND.row_grad(sums, torch.from_numpy(batch.features), csr, scale, grad)
            results.append([out, scale, largest, winners, slopes, sums])
        for apart, close_by in zip(*results, strict=True):
            assert torch.equal(apart, close_by)


def judge_prepared(batch: Batch, places: list[tuple[int, int]]) -> Prepared:
    """`places` are row and element of each id of the one feature (or of all)."""
    counts = {position for position, *_ in counted(batch)}
    rows, elements, weights, went = [], [], [], []
    for bag in range(len(batch.offsets) - 1):
        empty = True
        for position in range(batch.offsets[bag], batch.offsets[bag + 1]):
            found = position in counts
            empty &= not found
            went.append(len(rows))
            rows.append(places[batch.ids[position]][0] if found else -1)
            elements.append(places[batch.ids[position]][1] if found else -1)
            weights.append(1.0 if batch.weights is None else float(batch.weights[position]))
        default = int(batch.features[bag // batch.bags % len(batch.features), DEFAULT_ID])
        default = default if empty else -1
        rows.append(places[default][0] if default >= 0 else -1)
        elements.append(places[default][1] if default >= 0 else -1)
        weights.append(float(default >= 0))
    offsets = batch.offsets + np.arange(len(batch.offsets))
    made = (np.array(values, np.int64) for values in (rows, elements))
    return Prepared(*(torch.from_numpy(array) for array in (*made, offsets, np.array(weights), np.array(went))))


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_prepare_ids(weighted: bool, ids_dtype: Any) -> None:
    reads = [(0, "mean", 0), (1, "sum", 3), (0, "sqrtn", 2), (2, "sum", 1)]
    for bags, records in ((7, 2), (3000, 1)):
        batch = make_batch([(11, 4), (30, 5), (4, 2)], reads, bags=bags, records=records, longest=4,
                           weighted=weighted, ids_dtype=ids_dtype)  # fmt: skip
        batch.features[:, DEFAULT_ID] = 0, 29, -1, 2
        expected = judge_prepared(batch, [(row, row) for row in range(30)])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for dtype in (torch.float32, torch.float64) if weighted else (torch.float32,):
                found = BACKEND.prepare_ids(torch.from_numpy(batch.features), batch.csr(dtype), None, "drop")
                assert torch.equal(found.rows, expected.rows) and torch.equal(found.offsets, expected.offsets)
                assert torch.equal(found.places, expected.places) and found.starts is None
                assert (found.weights is None) != weighted
                if found.weights is not None and expected.weights is not None:
                    assert torch.equal(found.weights, expected.weights.to(dtype))
    with pytest.raises(BadId):
        BACKEND.prepare_ids(torch.from_numpy(batch.features), batch.csr(torch.float32), None, "raise")


def shard(batch: Batch, sizes: list[int], modulo: bool) -> tuple[Shards, list[tuple[int, int]], Array]:
    """The first table of a batch in parts, out of order and with gaps: row and element of each id; the parts."""
    dim, parts = int(batch.features[0, 3]), np.zeros((len(sizes), TABLE_WIDTH), np.int64)
    starts = np.cumsum([0, *(size * dim + 3 for size in reversed(sizes))])[:-1][::-1]
    before = np.cumsum([0, *sizes])[:-1]
    for number, (first, rows, start) in enumerate(zip(before, sizes, starts, strict=True)):
        parts[number] = start, rows, dim, first, -1, 0, 0, start, batch.tables[0, 8]
    places = []
    for number in range(sum(sizes)):
        part = number % len(sizes) if modulo else int(np.searchsorted(np.cumsum(sizes), number, side="right"))
        row = number // len(sizes) if modulo else number - int(before[part])
        places.append((int(before[part]) + row, int(starts[part]) + row * dim))
    return Shards(torch.from_numpy(np.stack([before, sizes, starts], 1)), modulo, dim), places, parts


@pytest.mark.parametrize("modulo", [False, True])
@pytest.mark.parametrize("sizes", [[40], [20, 20], [14, 13, 13], [10, 0, 25, 5]], ids=str)
def test_shards(sizes: list[int], modulo: bool) -> None:
    if modulo and 0 in sizes:
        sizes = [1, 1, 1, 1, 1]
    rows, dim, dtype = sum(sizes), 9, torch.float32
    for max_norm in (np.inf, 2.7):
        batch = make_batch([(rows, dim)], [(0, "mean", 0)], bags=50, max_norms=[max_norm])
        batch.features[0, DEFAULT_ID] = rows - 1
        shards, places, parts = shard(batch, sizes, modulo)
        whole = random_tensor((rows, dim), dtype)
        spread = torch.full((int(parts[:, 0].max()) + rows * dim + 100,), torch.nan)
        for number, (_, element) in enumerate(places):
            spread[element : element + dim] = whole[number]
        found = BACKEND.prepare_ids(torch.from_numpy(batch.features), batch.csr(dtype), shards, "drop")
        expected = judge_prepared(batch, places)
        for name in ("rows", "starts", "offsets", "places"):
            assert torch.equal(getattr(found, name), getattr(expected, name))

        # looking up by element, and by row in a table that was never cut up
        by_element, in_one = batch.features.copy(), batch.features.copy()
        by_element[0, [1, 2, STRIDE]] = 0, len(spread), 1
        in_one[0, 1] = 0
        elements, features = torch.from_numpy(by_element), torch.from_numpy(in_one)
        order = torch.tensor([row for row, _ in places])
        ordered = torch.empty_like(whole)
        ordered[order] = whole
        csr_rows, csr_elements = (Csr(ids, found.offsets, None, 50) for ids in (found.rows, found.starts))
        out, scale = BACKEND.pooled_lookup(ordered.view(-1), features, csr_rows, dim, True, "drop")
        other, _ = BACKEND.pooled_lookup(spread, elements, csr_elements, dim, True, "drop")
        assert torch.equal(out, other) and not out.isnan().any()
        grad = random_tensor((50, dim), dtype, seed=9)
        assert torch.equal(
            BACKEND.coefficient_grad(ordered.view(-1), features, csr_rows, scale, grad),
            BACKEND.coefficient_grad(spread, elements, csr_elements, scale, grad),
        )
        one, apart = torch.zeros(rows * dim), torch.zeros_like(spread)
        table = batch.tables.copy()
        table[0, [0, T_SOURCE]] = 0
        for into, source, tables in ((one, ordered.view(-1), table), (apart, spread, parts)):
            BACKEND.row_grad(into, features, csr_rows, scale, grad, Rows(source, torch.from_numpy(tables)))
        for number, (row, element) in enumerate(places):
            assert torch.equal(apart[element : element + dim], one.view(rows, dim)[row]), number
        assert int(apart.count_nonzero()) == int(one.count_nonzero())
        # the same sums again, to another place
        moved = torch.zeros(len(spread) + 11)
        parts[:, 0] += 11
        BACKEND.row_grad(moved, features, csr_rows, scale, grad, Rows(spread, torch.from_numpy(parts)))
        assert torch.equal(moved[11:], apart)

        largest, winners = BACKEND.max_lookup(spread, elements, csr_elements, dim, "drop")
        assert torch.equal(largest, BACKEND.max_lookup(ordered.view(-1), features, csr_rows, dim, "drop")[0])
        one.zero_()
        apart.zero_()
        BACKEND.max_grad(one, features, csr_rows, winners, grad)
        BACKEND.max_grad(apart, elements, csr_elements, winners, grad)
        for row, element in places:
            assert torch.equal(apart[element : element + dim], one.view(rows, dim)[row])


def test_tables_without_rows_hide_no_other() -> None:
    batch = make_batch([(0, 3), (5, 4)], [(0, "sum", 0), (1, "sum", 0)], absent=False)
    batch.ids[:] = batch.ids.clip(0)
    update = make_update(batch, [RULES[0], RULES[0]], torch.float32)
    before = update.table.clone()
    grad = torch.ones(batch.bags, batch.width)
    cpu.row_update(update, batch.csr(torch.float32), None, grad, [0, 0])
    assert not torch.equal(update.table, before)
