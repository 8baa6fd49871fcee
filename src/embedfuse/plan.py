"""Features and tables → groups that share one launch, each described by two small integer tables.

A group holds all tables of one storage type. Their rows lie in one flat buffer, the *arena*; a kernel finds a row with
the group's descriptors and never knows how many tables there are.

Letters: N ids in the batch, B bags of one feature, F features, T tables, V rows of all tables, D width of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .combiners import COMBINERS

# columns of `Group.features`, int64 [F, FEATURE_WIDTH]
TABLE, OFFSET, ROWS, DIM, COLUMN, ROW_BASE, MOMENT, POWER, FLAGS, STRIDE, MAX_NORM, DEFAULT_ID = range(12)
FEATURE_WIDTH = 12
# bits of FLAGS
DROP_NEGATIVE_IDS, DROP_NONPOSITIVE_WEIGHTS = 1, 2

# columns of `Group.tables`, int64 [T, TABLE_WIDTH]
T_OFFSET, T_ROWS, T_DIM, T_ROW_BASE, T_RULE, T_SLOT0, T_SLOT1, T_SOURCE, T_MAX_NORM = range(9)
TABLE_WIDTH = 9
FROZEN = -1
"""In T_RULE: this table does not learn."""
NO_DEFAULT = -1
"""In DEFAULT_ID: an empty bag gives zeros."""

ALIGNMENT = 32
"""Every table starts at a multiple of this many elements, so that rows of even width can be read in wide words."""


def bits_of(number: float) -> int:
    """A float64 as descriptors hold it: the integer of the same bits."""
    return int(np.float64(number).view(np.int64))


def number_of(bits: int) -> float:
    """The float64 of these bits."""
    return float(np.int64(bits).view(np.float64))


NO_MAX_NORM = bits_of(np.inf)
"""In MAX_NORM and T_MAX_NORM: rows are taken as long as they are."""


@dataclass(frozen=True)
class PlannedFeature:
    """What the engine must know of one feature."""

    table: int
    combiner: str
    flags: int = 0
    default_id: int = NO_DEFAULT


class PlannedTable(NamedTuple):
    """What the engine must know of one table."""

    rows: int
    dim: int
    max_norm: float = np.inf


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


def plan_group(planned: Sequence[PlannedTable | tuple[int, int]], features: Sequence[PlannedFeature]) -> Group:
    """Lays out tables (those of plain `(rows, dim)` too) one behind the other, and the features' columns likewise."""
    tables = np.zeros((len(planned), TABLE_WIDTH), np.int64)
    offset = base = 0
    for number, item in enumerate(PlannedTable(*given) for given in planned):
        tables[number] = offset, item.rows, item.dim, base, FROZEN, 0, 0, offset, bits_of(item.max_norm)
        offset += -(-item.rows * item.dim // ALIGNMENT) * ALIGNMENT
        base += item.rows
    meta = np.zeros((len(features), FEATURE_WIDTH), np.int64)
    column = 0
    for number, feature in enumerate(features):
        combiner = COMBINERS[feature.combiner]
        table = tables[feature.table]
        meta[number] = (
            feature.table, table[T_OFFSET], table[T_ROWS], table[T_DIM], column, table[T_ROW_BASE],
            combiner.moment, combiner.power, feature.flags, table[T_DIM], table[T_MAX_NORM], feature.default_id,
        )  # fmt: skip
        column += int(table[T_DIM])
    return Group(meta, tables, offset, column, bool((meta[:, POWER] != 0).any()))
