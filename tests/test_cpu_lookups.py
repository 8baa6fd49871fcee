"""The native engine's lookups and sums of gradients against float64 loops."""

from typing import Any

import numpy as np
import pytest
import torch
from cpu_judge import (
    COMBINERS,
    DIMS,
    DROP_NEGATIVE,
    DTYPES,
    close,
    columns_of,
    counted,
    judge_coefficients,
    judge_lookup,
    judge_row_sums,
    judge_scale,
    make_batch,
    make_grad,
    random_tensor,
    row_of,
)

from embedfuse.optim.base import Optimizer
from embedfuse.torch.backends import BadId, Update
from embedfuse.torch.backends.cpu import BACKEND


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pooled_lookup(dtype: torch.dtype, weighted: bool, ids_dtype: Any) -> None:
    for dim in DIMS:
        reads = [(t, combiner, t % 4) for t, combiner in enumerate(COMBINERS)]
        shapes = [(11, dim), (30, 5), (4, dim), (9, 1)]
        batch = make_batch(shapes, [*reads, (0, "mean", 3)], weighted=weighted, ids_dtype=ids_dtype)
        arena = random_tensor(batch.size, dtype)
        out, scale = BACKEND.pooled_lookup(
            arena, torch.from_numpy(batch.features), batch.csr(dtype), batch.width, True, "drop"
        )
        # a mean of weights that nearly cancel is large, and as wrong as it is large
        close(out, judge_lookup(batch, arena.double().numpy()), dtype, 200.0 if weighted else 4.0)
        close(scale, judge_scale(batch), torch.float64 if dtype == torch.float64 else torch.float32, 200.0)
        assert out.dtype == dtype


def test_plain_sums_have_no_scale() -> None:
    batch = make_batch([(11, 8)], [(0, "sum", 0)])
    arena = random_tensor(batch.size, torch.float32)
    arguments = (arena, torch.from_numpy(batch.features), batch.csr(torch.float32), batch.width)
    out, scale = BACKEND.pooled_lookup(*arguments, False, "ignore")
    assert scale.shape == (0,)
    torch.testing.assert_close(out, BACKEND.pooled_lookup(*arguments, True, "ignore")[0], rtol=0, atol=0)


@pytest.mark.parametrize("dim", [4096, 300, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rows_and_long_bags(dim: int, dtype: torch.dtype) -> None:
    batch = make_batch([(50, dim)], [(0, "sqrtn", 0)], bags=2, longest=3000, absent=False)
    arena = random_tensor(batch.size, dtype)
    out, _ = BACKEND.pooled_lookup(arena, torch.from_numpy(batch.features), batch.csr(dtype), dim, True, "raise")
    matrix = np.stack([np.bincount(part, minlength=50) for part in np.split(batch.ids, batch.offsets[1:-1])])
    table = arena[5 : 5 + 50 * dim].double().numpy().reshape(50, dim)
    close(out, matrix @ table * judge_scale(batch)[:, None], dtype, 40.0)


@pytest.mark.parametrize("op", ["pooled", "max"])
def test_first_bad_id_is_raised(op: str) -> None:
    reads = [(0, "sum", 0), (1, "sum", DROP_NEGATIVE), (2, "sum", 0)]
    batch = make_batch([(100, 4)] * 3, reads, bags=2000, absent=False)
    spans = batch.offsets[:: batch.bags]
    features, arena = torch.from_numpy(batch.features), random_tensor(batch.size, torch.float32)

    def position() -> int | None:
        csr = batch.csr(torch.float32)
        try:
            if op == "pooled":
                BACKEND.pooled_lookup(arena, features, csr, batch.width, False, "raise")
            else:
                BACKEND.max_lookup(arena, features, csr, batch.width, "raise")
        except BadId as error:
            return error.position
        return None

    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert position() is None
        batch.ids[spans[2] - 1] = -3
        # negative ids of the second feature are dropped
        assert position() is None
        batch.ids[[spans[3] - 1, spans[2] + 5, spans[2] + 9]] = 100, -1, 10**9
        assert position() == spans[2] + 5
        batch.ids[spans[1] + 3] = 100
        assert position() == spans[1] + 3
        batch.ids[:] = np.clip(batch.ids, 0, 99)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_max_pooling(dtype: torch.dtype, weighted: bool) -> None:
    for dim in DIMS:
        batch = make_batch([(20, dim), (8, 3)], [(0, "sum", 0), (1, "sum", 2), (0, "sum", 1)], weighted=weighted)
        # few values, so that ties are many
        arena = torch.from_numpy(np.random.default_rng(2).integers(-2, 3, batch.size)).to(dtype)
        arena[[7, 9, 30]] = torch.nan
        features, csr = torch.from_numpy(batch.features), batch.csr(dtype)
        out, winners = BACKEND.max_lookup(arena, features, csr, batch.width, "drop")
        expected, first = np.zeros((batch.bags, batch.width)), np.full((batch.bags, batch.width), -1)
        values = arena.double().numpy()
        for position, feature, _, row, weight in counted(batch):
            for lane in range(batch.features[feature, 3]):
                column = batch.features[feature, 4] + lane
                value = weight * values[row_of(batch, feature, position)][lane]
                best = expected[row, column]
                if first[row, column] < 0 or value > best or (np.isnan(value) and not np.isnan(best)):
                    expected[row, column], first[row, column] = value, position
        np.testing.assert_array_equal(winners.numpy(), first)
        close(out, expected, dtype)

        grad = random_tensor((batch.bags, batch.width), dtype, seed=3)
        found = torch.zeros(batch.size, dtype=dtype)
        BACKEND.max_grad(found, features, csr, winners, grad)
        gradient = np.zeros(batch.size)
        for position, feature, _, row, weight in counted(batch):
            won = first[row, columns_of(batch, feature)] == position
            gradient[row_of(batch, feature, position)] += (
                won * weight * grad[row, columns_of(batch, feature)].double().numpy()
            )
        close(found, gradient, dtype)


FORMS = ["plain", "strided", "expanded", "scalar", "other type"]


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype, weighted: bool, ids_dtype: Any) -> None:
    for dim, form in zip(DIMS, [*FORMS, "plain"], strict=True):
        reads = [(0, "mean", 0), (1, "sum", 1), (0, "sqrtn", 2), (2, "mean_by_count", 0)]
        batch = make_batch([(11, dim), (30, 5), (4, 2)], reads, records=2, weighted=weighted, ids_dtype=ids_dtype)
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        features, csr = torch.from_numpy(batch.features), batch.csr(dtype)
        scale = random_tensor(len(batch.offsets) - 1, kind, seed=5)
        grad = make_grad(form, batch.records * batch.bags, batch.width, dtype)
        sums = judge_row_sums(batch, scale.double().numpy(), grad.double().numpy())

        found, expected = torch.zeros(batch.size, dtype=dtype), np.zeros(batch.size)
        BACKEND.row_grad(found, features, csr, scale, grad)
        for (table, row), value in sums.items():
            start = batch.tables[table, 0] + row * batch.tables[table, 2]
            expected[start : start + len(value)] = value
        close(found, expected, dtype)

        tables = batch.tables.copy()
        tables[:, 4] = 0, -1, 0
        update = Update(found, features, torch.from_numpy(tables), [Optimizer], torch.zeros(1, dtype=kind),
                        torch.zeros(3, 16, dtype=torch.float64), torch.ones(3, dtype=torch.int64))  # fmt: skip
        total = sum(float(value @ value) for (table, _), value in sums.items() if table != 1)
        close(BACKEND.row_square_sum(update, csr, scale, grad), np.array(total), kind, 20.0)

        arena = random_tensor(batch.size, dtype)
        coefficients = BACKEND.coefficient_grad(arena, features, csr, scale, grad)
        close(coefficients, judge_coefficients(batch, arena, scale, grad), kind, 200.0)
