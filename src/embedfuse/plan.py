"""Features and tables → groups that share one launch, each described by two small integer tables.

A group holds all tables of one storage type. Their rows lie in one flat buffer, the *arena*; a kernel finds a row with
the group's descriptors and never knows how many tables there are.

Letters: N ids in the batch, B bags of one feature, F features, T tables, V rows of all tables, D width of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .combiners import COMBINERS

# columns of `Group.features`, int64 [F, FEATURE_WIDTH]
TABLE, OFFSET, ROWS, DIM, COLUMN, ROW_BASE, MOMENT, POWER, FLAGS = range(9)
FEATURE_WIDTH = 9
# bits of FLAGS
DROP_NEGATIVE_IDS, DROP_NONPOSITIVE_WEIGHTS = 1, 2

# columns of `Group.tables`, int64 [T, TABLE_WIDTH]
T_OFFSET, T_ROWS, T_DIM, T_ROW_BASE, T_RULE, T_SLOT0, T_SLOT1 = range(7)
TABLE_WIDTH = 7
FROZEN = -1
"""In T_RULE: this table does not learn."""

ALIGNMENT = 32
"""Every table starts at a multiple of this many elements, so that rows of even width can be read in wide words."""


@dataclass(frozen=True)
class PlannedFeature:
    """What the engine must know of one feature."""

    table: int
    combiner: str
    flags: int = 0


@dataclass(frozen=True)
class Group:
    """All tables of one storage type and the features that read them: one launch.

    Attributes:
        features: int64 `[F, FEATURE_WIDTH]`: TABLE (row in `tables`), OFFSET (element of the arena where the table
            starts), ROWS, DIM, COLUMN (first output column), ROW_BASE (rows of the tables before it), MOMENT and POWER
            (the combiner, see `combiners.py`), FLAGS.
        tables: int64 `[T, TABLE_WIDTH]`: OFFSET, ROWS, DIM, ROW_BASE, RULE (position in the list of rules given to the
            update, or FROZEN), SLOT0 and SLOT1 (element of the slots buffer where the state starts).
        size: elements of the arena.
        width: columns of the output, the sum of the features' widths.
        normalised: whether any feature divides its sum.
    """

    features: np.ndarray
    tables: np.ndarray
    size: int
    width: int
    normalised: bool

    @property
    def rows(self) -> int:
        """V: rows of all tables."""
        return int(self.tables[:, T_ROWS].sum())


def plan_group(shapes: Sequence[tuple[int, int]], features: Sequence[PlannedFeature]) -> Group:
    """Lays out tables of the given `(rows, dim)` one behind the other, and the features' columns likewise."""
    tables = np.zeros((len(shapes), TABLE_WIDTH), np.int64)
    offset = base = 0
    for number, (rows, dim) in enumerate(shapes):
        tables[number, :4] = offset, rows, dim, base
        tables[number, T_RULE] = FROZEN
        offset += -(-rows * dim // ALIGNMENT) * ALIGNMENT
        base += rows
    meta = np.zeros((len(features), FEATURE_WIDTH), np.int64)
    column = 0
    for number, feature in enumerate(features):
        combiner = COMBINERS[feature.combiner]
        table = tables[feature.table]
        meta[number] = (
            feature.table, table[T_OFFSET], table[T_ROWS], table[T_DIM], column, table[T_ROW_BASE],
            combiner.moment, combiner.power, feature.flags,
        )  # fmt: skip
        column += int(table[T_DIM])
    return Group(meta, tables, offset, column, bool((meta[:, POWER] != 0).any()))
