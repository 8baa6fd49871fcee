"""Layout of tables and columns for whatever tables and features."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfuse.combiners import COMBINERS
from embedfuse.plan import (
    ALIGNMENT,
    COLUMN,
    DIM,
    FEATURE_WIDTH,
    FLAGS,
    FROZEN,
    MOMENT,
    NO_DEFAULT,
    NO_MAX_NORM,
    OFFSET,
    POWER,
    ROW_BASE,
    ROWS,
    T_DIM,
    T_OFFSET,
    T_ROW_BASE,
    T_ROWS,
    T_RULE,
    TABLE,
    TABLE_WIDTH,
    PlannedFeature,
    bits_of,
    number_of,
    plan_group,
)

SHAPES = st.lists(st.tuples(st.integers(1, 2**40), st.integers(1, 5000)), min_size=1, max_size=12)


@st.composite
def _declared(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[PlannedFeature]]:
    shapes = draw(SHAPES)
    table = st.integers(0, len(shapes) - 1)
    feature = st.builds(PlannedFeature, table, st.sampled_from(list(COMBINERS)), st.integers(0, 3))
    return shapes, draw(st.lists(feature, max_size=12))


@given(_declared())
def test_tables_lie_behind_each_other_aligned(declared: tuple[list[tuple[int, int]], list[PlannedFeature]]) -> None:
    shapes, features = declared
    group = plan_group(shapes, features)
    assert group.tables.shape == (len(shapes), TABLE_WIDTH) and group.tables.dtype == np.int64
    end = rows_before = 0
    for row, (rows, dim) in zip(group.tables.tolist(), shapes, strict=True):
        assert (row[T_ROWS], row[T_DIM], row[T_ROW_BASE], row[T_RULE]) == (rows, dim, rows_before, FROZEN)
        assert row[T_OFFSET] % ALIGNMENT == 0
        assert end <= row[T_OFFSET] < end + ALIGNMENT
        end = row[T_OFFSET] + rows * dim
        rows_before += rows
    assert end <= group.size < end + ALIGNMENT
    assert group.rows == rows_before


@given(_declared())
def test_features_know_their_table_and_own_their_columns(
    declared: tuple[list[tuple[int, int]], list[PlannedFeature]],
) -> None:
    shapes, features = declared
    group = plan_group(shapes, features)
    assert group.features.shape == (len(features), FEATURE_WIDTH) and group.features.dtype == np.int64
    column = 0
    for row, feature in zip(group.features.tolist(), features, strict=True):
        table = group.tables[feature.table].tolist()
        assert [row[i] for i in (TABLE, OFFSET, ROWS, DIM, ROW_BASE)] == [
            feature.table, table[T_OFFSET], *shapes[feature.table], table[T_ROW_BASE],
        ]  # fmt: skip
        combiner = COMBINERS[feature.combiner]
        assert (row[MOMENT], row[POWER], row[FLAGS]) == (combiner.moment, combiner.power, feature.flags)
        assert row[COLUMN] == column
        column += row[DIM]
    assert group.width == column
    assert group.normalised == any(feature.combiner != "sum" for feature in features)


def test_a_plan_by_hand() -> None:
    group = plan_group([(10, 4), (3, 5, 2.5)], [PlannedFeature(1, "mean", 3, 2), PlannedFeature(0, "sum")])
    cut = int(np.float64(2.5).view(np.int64))
    assert group.tables.tolist() == [
        [0, 10, 4, 0, FROZEN, 0, 0, 0, NO_MAX_NORM], [64, 3, 5, 10, FROZEN, 0, 0, 64, cut],
    ]  # fmt: skip
    assert group.features.tolist() == [
        [1, 64, 3, 5, 0, 10, 1, 2, 3, 5, cut, 2], [0, 0, 10, 4, 5, 0, 0, 0, 0, 4, NO_MAX_NORM, NO_DEFAULT],
    ]  # fmt: skip
    assert number_of(cut) == 2.5 and bits_of(2.5) == cut
    assert (group.size, group.width, group.rows, group.normalised) == (96, 9, 13, True)


def test_no_features_and_no_tables() -> None:
    assert plan_group([(2, 3)], []).width == 0
    empty = plan_group([], [])
    assert (empty.size, empty.rows, empty.width, empty.normalised) == (0, 0, 0, False)


def test_an_unknown_combiner_is_refused() -> None:
    with pytest.raises(KeyError):
        plan_group([(2, 3)], [PlannedFeature(0, "max")])
