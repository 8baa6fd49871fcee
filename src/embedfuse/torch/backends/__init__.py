"""Backends: who computes an op. Each is one file that fills in `Backend`; this one chooses.

`"auto"` (the default) takes the first of `triton`, `cpu`, `eager` that serves the tensors at hand. A backend asked for
by name works or raises its reason. `EMBEDFUSE_BACKEND` in the environment names the one to start with.
"""

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ...optim.base import Optimizer

Policy = Literal["raise", "drop", "ignore"]
Name = Literal["auto", "triton", "cpu", "eager"]
NAMES = ("triton", "cpu", "eager")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type sums are made in: float64 for float64 tables, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Csr(NamedTuple):
    """The ids of all features of a group, feature after feature, and within a feature bag after bag.

    Bag number `(r * F + f) * bags + b` is bag `b` of feature `f` in record `r`; it owns positions
    `offsets[bag] .. offsets[bag + 1]` of `ids`. There is one record, except in an update that joins several lookups;
    its gradient rows are then stacked: bag `b` of record `r` has gradient row `r * bags + b`.
    """

    ids: Tensor  # int32 or int64 [N]
    offsets: Tensor  # int64 [R * F * B + 1], from 0 to N, not decreasing
    weights: Tensor | None  # float32 (float64 for float64 tables) [N]
    bags: int  # B


class BadId(IndexError):
    """An id is outside its table; `position` counts in the `ids` of the whole group."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the id at position {position} is outside its table")
        self.position = position


class Rows(NamedTuple):
    """Where rows can be read: for the gradient of cutting them to a length (MAX_NORM), and for that of weights."""

    table: Tensor  # what SOURCE in `tables` counts from; of the type the sums are written in
    tables: Tensor  # int64 [T, TABLE_WIDTH]; OFFSET is where the sums are written


class Shards(NamedTuple):
    """One table whose rows lie in several tensors of one device. Its rows are numbered shard after shard.

    An id whose row would be beyond the end of its shard is out of range like any other.
    """

    described: Tensor  # int64 [P, 3]: rows of the shards before; rows; where it starts, from a common base
    modulo: bool  # id `i` is row `i // P` of shard `i % P`; else ids number the rows shard after shard
    stride: int  # from one row to the next, in the unit of the starts


class Prepared(NamedTuple):
    """What `prepare_ids` made: ids that need no more checking, with a place for a default in every bag."""

    rows: Tensor  # int64 [N + R * F * B]: the row of each id that counts, -1 for the others
    starts: Tensor | None  # as rows: where the row starts, -1 if none does, if there are shards
    offsets: Tensor  # int64 [R * F * B + 1]
    weights: Tensor | None  # as rows
    places: Tensor  # int64 [N]: where each of the ids given went


@dataclass
class Update:
    """All that one update pass needs beside the ids. Tensors marked `!` are written."""

    table: Tensor  # ! the arena, or the tensor the descriptors' offsets count from
    features: Tensor  # int64 [F, FEATURE_WIDTH], see plan.py
    tables: Tensor  # int64 [T, TABLE_WIDTH]
    rules: Sequence[type[Optimizer]]  # T_RULE is a position in this list, or FROZEN
    slots: Tensor  # ! float32 (float64 for float64 tables), flat
    hyper: Tensor  # float64 [T, HYPER_WIDTH]
    steps: Tensor  # int64 [T]: number of the step being made, from 1
    grad_scale: Tensor | None = None  # float32 scalar the gradient is multiplied by
    skip: Tensor | None = None  # float32 scalar: if not 0, nothing is written
    counted: Tensor | None = None  # int64 [T]: what `row_update` is to add to `steps` first, if nothing is skipped
    at_random: bool = True  # False: no table rounds stochastically, whose seed in `hyper` need not be read
    # what a backend keeps for updates of the same features, tables and rules
    programs: list[Any] | None = None


def count(update: Update) -> None:
    """Adds to the step counters what `row_update` is to add."""
    if update.counted is not None:
        update.steps += update.counted if update.skip is None else update.counted * (update.skip == 0)


class Backend(Protocol):
    """The ops a backend implements. `features` and all tensors are on one device; `grad` may have any strides.

    Validity of an id, the same in every op (flags are per feature): a negative id or one ≥ ROWS is absent (it is out of
    range unless it is negative and DROP_NEGATIVE_IDS is set); with DROP_NONPOSITIVE_WEIGHTS an id whose weight is not
    > 0 (a NaN is not) is absent. An absent id adds nothing, counts in no moment, trains no row, and has gradient 0 for
    its weight.
    """

    name: str

    # A row longer than MAX_NORM is cut to that length, in every op, before its weight: `row(id) = c * e` with
    # `c = MAX_NORM / ||e||` (the length in the accumulation type) where `||e|| > MAX_NORM`, else 1. Its gradient is
    # the true one: `c * (g - e * <e, g> / ||e||²)`, made once for the sum `g` of a row's contributions, before all
    # that is done with the sum. (Tables read by max pooling have no MAX_NORM; `max_grad` knows no cut.)

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """None if tables of this kind are served, else the reason why not."""
        ...

    def pooled_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, normalised: bool, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """`out[b, COLUMN:COLUMN+DIM] = scale[bag] * Σ w_i row(id_i)`; returns `out [B, width]`, `scale [F * B]`.

        `out` has the table's dtype, rounded once. `scale` is float32 (float64 for float64 tables); empty (`[0]`)
        when not `normalised`, meaning all ones; in an update it is `[R * F * B]`. Raises `BadId` for
        `policy="raise"` where that needs no synchronisation; "drop" and "ignore" treat bad ids as absent.
        """
        ...

    def row_update(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> None:
        """One optimizer step of every row in the batch, in place; before, `steps += counted` if that is given.

        `g[row] = Σ w_i * scale[bag_i] * grad[row_of(bag_i), columns of the feature]`, summed over all duplicates and
        features in a fixed order, then `apply_rule`, then rounding to the table's type (`rounding.py`). Tables with
        FROZEN are left alone. `grad` is `[R * B, width]`. One step a row, of rows in the batch only: other orders of
        stepping (`use_gradient_accumulation=False`, dense optimizers) are made of this by the front
        (`torch/update.py`).
        """
        ...

    def row_grad(
        self, out: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor, rows: Rows | None = None,
        dots: Tensor | None = None, fill: bool = False,
    ) -> None:  # fmt: skip
        """The same sums, put in `out` at OFFSET + id * DIM; `out` is flat, of the table's dtype, zero on entry.

        With `fill` it may hold anything on entry, and what no id names is set to 0.

        `rows` must be given if any table has a MAX_NORM. Its descriptors then say which key (ROW_BASE + id) belongs to
        which table and where that row goes; there may be more tables than the features name (shards of one).

        `dots` `[N]` of the accumulation dtype, zero on entry, gets the gradient of each weight as well, as
        `coefficient_grad` gives it for an empty `scale` (and `scale` must be empty): `<row(id_i), grad of its bag>`.
        Each row is read once for all of its ids, from `rows`, which must be given.
        """
        ...

    def sparse_row_grad(
        self, features: Tensor, tables: Tensor, source: Tensor, csr: Csr, scale: Tensor, grad: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """The same sums as lists: for each table the rows in the batch, ascending int64 `[U]`, and their sums
        `[U, DIM]`, in the accumulation type or the tables'. How many there are is known to the host afterwards.

        `source` is what SOURCE counts from, of the tables' type.
        """
        ...

    def join_offsets(self, offsets: Tensor) -> Tensor:
        """The offsets of each feature `[F, B + 1]`, all from 0, as those of all ids, `[F * B + 1]`."""
        ...

    def prepare_ids(self, features: Tensor, csr: Csr, shards: Shards | None, policy: Policy) -> Prepared:
        """The validity of all ids, decided once; one id more in every bag; the shard of each id.

        Bag `k` of all bags gets the places `offsets[k] + k .. offsets[k + 1] + k` inclusive: its own ids in order, -1
        for those that are absent, and last its default: DEFAULT_ID with weight 1 if no id of the bag counts and the
        feature has one, else -1 with weight 0. With `shards` there is one feature, whose ROWS is that of all shards.
        Raises `BadId` (a position in `csr.ids`) like `pooled_lookup`.
        """
        ...

    def row_square_sum(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        """`Σ_rows ||g[row]||²` of the tables that learn, a float32 (or float64) scalar; for clipping by norm.

        Of the gradients as they are: `grad_scale` and `skip` play no part.
        """
        ...

    def coefficient_grad(self, table: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        """Gradient of the loss with respect to each weight, `[N]` of the accumulation dtype.

        With `s_i = <row(id_i), grad of its bag>`: `scale * s_i`, and for a feature with POWER ≠ 0 and MOMENT p ≠ 0 also
        `- (POWER / 2) * p * w_i**(p-1) / M * scale * Σ_j w_j s_j` where `M = Σ w**p` (0 where M is 0).
        """
        ...

    def max_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """The largest `w_i row(id_i)` of each bag, column by column: `out [B, width]`, and `winners` int64 `[B,
        width]`.

        `winners` are positions in `ids`, the first among equals, the first NaN before numbers; -1, with 0 in `out`, for
        a bag without ids.
        """
        ...

    def max_grad(self, out: Tensor, features: Tensor, csr: Csr, winners: Tensor, grad: Tensor) -> None:
        """Adds each element of `grad` to the element of the row that won it; `out` as in `row_grad`."""
        ...


@cache
def load(name: str) -> Backend:
    """The backend of that name; raises ImportError with the reason if its code cannot be imported."""
    if name not in NAMES:
        raise ValueError(f"`backend` must be one of {', '.join(NAMES)} or auto, got {name!r}")
    backend: Backend = importlib.import_module(f"{__name__}.{name}").BACKEND
    return backend


def why_not(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """None if the backend serves tables of `dtype` on `device`, else the reason."""
    try:
        return load(name).supports(device, dtype)
    except (ImportError, NotImplementedError) as error:
        return str(error)


_chosen: str = os.environ.get("EMBEDFUSE_BACKEND", "auto")


@contextlib.contextmanager
def _restoring(previous: str) -> Iterator[None]:
    global _chosen
    try:
        yield
    finally:
        _chosen = previous


def use_backend(name: Name) -> contextlib.AbstractContextManager[None]:
    """Chooses the backend of every op from here on; as a `with` statement, until its end.

    Args:
        name: `"triton"`, `"cpu"`, `"eager"`, or `"auto"` for the first of them that serves the tensors at hand.

    Raises:
        ValueError: unknown name.
        NotImplementedError: the backend cannot serve this machine at all, with the reason.
    """
    global _chosen
    if name != "auto":
        if name not in NAMES:
            raise ValueError(f"`name` must be one of auto, {', '.join(NAMES)}, got {name!r}")
        reasons = [why_not(name, device) for device in _devices()]
        if all(reasons):
            raise NotImplementedError(f"backend {name!r} cannot serve here: {reasons[0]}")
    previous, _chosen = _chosen, name
    return _restoring(previous)


def chosen() -> str:
    """The name that `use_backend` or the environment chose."""
    return _chosen


def select(device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend for tables of `dtype` on `device`; raises NotImplementedError if the chosen one cannot serve."""
    if _chosen != "auto":
        if _chosen not in NAMES:
            # `use_backend` lets no such name pass
            raise ValueError(
                f"the environment variable EMBEDFUSE_BACKEND must be one of auto, {', '.join(NAMES)}, got {_chosen!r}"
            )
        reason = why_not(_chosen, device, dtype)
        if reason:
            raise NotImplementedError(f"backend {_chosen!r} cannot serve {dtype} tables on {device}: {reason}")
        return load(_chosen)
    return _first(device, dtype)


@cache
def _first(device: torch.device, dtype: torch.dtype) -> Backend:
    for name in NAMES:
        # Triton's interpreter can serve a CPU too, but it is for tests, thousands of times slower
        if why_not(name, device, dtype) is None and not (name == "triton" and device.type == "cpu"):
            return load(name)
    raise NotImplementedError(f"no backend serves {dtype} tables on {device}")


def _devices() -> list[torch.device]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.insert(0, torch.device("cuda"))
    return devices


def backends() -> dict[str, str | None]:
    """Every backend, and None if it is usable on this machine or else the reason why not."""
    found: dict[str, str | None] = {}
    for name in NAMES:
        reasons = [why_not(name, device) for device in _devices()]
        found[name] = None if None in reasons else reasons[0]
    return found
