"""The native engine's optimizer steps against float64 loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_judge import (
    DIMS,
    DTYPES,
    RULES,
    check_update,
    close,
    common_hyper,
    judge_row_sums,
    judge_scale,
    make_batch,
    make_update,
    random_tensor,
)

from embedfuse.optim.base import OWN_HYPER, Optimizer, Slot
from embedfuse.torch.backends import Update
from embedfuse.torch.backends.cpu import BACKEND


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule[0]}{list(rule[1][:5])}")
def test_rules(rule: tuple[str, tuple[float, ...]], dtype: torch.dtype) -> None:
    for dim in DIMS:
        own: list[tuple[str, tuple[float, ...]] | None] = [rule, rule]
        batch = make_batch([(12, dim), (9, dim)], [(0, "sum", 0), (1, "mean", 0), (0, "mean", 0)], records=2)
        update = make_update(batch, own, dtype)
        check_update(batch, update, own, dtype, grad_scale=0.5)


def test_many_tables_and_rules_at_once() -> None:
    own: list[tuple[str, tuple[float, ...]] | None] = [RULES[3], None, RULES[6], RULES[0], RULES[5]]
    shapes = [(40, 64), (30, 7), (9, 33), (50, 1), (12, 16)]
    reads = [(4, "sum", 0), (2, "mean", 3), (0, "sum", 0), (1, "sum", 0), (3, "sqrtn", 2), (0, "mean", 1)]
    for weighted in (False, True):
        batch = make_batch(shapes, reads, bags=30, records=3, weighted=weighted)
        update = make_update(batch, own, torch.float32)
        before = update.table.clone(), update.slots.clone()
        check_update(batch, update, own, torch.float32, grad_scale=1.0)
        frozen = slice(int(batch.tables[1, 0]), int(batch.tables[2, 0]))
        assert torch.equal(update.table[frozen], before[0][frozen])
        assert torch.equal(update.slots[frozen], before[1][frozen])


class Halving(Optimizer):
    """A rule the engine does not have: half the way to minus the gradient, and a count a row."""

    slot_kinds = ("row",)

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("count", "row"),)

    @staticmethod
    def update(w: Any, g: Any, slots: tuple[Any, ...], h: Any, step: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
        return 0.5 * w - h[OWN_HYPER] * g, (slots[0] + step,)


class Sgd(Optimizer):
    """One it has."""

    native = "sgd"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rule_without_native_form(dtype: torch.dtype) -> None:
    batch = make_batch([(12, 6), (9, 7), (8, 2)], [(1, "sum", 0), (0, "mean", 0), (1, "mean", 0), (2, "sum", 0)])
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    tables = batch.tables.copy()
    tables[:, 4] = 0, 1, -1
    tables[:, 5] = 0, 100, 0
    hyper = torch.zeros(3, 16, dtype=torch.float64)
    hyper[:, :7] = torch.tensor([*common_hyper(), 0.25], dtype=torch.float64)
    arena, slots = random_tensor(batch.size, dtype), torch.zeros(200, dtype=kind)
    update = Update(arena.clone(), torch.from_numpy(batch.features), torch.from_numpy(tables), [Sgd, Halving], slots,
                    hyper, torch.tensor([4, 5, 6]), grad_scale=torch.tensor(2.0))  # fmt: skip
    scale = torch.from_numpy(judge_scale(batch)).to(kind)
    grad = random_tensor((batch.bags, batch.width), dtype, seed=8)
    skipped = replace(update, skip=torch.tensor(1.0))
    BACKEND.row_update(skipped, batch.csr(dtype), scale, grad)
    assert torch.equal(update.table, arena)
    BACKEND.row_update(update, batch.csr(dtype), scale, grad)
    expected, counts = arena.double().numpy(), np.zeros(200)
    for (table, row), g in judge_row_sums(batch, scale.double().numpy(), grad.double().numpy()).items():
        start, _, dim = batch.tables[table, :3]
        weights = expected[start + row * dim : start + (row + 1) * dim]
        if table == 0:
            weights -= 0.1 * 2 * g
        elif table == 1:
            weights[:] = 0.5 * weights - 0.25 * 2 * g
            counts[100 + row] = 5
    close(update.table, expected, dtype)
    np.testing.assert_array_equal(slots.double().numpy(), counts)
