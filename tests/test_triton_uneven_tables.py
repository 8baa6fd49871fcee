"""Tables of 1 or 10 columns beside wide ones: what is read in long words must start where those do."""

from typing import Any

import numpy as np
import pytest
import torch
from triton_cases import (
    DEFAULT,
    DEVICE,
    SMALL,
    check_update,
    close,
    gradient,
    judge_lookup,
    judge_scale,
    lookup_of,
    make,
    needs_kernels,
    put,
    small_update,
    state_of,
)

from embedfuse.kernels.configs import lookup_config, narrow_lanes, narrow_of, update_config
from embedfuse.optim import FTRL, Adagrad, Optimizer, RowWiseAdagrad
from embedfuse.plan import COLUMN, DIM, FROZEN, OFFSET, STRIDE, T_DIM, T_OFFSET, T_RULE, T_SLOT0, T_SLOT1, TABLE
from embedfuse.torch.backends.descriptor_facts import feature_facts, known_columns, table_facts
from embedfuse.torch.backends.passes import passes_of
from embedfuse.torch.backends.summed_runs import STEP_ROWS, Target

pytestmark = needs_kernels
SHAPES = [(40, 64), (23, 1), (7, 10), (30, 64), (11, 1)]
FEW_COLUMNS = [(40, 64), (23, 1), (7, 3), (30, 64), (150, 1)]
FEATURES = [(number, combiner) for number, combiner in enumerate(("sum", "mean", "sum", "sqrtn", "sum"))]
ONE = Adagrad(0.1)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bags", [1, 5, 19, 140])
@pytest.mark.parametrize("shapes", [SHAPES, FEW_COLUMNS], ids=["some columns", "few columns"])
def test_lookups(shapes: list[tuple[int, int]], short: bool, dtype: torch.dtype, bags: int) -> None:
    case = make(shapes, FEATURES, bags, 6, dtype=dtype)
    for backend in (lookup_of(short, 4, 64, 1 if short else 2, 1 if short else 4, narrow=4), DEFAULT):
        out, scale = backend.pooled_lookup(case.on_device(), put(case.features), case.csr(), case.width, True, "raise")
        expected, size = judge_lookup(case)
        close(out, expected, size, dtype)
        close(scale, judge_scale(case), judge_scale(case))


@pytest.mark.parametrize("own", [
    [ONE] * 5, [ONE, FTRL(0.1), ONE, ONE, FTRL(0.1)], [RowWiseAdagrad(0.1), ONE, None, RowWiseAdagrad(0.1), None],
    [None, ONE, ONE, FTRL(0.1), FTRL(0.1)],
], ids=["one rule", "one for narrow tables", "some frozen", "two for all"])  # fmt: skip
@pytest.mark.parametrize("bags", [3, 40])
@pytest.mark.parametrize("shapes", [SHAPES, FEW_COLUMNS], ids=["some columns", "few columns"])
def test_updates(shapes: list[tuple[int, int]], own: list[Optimizer | None], bags: int) -> None:
    # blocks of 16 keys hold rows of wide tables, of narrow ones, and of both
    check_update(SMALL, make(shapes, FEATURES, bags, 5), own)


@pytest.mark.parametrize("optimizer", [Adagrad(0.1), RowWiseAdagrad(0.1)], ids=["elements", "rows"])
def test_updates_with_the_default_tiles(optimizer: Optimizer) -> None:
    for shapes in (SHAPES, FEW_COLUMNS, [(50, 16), (40, 1), (30, 16)]):
        features = [(number, "sum") for number in range(len(shapes))]
        check_update(DEFAULT, make(shapes, features, 30, 5, weighted=False), [optimizer] * len(shapes))


def test_wide_tables_are_read_in_long_words() -> None:
    # columns of wide ones first
    case = make(SHAPES, [(number, "sum") for number in (0, 3, 1, 2, 4)], 4, 3, weighted=False)
    features, grad = put(case.features), gradient(case)
    lookups: Any = DEFAULT.lookups(features)
    DEFAULT.pooled_lookup(case.on_device(), features, case.csr(), case.width, False, "ignore")
    (found,) = lookups._found.values()
    words = {name: found.launcher.constants[name] for name in ("ALIGN", "OUT_ALIGN", "NARROW_ALIGN", "NARROW")}
    # a row of results has 140 numbers
    assert words == {"ALIGN": 4, "OUT_ALIGN": 4, "NARROW_ALIGN": 1, "NARROW": 4}
    for own, wide, every in (([ONE] * 5, 4, 1), ([ONE, FTRL(0.1), FTRL(0.1), ONE, FTRL(0.1)], 4, 4)):
        update, _ = state_of(case, own)
        facts = table_facts(update.tables)
        target = Target(STEP_ROWS, update.table, facts.starts, update)
        made = passes_of(
            target, facts, small_update(64), features, case.csr(), torch.empty(0, device=DEVICE), grad, None, None
        )
        for kernel in (made.summer.rules[0].segments, made.summer.rules[0].long):
            constants = kernel.constants
            assert constants["WIDE_ALIGN"] == constants["WIDE_SLOT_ALIGN"] == constants["WIDE_GRAD_ALIGN"] == wide
            assert constants["ALIGN"] == constants["SLOT_ALIGN"] == every


@pytest.mark.parametrize(("dims", "narrow"), [
    ([64], 1), ([64, 17], 1), ([64, 16, 1], 4), ([64, 5], 8), ([64, 4], 16), ([64, 17, 3, 1], 16), ([50, 1], 16),
    ([128, 1], 32), ([8, 1], 1), ([16, 1], 4),
])  # fmt: skip
def test_narrow_tiles_are_as_wide_as_the_widest_narrow_table(dims: list[int], narrow: int) -> None:
    assert narrow_of(update_config(max(dims)), dims, True) == narrow
    assert narrow_of(update_config(max(dims)), dims, False) == 1


def test_lanes_of_narrow_tables() -> None:
    short, long = lookup_config(64, True), lookup_config(64, False)
    assert [narrow_lanes(short, narrow) for narrow in (1, 4, 8, 16)] == [(32, 32), (32, 128), (16, 128), (16, 128)]
    assert [narrow_lanes(long, narrow) for narrow in (1, 4, 16)] == [(16, 16), (16, 64), (16, 64)]


@pytest.mark.parametrize("seed", range(20))
def test_everything_starts_at_multiples_of_what_is_said(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    case = make([(int(rng.integers(1, 9)), int(rng.choice([1, 2, 4, 10, 16, 24, 64]))) for _ in range(count)], [
        (int(rng.integers(count)), "sum") for _ in range(count + 1)
    ])  # fmt: skip
    rules = [None if rng.random() < 0.2 else rng.choice([ONE, FTRL(0.1)]) for _ in range(count)]
    if not any(rules):
        rules[0] = ONE
    update, _ = state_of(case, rules)
    features, tables = case.features, update.tables.cpu().numpy()
    read, facts = feature_facts(put(features)), table_facts(update.tables)
    above = int(rng.choice([0, 4, 16]))

    def divides(aligned: int, values: Any) -> bool:
        return all(value % aligned == 0 for value in np.asarray(values).ravel())

    wide = features[features[:, DIM] > above]
    starts, columns = read.wide(above)
    assert divides(starts, wide[:, [OFFSET, STRIDE, DIM]]) and divides(columns, wide[:, COLUMN])
    known = known_columns(put(features), facts, above)
    for rule in facts.rules:
        mine = tables[tables[:, T_RULE] == rule]
        for least, place in ((0, 0), (above, 1)):
            some = mine[mine[:, T_DIM] > least]
            starts, slots, dims = facts.of_rule(rule, least)
            assert divides(starts, some[:, [T_OFFSET, T_DIM]]) and divides(dims, some[:, T_DIM])
            assert rule == FROZEN or divides(slots, some[:, [T_SLOT0, T_SLOT1, T_DIM]])
            numbers = np.flatnonzero((tables[:, T_RULE] == rule) & (tables[:, T_DIM] > least))
            assert divides(known[rule][place], features[np.isin(features[:, TABLE], numbers), COLUMN])
