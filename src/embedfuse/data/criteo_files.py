"""Files in Criteo's layout, read in a stream: label, 13 whole numbers, 26 category strings.

A line that cannot be right is left out, counted, and named; it never ends the reading. Text is cut into lines here and
only then given to pyarrow, whose own handling of bad lines fails on bytes that are not UTF-8.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.csv as csv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from numpy.typing import NDArray

from .schema import DataError

LABEL = "label"
NUMBERS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = (LABEL, *NUMBERS, *CATEGORIES)
BLOCK = 8 << 20
LONGEST_LINE = 64 << 20
PARQUET_ROWS = 32768
SHOWN = 20

TAB, NEWLINE, RETURN = 9, 10, 13
WHOLE_NUMBER = r"^\s*-?[0-9]{1,18}\s*$"


@dataclass
class BadLines:
    """Lines left out of one file: how many, and the first of them with the reason."""

    unit: str = "line"
    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)
    seen: int = 0
    """Lines up to here are counted; a file is read several times, and its bad lines count once."""

    def add(self, lines: NDArray[np.int64], reason: str) -> None:
        """Counts those line numbers, unless an earlier reading did."""
        fresh = lines[lines > self.seen]
        self.count += len(fresh)
        room = SHOWN - len(self.first)
        self.first += [(int(line), reason) for line in fresh[:room]]

    def describe(self) -> list[str]:
        """One text a line shown."""
        return [f"{self.unit} {line}: {reason}" for line, reason in sorted(self.first)]


@dataclass(frozen=True)
class Chunk:
    """Some good rows of a file."""

    number: int  # of the chunk in its file, from 0
    lines: NDArray[np.int64]  # [n], from 1
    labels: NDArray[np.float32]  # [n]
    numbers: NDArray[np.float64]  # [n, 13], NaN where missing
    categories: tuple[pa.Array, ...]  # 26 of [n], bytes, empty where missing


def read_chunks(path: Path, bad: BadLines) -> Iterator[Chunk]:
    """The good rows of a file in order; Parquet by its suffix, else tab-separated text, gzip and the like undone.

    Raises:
        DataError: no such file, nothing in it, not of this layout at all, or damaged.
    """
    if not path.is_file():
        raise DataError(f"`path` must be a file, got {str(path)!r}: there is none of that name")
    if path.stat().st_size == 0:
        raise DataError(f"`path` must hold rows, got {str(path)!r}: the file is empty")
    parquet = path.suffix.lower() in (".parquet", ".pq")
    bad.unit = "row" if parquet else "line"
    good = 0
    try:
        for chunk in _parquet_chunks(path, bad) if parquet else _text_chunks(path, bad):
            good += len(chunk.lines)
            yield chunk
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise DataError(f"{str(path)!r} cannot be read after {bad.seen} {bad.unit}s: {error}") from error
    if good == 0:
        shown = "; ".join(bad.describe()[:3])
        raise DataError(
            f"`path` must hold rows of 40 tab-separated columns (label, 13 integers, 26 categories), got "
            f"{str(path)!r}, where every one of {bad.seen} {bad.unit}s is bad: {shown}"
        )


# --- text --------------------------------------------------------------------------------------------------------


def _text_chunks(path: Path, bad: BadLines) -> Iterator[Chunk]:
    line = 0
    for number, block in enumerate(_line_blocks(path)):
        text, count, lines = _with_all_columns(block, line, bad)
        chunk = None
        if len(lines):
            table = _parse(text)
            if table is None:
                text, lines = _without_bad_numbers(text, lines, bad)
                table = _parse(text) if len(lines) else None
            chunk = None if table is None else _checked(number, lines, table, bad)
        line += count
        # before the rows are handed out: whoever takes them may not come back
        bad.seen = max(bad.seen, line)
        if chunk is not None:
            yield chunk


def _line_blocks(path: Path) -> Iterator[NDArray[np.uint8]]:
    """The bytes of the file in blocks that end with a line."""
    rest = b""
    with pa.input_stream(str(path), compression="detect") as stream:
        while piece := stream.read(BLOCK):
            piece = rest + piece
            cut = piece.rfind(b"\n") + 1
            rest = piece[cut:]
            if cut:
                yield np.frombuffer(piece[:cut].replace(b"\r\n", b"\n"), np.uint8)
            elif len(rest) > LONGEST_LINE:
                raise DataError(f"{str(path)!r} has a line of more than {LONGEST_LINE >> 20} MiB: is it text?")
    if rest:
        yield np.frombuffer(rest.removesuffix(b"\r") + b"\n", np.uint8)


def _with_all_columns(
    block: NDArray[np.uint8], line: int, bad: BadLines
) -> tuple[NDArray[np.uint8], int, NDArray[np.int64]]:
    """The lines of a block that have 40 columns, the number of all its lines, and the numbers of those kept."""
    ends = np.flatnonzero(block == NEWLINE)
    lines = line + 1 + np.arange(len(ends))
    columns = 1 + _per_line(np.flatnonzero(block == TAB), ends)
    stray = _per_line(np.flatnonzero(block == RETURN), ends) > 0
    wrong = columns != len(COLUMNS)
    for count in np.unique(columns[wrong]):
        bad.add(lines[columns == count], f"{count} columns, {len(COLUMNS)} expected")
    bad.add(lines[stray & ~wrong], "a carriage return within the line")
    keep = ~(wrong | stray)
    return _kept(block, ends, keep), len(ends), lines[keep]


def _per_line(places: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.diff(np.searchsorted(places, ends), prepend=0)


def _kept(block: NDArray[np.uint8], ends: NDArray[np.int64], keep: NDArray[np.bool_]) -> NDArray[np.uint8]:
    if keep.all():
        return block
    return block[np.repeat(keep, np.diff(ends, prepend=-1))]


def _parse(text: NDArray[np.uint8]) -> pa.Table | None:
    """The columns, or None if a number is none."""
    kinds = {name: pa.int64() for name in (LABEL, *NUMBERS)} | {name: pa.binary() for name in CATEGORIES}
    try:
        return _columns(text, kinds)
    except pa.ArrowInvalid:
        return None


def _columns(text: NDArray[np.uint8], kinds: dict[str, pa.DataType]) -> pa.Table:
    return csv.read_csv(
        pa.BufferReader(pa.py_buffer(text)),
        read_options=csv.ReadOptions(column_names=list(COLUMNS), block_size=len(text) + 1),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(column_types=kinds, null_values=[""], check_utf8=False),
    )


def _without_bad_numbers(
    text: NDArray[np.uint8], lines: NDArray[np.int64], bad: BadLines
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    table = _columns(text, {name: pa.binary() for name in COLUMNS})
    wrong = np.zeros(len(lines), bool)
    for name in (LABEL, *NUMBERS):
        column = table[name].combine_chunks()
        fits = pc.or_(pc.match_substring_regex(column, WHOLE_NUMBER), pc.equal(column, b"")).fill_null(True)
        mine = ~fits.to_numpy(zero_copy_only=False) & ~wrong
        bad.add(lines[mine], f"{name} is not a whole number")
        wrong |= mine
    return _kept(text, np.flatnonzero(text == NEWLINE), ~wrong), lines[~wrong]


# --- Parquet -----------------------------------------------------------------------------------------------------


def _parquet_chunks(path: Path, bad: BadLines) -> Iterator[Chunk]:
    file = pq.ParquetFile(path)
    given = file.schema_arrow.names
    by_lower = {name.lower(): name for name in given}
    if all(name.lower() in by_lower for name in COLUMNS):
        names = [by_lower[name.lower()] for name in COLUMNS]
    elif len(given) == len(COLUMNS):
        names = list(given)
    else:
        raise DataError(
            f"{str(path)!r} must have the columns {', '.join(COLUMNS[:3])}, … {COLUMNS[-1]}, or any 40 in that order, "
            f"got {len(given)}: {', '.join(given[:5])}, …"
        )
    line = 0
    for number, batch in enumerate(file.iter_batches(PARQUET_ROWS, columns=names)):
        table = pa.Table.from_batches([batch]).select(names).rename_columns(list(COLUMNS))
        lines = line + 1 + np.arange(len(table))
        chunk = _checked(number, lines, table, bad)
        line += len(table)
        bad.seen = max(bad.seen, line)
        if chunk is not None:
            yield chunk


# --- both --------------------------------------------------------------------------------------------------------


def _checked(number: int, lines: NDArray[np.int64], table: pa.Table, bad: BadLines) -> Chunk | None:
    """The chunk of the rows whose label is 0 or 1, if any."""
    labels = _as_float(table, LABEL)
    fits = (labels == 0) | (labels == 1)
    bad.add(lines[~fits], "the label is not 0 or 1")
    if not fits.any():
        return None
    keep = slice(None) if fits.all() else fits
    numbers = np.stack([_as_float(table, name)[keep] for name in NUMBERS], axis=1)
    mask = None if fits.all() else pa.array(fits)
    categories = tuple(_as_bytes(table[name], mask) for name in CATEGORIES)
    return Chunk(number, lines[keep], labels[keep].astype(np.float32), numbers, categories)


def _as_float(table: pa.Table, name: str) -> NDArray[np.float64]:
    try:
        column = table[name].cast(pa.float64(), safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {name!r} must hold numbers, got {table[name].type}: {error}") from error
    values: NDArray[np.float64] = column.to_numpy()
    return values


def _as_bytes(column: pa.ChunkedArray, mask: Any) -> pa.Array:
    flat = column.combine_chunks()
    if pa.types.is_dictionary(flat.type):
        flat = flat.dictionary_decode()
    if not (pa.types.is_binary(flat.type) or pa.types.is_string(flat.type)):
        # whole numbers are hashed as their decimal digits
        flat = flat.cast(pa.string())
    flat = flat.cast(pa.binary()).fill_null(b"")
    return flat if mask is None else flat.filter(mask)
