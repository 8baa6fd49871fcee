"""Batches of one kind share what sorts and sums them, others do not: `torch/backends/passes.py`."""

import dataclasses
import itertools

import pytest
import torch
from triton_cases import DEVICE, gradient, make, put, small_update, state_of

from embedfuse.optim import SGD, Adagrad, RowWiseAdagrad
from embedfuse.plan import FROZEN
from embedfuse.torch.backends import Csr, passes
from embedfuse.torch.backends.descriptor_facts import feature_facts, known_columns, table_facts
from embedfuse.torch.backends.passes import passes_of
from embedfuse.torch.backends.sorted_runs import Order
from embedfuse.torch.backends.summed_runs import SQUARE_SUMS, STEP_ROWS, STORE_SUMS, Sums, Target

CASE = make(shapes=[(9, 8), (7, 8)], features=[(0, "sum"), (1, "sum")], bags=6)
CONFIG = small_update(8)


def test_what_is_found_is_what_the_batch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST", 10_000)
    tables, features = put(CASE.tables), put(CASE.features)
    facts = table_facts(tables)
    # else the columns count as aligned to nothing
    above = CONFIG.block_d // CONFIG.narrow
    assert feature_facts(features).columns == 8 and set(known_columns(features, facts, above).values()) == {(8, 8)}
    plain, _ = state_of(CASE, [SGD(0.1)] * 2)
    other, _ = state_of(CASE, [Adagrad(0.1), RowWiseAdagrad(0.1)])
    scaled = dataclasses.replace(plain, grad_scale=torch.ones((), device=DEVICE))
    skipped = dataclasses.replace(plain, skip=torch.zeros((), device=DEVICE))
    counted = dataclasses.replace(plain, counted=plain.steps)
    at_random = dataclasses.replace(plain, at_random=not plain.at_random)
    updates, table = (plain, other, scaled, skipped, counted, at_random), plain.table
    targets = [
        *(Target(STEP_ROWS, table, facts.starts, update) for update in updates),
        Target(STORE_SUMS, table, facts.starts), Target(STORE_SUMS, table, 1),
        Target(SQUARE_SUMS, table, facts.starts), Target(STORE_SUMS, table.half(), facts.starts),
        *(Target(STORE_SUMS, table, facts.starts, source=table.bfloat16(), sources=one) for one in (1, 8)),
    ]  # fmt: skip
    csr = CASE.csr()
    csrs = [csr, csr._replace(weights=None), csr._replace(ids=csr.ids.int())]
    scales = [torch.empty(0, device=DEVICE), torch.ones(len(CASE.offsets) - 1, device=DEVICE)]
    grads = [
        *(gradient(CASE, layout) for layout in ("plain", "sliced", "transposed", "one row")),
        gradient(CASE, dtype=torch.bfloat16),
    ]
    winners = torch.zeros(CASE.bags, CASE.width, dtype=torch.int64, device=DEVICE)
    dots = torch.zeros(len(CASE.ids), device=DEVICE)
    asides = [(None, None), (winners, None), (None, dots)]
    found: dict[tuple[Order, Sums], object] = {}

    def check(target: Target, csr: Csr, scale: torch.Tensor, grad: torch.Tensor, aside: tuple) -> None:
        chosen, dotted = (one is not None for one in aside)
        order = Order.of(
            csr, scale, grad, chosen or dotted, target.mode != STORE_SUMS and FROZEN in facts.rules, target.update
        )
        sums = Sums.of(target, grad, known_columns(features, facts, above), chosen, dotted, facts.clipped)
        passes = passes_of(target, facts, CONFIG, features, csr, scale, grad, *aside)
        assert passes.sorter.order == order and passes.summer.sums == sums
        assert found.setdefault((order, sums), passes) is passes

    every = list(itertools.product(targets, csrs, scales, grads, asides))
    for batch in (*every, *every[::7]):
        check(*batch)
    assert len(found) > 200


def test_kinds_are_forgotten_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST", 4)
    tables, features = put(CASE.tables), put(CASE.features)
    facts, scale = table_facts(tables), torch.empty(0, device=DEVICE)
    target = Target(STORE_SUMS, torch.zeros(len(CASE.table), device=DEVICE), facts.starts)
    for rows in range(2, 20):
        # a transposed gradient has a stride for each number of rows
        grad = torch.zeros(CASE.width, rows, device=DEVICE).t()
        passes_of(target, facts, CONFIG, features, CASE.csr(), scale, grad, None, None)
        assert len(facts.passes) <= 5
