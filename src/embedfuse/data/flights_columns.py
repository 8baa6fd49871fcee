"""The columns of the flights: ids of categories, where an aircraft has been, and numbers. Only what is scheduled."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .schema import Floats, Ragged

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

Whole = NDArray[np.int64]

HISTORY_LENGTH = 8
HISTORY_DECAY = 0.7
RARE = 5
"""A category seen on fewer training flights than this is read as unknown, which is how row 0 of a table learns."""

WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
FLAGGED = ("seats", "plane_age", "temp", "pressure")
"""Numbers missing often enough that being missing may mean something."""
FASTEST_WIND = 120.0
"""Miles an hour; the data holds one reading of 1048."""
DAY = 1440
LONGEST_PAUSE = 7 * DAY


@dataclass(frozen=True)
class Tables:
    """The three tables this needs, as pandas frames."""

    flights: "pd.DataFrame"
    weather: "pd.DataFrame"
    planes: "pd.DataFrame"


@dataclass(frozen=True)
class Past:
    """What the schedule says of each flight's aircraft before that flight."""

    airports: Ragged
    pause: NDArray[np.float64]  # minutes since its last scheduled departure, a week at most
    today: Whole  # its scheduled departures since midnight


def encode(values: "pd.Series[Any]", learning: NDArray[np.bool_]) -> tuple[NDArray[np.int32], int]:
    """Ids of a column: 0 for unknown, missing or rare ones, then the training categories in sorted order.

    Returns:
        The ids, and the number of rows a table of them needs.
    """
    counts = values[learning].value_counts()
    kept = np.sort(counts.index[counts >= RARE].to_numpy())
    column = values.astype("category").cat
    # one more, for the code -1 of a missing value
    table = np.zeros(len(column.categories) + 1, np.int32)
    table[column.categories.get_indexer(kept)] = np.arange(1, len(kept) + 1)
    return table[column.codes.to_numpy()], len(kept) + 1


def past_of(tail: NDArray[Any], departure: Whole, airport: NDArray[np.int32]) -> Past:
    """For each flight, what its aircraft was scheduled to do at strictly earlier minutes.

    Args:
        tail: number of the aircraft, -1 if unknown, which has no past.
        departure: scheduled minute since the first midnight.
        airport: id of the destination.

    Returns:
        `airports` holds the up to 8 destinations before, latest first, the `k`-th weighing `0.7 ** k`.
    """
    order = np.lexsort((departure, tail))
    tails, times, place = tail[order], departure[order], np.arange(len(order))
    new_tail = np.r_[True, tails[1:] != tails[:-1]]
    new_time = new_tail | np.r_[True, times[1:] != times[:-1]]
    new_day = new_tail | np.r_[True, times[1:] // DAY != times[:-1] // DAY]
    first, end, dawn = (np.maximum.accumulate(np.where(new, place, 0)) for new in (new_tail, new_time, new_day))
    earlier = np.where(tails < 0, 0, end - first)
    offsets = np.zeros(len(order) + 1, np.int64)
    np.cumsum(np.minimum(earlier, HISTORY_LENGTH), out=offsets[1:])
    lengths = np.diff(offsets)
    back = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    ids = airport[order][np.repeat(end, lengths) - 1 - back]
    pause = np.where(earlier > 0, times - times[end - 1], LONGEST_PAUSE)
    today = np.where(tails < 0, 0, end - np.minimum(dawn, end))
    inverse = np.empty_like(order)
    inverse[order] = place
    airports = Ragged(ids, offsets, (HISTORY_DECAY**back).astype(np.float32)).take(inverse)
    return Past(airports, np.minimum(pause, LONGEST_PAUSE)[inverse].astype(np.float64), today[inverse])


def crowd(*columns: "pd.Series[Any]") -> Whole:
    """How many flights are scheduled with the same values of these columns, for each flight."""
    numbers = [column.astype("category").cat.codes.to_numpy().astype(np.int64) for column in columns]
    key = np.zeros(len(numbers[0]), np.int64)
    for number in numbers:
        key = key * (number.max() + 1) + number
    _, place, counts = np.unique(key, return_inverse=True, return_counts=True)
    return counts[place]


def numbers(tables: Tables, past: Past, learning: NDArray[np.bool_]) -> tuple[Floats, tuple[str, ...]]:
    """Numeric columns, standardised by the training flights; a missing value becomes the mean, some also set a flag."""
    values = {**_schedule(tables.flights, past), **_aircraft(tables), **_weather(tables)}
    table = np.stack([np.asarray(column, np.float64) for column in values.values()], axis=1)
    missing = np.isnan(table)
    mean, deviation = _moments(table[learning])
    table = np.where(missing, 0.0, (table - mean) / deviation)
    flagged = [list(values).index(name) for name in FLAGGED]
    names = (*values, *(f"{name}_missing" for name in FLAGGED))
    return np.concatenate([table, missing[:, flagged]], axis=1).astype(np.float32), names


def _moments(table: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of each column over what is there; 0 and 1 for a column that says nothing."""
    there = ~np.isnan(table)
    count = np.maximum(there.sum(axis=0), 1)
    mean = np.where(there, table, 0.0).sum(axis=0) / count
    deviation = np.sqrt(np.where(there, (table - mean) ** 2, 0.0).sum(axis=0) / count)
    return mean, np.where(deviation > 0, deviation, 1.0)


def _schedule(flights: "pd.DataFrame", past: Past) -> dict[str, Any]:
    leaves = flights["hour"] * 60 + flights["minute"]
    arrives = flights["sched_arr_time"] // 100 * 60 + flights["sched_arr_time"] % 100
    turn = 2 * np.pi / DAY
    return {
        "log_distance": np.log(flights["distance"]),
        "minute_sine": np.sin(turn * leaves),
        "minute_cosine": np.cos(turn * leaves),
        "arrival_sine": np.sin(turn * arrives),
        "arrival_cosine": np.cos(turn * arrives),
        # in local times of two places, so the route's hours of time difference are in it
        "scheduled_minutes": (arrives - leaves) % DAY,
        "leaving_this_hour": crowd(flights["time_hour"]),
        "leaving_here_this_hour": crowd(flights["time_hour"], flights["origin"]),
        "leaving_here_of_carrier": crowd(flights["time_hour"], flights["origin"], flights["carrier"]),
        "log_pause": np.log(np.maximum(past.pause, 30.0)),
        "flights_today": np.minimum(past.today, 5),
    }


def _aircraft(tables: Tables) -> dict[str, Any]:
    planes = tables.planes[["tailnum", "year", "seats"]].drop_duplicates("tailnum")
    plane = tables.flights[["tailnum"]].merge(planes, on="tailnum", how="left")
    return {"seats": plane["seats"], "plane_age": tables.flights["year"] - plane["year"]}


def _weather(tables: Tables) -> dict[str, Any]:
    readings = tables.weather[["origin", "time_hour", "wind_dir", *WEATHER]].drop_duplicates(["origin", "time_hour"])
    hour = tables.flights[["origin", "time_hour"]].merge(readings, on=["origin", "time_hour"], how="left")
    hour["wind_speed"] = hour["wind_speed"].where(hour["wind_speed"] < FASTEST_WIND)
    # no reading means no gust, not an unknown one
    hour["wind_gust"] = hour["wind_gust"].fillna(hour["wind_speed"])
    hour["precip"] = np.log1p(100 * hour["precip"])
    direction = np.deg2rad(hour["wind_dir"].astype(float))
    return {
        **{name: hour[name] for name in WEATHER},
        "wind_north": np.cos(direction) * hour["wind_speed"],
        "wind_east": np.sin(direction) * hour["wind_speed"],
    }
