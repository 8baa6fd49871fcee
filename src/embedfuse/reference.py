"""What every op means, in plain float64 loops: the judge of all backends.

Nothing here is fast, and nothing here is shared with a backend but the optimizers' `update`. Arrays are NumPy's; the
descriptors are those of `plan.py`; the terms are those of `torch/backends/__init__.py`.

`absolute=True` adds up the absolute values of the terms instead, which is what an error bound is made of.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .optim.base import Optimizer, apply_rule
from .plan import (
    COLUMN,
    DEFAULT_ID,
    DIM,
    DROP_NEGATIVE_IDS,
    DROP_NONPOSITIVE_WEIGHTS,
    FLAGS,
    FROZEN,
    MAX_NORM,
    MOMENT,
    OFFSET,
    POWER,
    ROW_BASE,
    ROWS,
    STRIDE,
    T_DIM,
    T_MAX_NORM,
    T_OFFSET,
    T_ROW_BASE,
    T_ROWS,
    T_RULE,
    T_SLOT0,
    T_SOURCE,
    number_of,
)

Array = NDArray[Any]


class Csr(NamedTuple):
    """The ids of a group: feature after feature, bag after bag; several records one behind the other."""

    ids: Array  # [N]
    offsets: Array  # [R * F * B + 1]
    weights: Array | None  # [N]
    bags: int  # B


class Update(NamedTuple):
    """What `row_update` needs beside the ids; the arrays are left as they are."""

    table: Array  # the arena, flat
    features: Array
    tables: Array
    rules: Sequence[type[Optimizer]]
    slots: Array  # flat
    hyper: Array  # [T, HYPER_WIDTH]
    steps: Array  # [T]
    grad_scale: float = 1.0
    skip: bool = False


class Term(NamedTuple):
    """One id that counts."""

    position: int  # in `ids`
    feature: Array  # its row of descriptors, int64 [FEATURE_WIDTH]
    id: int
    weight: float
    bag: int  # in `offsets`
    row: int  # of `out` and `grad`


def _all(features: Array, csr: Csr) -> Iterator[Term]:
    """Every id of the batch, in order."""
    for bag in range(len(csr.offsets) - 1):
        record, rest = divmod(bag, len(features) * csr.bags)
        number, place = divmod(rest, csr.bags)
        for position in range(int(csr.offsets[bag]), int(csr.offsets[bag + 1])):
            weight = 1.0 if csr.weights is None else float(csr.weights[position])
            yield Term(position, features[number], int(csr.ids[position]), weight, bag, record * csr.bags + place)


def terms(features: Array, csr: Csr) -> Iterator[Term]:
    """The ids that count, in order: inside their table, and of positive weight where the feature asks for it."""
    for term in _all(features, csr):
        dropped = term.feature[FLAGS] & DROP_NONPOSITIVE_WEIGHTS and not term.weight > 0
        if 0 <= term.id < term.feature[ROWS] and not dropped:
            yield term


def first_bad_id(features: Array, csr: Csr) -> int | None:
    """The first position of an id that is out of range, which is not a negative one where those are dropped."""
    for term in _all(features, csr):
        dropped = term.feature[FLAGS] & DROP_NEGATIVE_IDS and term.id < 0
        if not (0 <= term.id < term.feature[ROWS] or dropped):
            return term.position
    return None


def moments(features: Array, csr: Csr, absolute: bool = False) -> Array:
    """`M[bag] = Σ w**MOMENT`."""
    total = np.zeros(len(csr.offsets) - 1)
    for term in terms(features, csr):
        power = term.weight ** int(term.feature[MOMENT])
        total[term.bag] += abs(power) if absolute else power
    return total


def scales(features: Array, csr: Csr) -> Array:
    """`scale[bag] = M ** (-POWER / 2)`, 0 where M is 0; 1 where POWER is 0."""
    total = moments(features, csr)
    scale = np.ones(len(total))
    for bag in range(len(total)):
        power = int(features[bag // csr.bags % len(features), POWER])
        if power:
            scale[bag] = 0.0 if total[bag] == 0 else float(total[bag]) ** (-power / 2)
    return scale


def cut(row: Array, max_norm: float) -> Array:
    """The row, shortened to `max_norm` if it is longer."""
    length = math.sqrt(float(np.sum(row * row)))
    return row * (max_norm / length) if length > max_norm else row


def cut_gradient(g: Array, row: Array, max_norm: float, absolute: bool = False) -> Array:
    """The gradient of `row`, where `g` is that of `cut(row)`."""
    square = float(np.sum(row * row))
    if math.sqrt(square) <= max_norm:
        return g
    if absolute:
        row = np.abs(row)
    radial = row * float(np.sum(row * g)) / square
    turned: Array = (g + radial if absolute else g - radial) * (max_norm / math.sqrt(square))
    return turned


def _row(table: Array, term: Term) -> Array:
    start = int(term.feature[OFFSET]) + term.id * int(term.feature[STRIDE])
    return cut(table[start : start + int(term.feature[DIM])], number_of(term.feature[MAX_NORM]))


def _columns(feature: Array) -> slice:
    return slice(int(feature[COLUMN]), int(feature[COLUMN] + feature[DIM]))


def pooled_lookup(table: Array, features: Array, csr: Csr, width: int, absolute: bool = False) -> tuple[Array, Array]:
    """`out[b, columns] = scale[bag] * Σ w row(id)`, and all scales."""
    out = np.zeros((csr.bags, width))
    for term in terms(features, csr):
        value = term.weight * _row(table, term)
        out[term.row, _columns(term.feature)] += np.abs(value) if absolute else value
    scale = scales(features, csr)
    for bag in range(len(csr.offsets) - 1):
        number, row = divmod(bag, csr.bags)
        out[row, _columns(features[number])] *= abs(scale[bag]) if absolute else scale[bag]
    return out, scale


def _sums(features: Array, csr: Csr, scale: Array, grad: Array, absolute: bool = False) -> dict[int, Array]:
    """`Σ w * scale * grad[row, columns]` of every row in the batch, by its key. An empty `scale` is all ones."""
    sums: dict[int, Array] = {}
    for term in terms(features, csr):
        coefficient = term.weight * (scale[term.bag] if len(scale) else 1.0)
        value = coefficient * grad[term.row, _columns(term.feature)]
        key = int(term.feature[ROW_BASE]) + term.id
        sums[key] = sums.get(key, np.zeros(len(value))) + (np.abs(value) if absolute else value)
    return sums


def _owner(tables: Array, key: int) -> tuple[int, int]:
    """The table that a key belongs to, and the row in it."""
    number = next(n for n, t in enumerate(tables) if t[T_ROWS] and t[T_ROW_BASE] <= key < t[T_ROW_BASE] + t[T_ROWS])
    return number, key - int(tables[number][T_ROW_BASE])


def row_sums(
    table: Array, tables: Array, features: Array, csr: Csr, scale: Array, grad: Array, absolute: bool = False
) -> dict[tuple[int, int], Array]:
    """The gradient of every row in the batch, by the number of its table and its own: `_sums`, through the cut."""
    result = {}
    for key, value in _sums(features, csr, scale, grad, absolute).items():
        number, row = _owner(tables, key)
        max_norm = number_of(tables[number][T_MAX_NORM])
        if max_norm < np.inf:
            value = cut_gradient(value, table[_slice(tables[number], T_SOURCE, row, "element")], max_norm, absolute)
        result[number, row] = value
    return result


def row_grad(
    size: int, tables: Array, features: Array, csr: Csr, scale: Array, grad: Array, absolute: bool = False,
    table: Array | None = None,
) -> Array:  # fmt: skip
    """`row_sums`, each at its row's place in a flat array of `size` elements that is 0 elsewhere.

    `table` is what SOURCE counts from; it is read where rows are cut.
    """
    out = np.zeros(size)
    source = np.zeros(0) if table is None else table
    for (number, row), value in row_sums(source, tables, features, csr, scale, grad, absolute).items():
        out[_slice(tables[number], T_OFFSET, row, "element")] = value
    return out


def row_dots(table: Array, tables: Array, features: Array, csr: Csr, grad: Array, absolute: bool = False) -> Array:
    """`<row(id), grad[row, columns]>` of every id, 0 for those that do not count: the gradient of plain weights.

    `table` is what SOURCE counts from: rows are read where `row_grad` reads them, not where features do.
    """
    out = np.zeros(len(csr.ids))
    for term in terms(features, csr):
        number, row = _owner(tables, int(term.feature[ROW_BASE]) + term.id)
        looked_up = cut(table[_slice(tables[number], T_SOURCE, row, "element")], number_of(tables[number][T_MAX_NORM]))
        products = looked_up * grad[term.row, _columns(term.feature)]
        out[term.position] = np.sum(np.abs(products) if absolute else products)
    return out


def row_square_sum(update: Update, csr: Csr, scale: Array, grad: Array) -> float:
    """`Σ ||g[row]||²` over the rows of tables that learn; `grad_scale` and `skip` play no part."""
    sums = row_sums(update.table, update.tables, update.features, csr, scale, grad)
    return sum(float(np.sum(g * g)) for (table, _), g in sums.items() if update.tables[table, T_RULE] != FROZEN)


def row_update(update: Update, csr: Csr, scale: Array, grad: Array) -> tuple[Array, Array]:
    """The arena and the slots after one step: `apply_rule` once for every row in the batch, with `g * grad_scale`."""
    table, slots = update.table.copy(), update.slots.copy()
    if update.skip:
        return table, slots
    for (number, row), g in row_sums(table.copy(), update.tables, update.features, csr, scale, grad).items():
        described = update.tables[number]
        if described[T_RULE] == FROZEN:
            continue
        rule = update.rules[int(described[T_RULE])]
        weight = table[_slice(described, T_OFFSET, row, "element")]
        state = [slots[_slice(described, T_SLOT0 + i, row, kind)] for i, kind in enumerate(rule.slot_kinds)]
        step = int(update.steps[number])
        rows = tuple(array[None] for array in state)
        new, new_state = apply_rule(
            rule, weight[None], g[None] * update.grad_scale, rows, update.hyper[number], step, np
        )
        weight[:] = new[0]
        for old, value in zip(state, new_state, strict=True):
            old[:] = value[0]
    return table, slots


def _slice(described: Array, column: int, row: int, kind: str) -> slice:
    """The elements of one row of a table, or of one of its slots, whose start is in `column`."""
    width = int(described[T_DIM]) if kind == "element" else 1
    start = int(described[column]) + row * width
    assert 0 <= row < described[T_ROWS]
    return slice(start, start + width)


def coefficient_grad(
    table: Array, features: Array, csr: Csr, scale: Array, grad: Array, absolute: bool = False
) -> Array:
    """The gradient of `Σ out * grad` with respect to each weight, where `out` is what `pooled_lookup` gives.

    `out = M^(-q/2) Σ w row`, so `d out / d w_i = scale * row_i - (q/2) * dM/dw_i / M * scale * Σ w row`.
    """
    dots = np.zeros(len(csr.ids))
    pooled_dots = np.zeros(len(csr.offsets) - 1)
    counted = list(terms(features, csr))
    for term in counted:
        products = _row(table, term) * grad[term.row, _columns(term.feature)]
        dots[term.position] = np.sum(np.abs(products) if absolute else products)
        weight = abs(term.weight) if absolute else term.weight
        pooled_dots[term.bag] += weight * dots[term.position]
    total = moments(features, csr)
    out = np.zeros(len(csr.ids))
    for term in counted:
        factor = float(scale[term.bag]) if len(scale) else 1.0
        moment, power = int(term.feature[MOMENT]), int(term.feature[POWER])
        first, second = factor * dots[term.position], 0.0
        if power and moment and total[term.bag]:
            slope = moment * term.weight ** (moment - 1)
            second = -power / 2 * slope / total[term.bag] * factor * pooled_dots[term.bag]
        out[term.position] = abs(first) + abs(second) if absolute else first + second
    return out


def max_lookup(table: Array, features: Array, csr: Csr, width: int) -> tuple[Array, Array]:
    """`out[b, columns] = max_i w_i row(id_i)` elementwise, and the position in `ids` each element came from.

    The first of equal values wins, and the first NaN over all numbers. An empty bag gives 0 and position -1.
    """
    out = np.zeros((csr.bags, width))
    winners = np.full((csr.bags, width), -1)
    for term in terms(features, csr):
        for lane, element in enumerate(_row(table, term)):
            value, place = term.weight * float(element), (term.row, int(term.feature[COLUMN]) + lane)
            nan_wins = math.isnan(value) and not math.isnan(out[place])
            if winners[place] < 0 or value > out[place] or nan_wins:
                out[place], winners[place] = value, term.position
    return out, winners


def max_grad(size: int, features: Array, csr: Csr, winners: Array, grad: Array, absolute: bool = False) -> Array:
    """The gradient of `Σ out * grad` with respect to the tables: `w * grad` for each element that won."""
    out = np.zeros(size)
    for term in terms(features, csr):
        for lane in range(int(term.feature[DIM])):
            column = int(term.feature[COLUMN]) + lane
            if winners[term.row, column] == term.position:
                value = term.weight * float(grad[term.row, column])
                start = int(term.feature[OFFSET]) + term.id * int(term.feature[STRIDE])
                out[start + lane] += abs(value) if absolute else value
    return out


class Prepared(NamedTuple):
    """See `Prepared` in `torch/backends/__init__.py`."""

    rows: Array
    starts: Array | None
    offsets: Array
    weights: Array | None
    places: Array


def prepare_ids(
    features: Array, csr: Csr, shards: Array | None = None, modulo: bool = False, stride: int = 0
) -> Prepared:
    """Every bag with one id more: its default if nothing else is left of it. Shards are `[P, 3]`, see `Shards`."""
    counted = {term.position: term.id for term in terms(features, csr)}
    if shards is not None:
        counted = {at: number for at, number in counted.items() if _start(number, shards, modulo, stride)[0] >= 0}
    rows: list[int] = []
    weights: list[float] = []
    places: list[int] = []
    for bag in range(len(csr.offsets) - 1):
        positions = range(int(csr.offsets[bag]), int(csr.offsets[bag + 1]))
        default = int(features[bag // csr.bags % len(features), DEFAULT_ID])
        for position in positions:
            places.append(len(rows))
            rows.append(counted.get(position, -1))
            weights.append(1.0 if csr.weights is None else float(csr.weights[position]))
        empty = not any(position in counted for position in positions)
        rows.append(default if empty else -1)
        weights.append(1.0 if empty and default >= 0 else 0.0)
    starts = None
    if shards is not None:
        found = [_start(row, shards, modulo, stride) for row in rows]
        rows, starts = [row for row, _ in found], np.array([start for _, start in found], np.int64)
    offsets = csr.offsets + np.arange(len(csr.offsets))
    return Prepared(
        np.array(rows, np.int64), starts, offsets, None if csr.weights is None else np.array(weights),
        np.array(places, np.int64),
    )  # fmt: skip


def _start(number: int, shards: Array, modulo: bool, stride: int) -> tuple[int, int]:
    """The row, counted shard after shard, and where it starts."""
    if number < 0:
        return -1, -1
    if modulo:
        shard, row = number % len(shards), number // len(shards)
    else:
        shard = next(n for n, (first, rows, _) in enumerate(shards) if first <= number < first + rows)
        row = number - int(shards[shard][0])
    first, rows, start = (int(value) for value in shards[shard])
    return (first + row, start + row * stride) if row < rows else (-1, -1)
