"""What is measured: workloads by name, each a shape, a distribution of ids, a storage type and an optimizer."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Ids = Literal["uniform", "zipf 1.05", "zipf 1.15", "hot", "unique"]
Weights = Literal["none", "fixed", "learned"]

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")
DTYPES = ("float32", "float16", "bfloat16")
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


Change = tuple[str, dict[str, Any]]
"""A suffix of the name, and fields of `Case`."""


@dataclass(frozen=True)
class Case:
    """One workload: every table is read by one feature, and all features have the same number of bags.

    Attributes:
        rows, dims: of each table.
        lengths: for each table, the fewest and the most ids of a bag; evenly spread.
        ids: "hot": every second id is row 0; "unique": no id twice.
        weights: of each id: none, given, or given and asking for gradients.
        sequence: one id a bag stands for a sequence that is not pooled.
        note: what a reader of the numbers must know.
    """

    name: str
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    bags: int
    lengths: tuple[tuple[int, int], ...]
    ids: Ids = "uniform"
    dtype: str = "float32"
    optimizer: str = "rowwise_adagrad"
    combiner: str = "sum"
    weights: Weights = "none"
    index: str = "int64"
    sequence: bool = False
    note: str = ""

    @property
    def width(self) -> int:
        """Columns of the output."""
        return sum(self.dims)

    @property
    def table_bytes(self) -> int:
        """Bytes of one copy of all tables, without optimizer state."""
        return BYTES[self.dtype] * sum(r * d for r, d in zip(self.rows, self.dims, strict=True))

    def describe(self) -> str:
        """The shape in words."""
        fewest, most = min(low for low, _ in self.lengths), max(high for _, high in self.lengths)
        length = f"{most}" if fewest == most else f"{fewest}-{most}"
        dim = f"{self.dims[0]}" if len(set(self.dims)) == 1 else f"{min(self.dims)}-{max(self.dims)}"
        parts = [
            f"{len(self.rows)} x {self.bags} x {length} ids", f"up to {max(self.rows):,} rows", f"dim {dim}",
            self.dtype, self.ids, self.optimizer, self.combiner, self.index,
        ]  # fmt: skip
        parts += [f"weights {self.weights}"] * (self.weights != "none") + ["sequence"] * self.sequence
        return ", ".join(parts) + (f" ({self.note})" if self.note else "")


def alike(name: str, tables: int, bags: int, length: int | tuple[int, int], rows: int, dim: int) -> Case:
    """Tables of one shape."""
    each = length if isinstance(length, tuple) else (length, length)
    return Case(name, (rows,) * tables, (dim,) * tables, bags, (each,) * tables)


def variants(case: Case, *changes: Change) -> list[Case]:
    """The case and others that differ from it in the respects given, named after it."""
    return [case, *(replace(case, name=f"{case.name}_{suffix}", **change) for suffix, change in changes)]


ZIPF: Change = ("zipf", {"ids": "zipf 1.05"})
ZIPF_STEEP: Change = ("zipf15", {"ids": "zipf 1.15"})
HALVES: list[Change] = [("float16", {"dtype": "float16"}), ("bfloat16", {"dtype": "bfloat16"})]
RULES: list[Change] = [(name, {"optimizer": name}) for name in OPTIMIZERS if name != "rowwise_adagrad"]
WEIGHTED: list[Change] = [("weighted", {"weights": "fixed"}), ("weighted_grad", {"weights": "learned"})]
MEAN: Change = ("mean", {"combiner": "mean"})

# MLPerf's DCN-v2 (Criteo 1TB, multi-hot)
DCN_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
DCN_LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
DCN_CAP = 10_000_000
_DCN = Case(
    "dcn_v2", tuple(min(rows, DCN_CAP) for rows in DCN_ROWS), (128,) * 26, 8192,
    tuple((length, length) for length in DCN_LENGTHS), dtype="float16",
    note="tables of 40,000,000 rows cut to 10,000,000",
)  # fmt: skip

_MIXED_LONGEST = (1, 2, 5, 10, 20, 40, 60, 120, 1, 3, 30)
_MIXED = Case(
    "mixed_dims", (200_000,) * 66, (4, 8, 16, 32, 64, 128) * 11, 1024,
    tuple((1, longest) for longest in _MIXED_LONGEST * 6),
)  # fmt: skip

_SEQUENCE = replace(
    alike("nvidia_sequence", 10, 104_857, 1, 1_680_000, 128), ids="zipf 1.05", optimizer="sgd", sequence=True
)
_ONE_TABLE = alike("hot_row", 1, 16_384, 128, 4_000_000, 128)

ENGINE: list[Case] = [
    # the eight of the project's first measurements
    *variants(alike("ten_tables", 10, 2048, 20, 1_000_000, 128), ZIPF),
    *variants(alike("single_ids", 26, 65_536, 1, 500_000, 128), ZIPF),
    *variants(alike("long_bags", 8, 4096, 64, 2_000_000, 64), ZIPF),
    *variants(alike("memory_layer", 1, 8192, 128, 1_000_000, 512), ZIPF),
    *variants(alike("tiny", 2, 32, 10, 1000, 64)),
    *variants(alike("many_tiny_tables", 500, 512, (1, 3), 1000, 32)),
    replace(_ONE_TABLE, ids="hot"),
    replace(_ONE_TABLE, name="all_unique", ids="unique"),
    *variants(
        alike("fbgemm_default", 32, 512, 20, 100_000, 128), ZIPF_STEEP, *HALVES, *RULES, *WEIGHTED, MEAN,
        ("int32", {"index": "int32"}),
    ),
    *variants(_MIXED, *WEIGHTED, ZIPF),
    *variants(_DCN, ZIPF),
    _SEQUENCE,
    replace(_SEQUENCE, name="nvidia_sequence_adam", rows=(560_000,) * 10, optimizer="adam",
            note="tables of 1,680,000 rows cut to 560,000"),
    *variants(alike("ten_tables", 10, 2048, 20, 1_000_000, 128), *HALVES, *RULES, *WEIGHTED, MEAN)[1:],
]  # fmt: skip
"""For GPUs; the first ones first, should the time not suffice for all."""

CPU: list[Case] = [
    *variants(
        alike("cpu_bags", 8, 1024, (1, 20), 100_000, 64), ZIPF, *HALVES, *RULES, *WEIGHTED, MEAN,
        ("hot", {"ids": "hot"}), ("bfloat16_adam", {"dtype": "bfloat16", "optimizer": "adam"}),
    ),
    *variants(alike("cpu_single_ids", 26, 2048, 1, 50_000, 64), ZIPF, ("adam", {"optimizer": "adam"})),
    alike("cpu_tiny", 2, 32, 10, 1000, 64),
    alike("cpu_wide", 2, 512, 20, 50_000, 256),
]  # fmt: skip

SUITES = {"engine": ENGINE, "cpu": CPU}


def scaled(case: Case, scale: float) -> Case:
    """The same with fewer bags and rows; dims, lengths and the number of tables stay."""
    if scale == 1:
        return case
    bags = max(1, round(case.bags * scale))
    # as many rows as "unique" needs
    most = bags * max(high for _, high in case.lengths)
    least = most if case.ids == "unique" else 2
    rows = tuple(min(rows, max(least, round(rows * scale))) for rows in case.rows)
    note = f"{case.note}; scaled by {scale:g}".removeprefix("; ")
    return replace(case, rows=rows, bags=bags, note=note)


def fitting(case: Case, most_bytes: int) -> Case:
    """The same with as few rows less as let one copy of the tables fit; says so in its note."""
    if case.table_bytes <= most_bytes:
        return case
    low, high = 1, max(case.rows)
    while low < high:
        middle = (low + high + 1) // 2
        cut = replace(case, rows=tuple(min(rows, middle) for rows in case.rows))
        low, high = (middle, high) if cut.table_bytes <= most_bytes else (low, middle - 1)
    note = f"{case.note}; tables cut to {low:,} rows".removeprefix("; ")
    return replace(case, rows=tuple(min(rows, low) for rows in case.rows), note=note)


def choose(suite: str, patterns: Sequence[str] = ()) -> list[Case]:
    """The cases of a suite whose names fit one of the patterns (`*` and `?` as in file names); all without any.

    Raises:
        ValueError: a pattern that fits none.
    """
    cases = SUITES[suite]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            names = ", ".join(case.name for case in cases)
            raise ValueError(f"`cases` must name cases of suite {suite!r}, got {pattern!r}: there are {names}")
    return [c for c in cases if not patterns or any(fnmatch.fnmatchcase(c.name, pattern) for pattern in patterns)]
