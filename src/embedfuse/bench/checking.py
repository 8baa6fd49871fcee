"""Is it right? Each provider is compared with a float64 computation before its speed may be measured.

The bound of an error follows from the storage type, the accumulation in float32 and the number of terms, as in the
tests; it is the same for all providers. (With 16-bit tables some sum, and keep state, in 16 bits. That is called coarse
if it is right within the rounding of those, and is timed; ours must be right by the stricter measure.) Two steps are
checked, so that the state of the first matters to the second.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..optim.base import apply_rule
from .batches import Batch, Workload
from .providers import PHASES, Provider
from .rules import rule_of

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
SUM_UNIT = 2.0**-24
ROUNDINGS, RULE_ROUNDINGS, STEPS = 8, 32, 2
ROWS_AT_ONCE = 1 << 17
SOME_ROWS = 1000


@dataclass(frozen=True)
class Expected:
    """What the right answer is, and how far from it one may be."""

    output: Tensor  # float64 [B, width]
    output_bound: Tensor
    rows: list[Tensor]  # of each table: those of the batch
    after: list[Tensor]  # float64, after the steps
    after_bound: list[Tensor]
    weight_grad: Tensor | None
    weight_bound: Tensor | None


def wrong(provider: Provider, work: Workload, expected: Expected) -> str | None:
    """None if the provider is right, else what is not. Leaves it two steps on."""
    batch = work.batches[0]
    reason = _excess("forward", provider.output(batch), expected.output, expected.output_bound)
    if reason or "train" not in provider.phases:
        return reason
    for step in (batch, work.again)[:STEPS]:
        provider.train(step)
    for number, ids in enumerate(expected.rows):
        after, bound = expected.after[number], expected.after_bound[number]
        reason = _excess(f"table {number} after {STEPS} steps", provider.rows(number, ids), after, bound)
        reason = reason or _moved(provider, work, number, ids)
        if reason:
            return reason
    if expected.weight_grad is not None and expected.weight_bound is not None:
        found = provider.weight_grad()
        if found is None:
            return "no gradient of the weights"
        return _excess("gradient of weights", found, expected.weight_grad, expected.weight_bound)
    return None


def measured_phases(provider: Provider) -> list[str]:
    """Those of `PHASES` first, then its own."""
    return [p for p in PHASES if p in provider.phases] + [p for p in provider.phases if p not in PHASES]


def _excess(what: str, actual: Tensor, expected: Tensor, bound: Tensor) -> str | None:
    actual = actual.to(expected.device, torch.float64)
    if actual.shape != expected.shape:
        return f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    bad = ~((actual - expected).abs() <= bound)
    if not bool(bad.any()):
        return None
    ratio = torch.where(bad, (actual - expected).abs() / bound, 0).nan_to_num(math.inf)
    place = int(ratio.argmax())
    found, right, allowed = (float(t.reshape(-1)[place]) for t in (actual, expected, bound))
    return f"{what}: {int(bad.sum())} of {bad.numel()} wrong, e.g. {found:.9g} for {right:.9g} ± {allowed:.2g}"


def _moved(provider: Provider, work: Workload, number: int, touched: Tensor) -> str | None:
    """Rows that were not looked up must not change: a sample of them."""
    table = work.weights[number]
    some = torch.linspace(0, len(table) - 1, min(len(table), SOME_ROWS), device=table.device).long()
    some = some[~torch.isin(some, touched)]
    if torch.equal(provider.rows(number, some).to(table.device, table.dtype), table[some]):
        return None
    return f"table {number}: rows that were not looked up have changed"


def _roundings(terms: Tensor) -> Tensor:
    """Units in the last place that a sum of so many terms may be wrong by."""
    return torch.minimum(terms, 4 * terms.sqrt()) + ROUNDINGS


def expect(work: Workload, unit: float = SUM_UNIT) -> Expected:
    """Computes the answer in float64, table by table; `unit` is the error allowed for one rounding within a sum."""
    case, batch, device = work.case, work.batches[0], work.device
    output = torch.zeros(case.bags, case.width, dtype=torch.float64, device=device)
    bound = torch.zeros_like(output)
    made: list[tuple[Tensor, Tensor, Tensor]] = []
    slopes: list[Tensor] = []
    slope_bounds: list[Tensor] = []
    for number, place, columns, offsets in work.features(batch):
        ids, lengths, table = batch.ids[place].long(), offsets.diff(), work.weights[number]
        bag = torch.repeat_interleave(lengths, output_size=len(ids))
        weights = torch.ones(len(ids), dtype=torch.float64, device=device)
        if batch.weights is not None:
            # as the providers are given them: those of torch have the type of the table
            weights = batch.weights[place].double()
        coefficients = weights / lengths[bag] if case.combiner == "mean" else weights
        magnitude = torch.zeros(case.bags, case.dims[number], dtype=torch.float64, device=device)
        for part in _parts(len(ids)):
            terms = table[ids[part]].double() * coefficients[part, None]
            output[:, columns].index_add_(0, bag[part], terms)
            magnitude.index_add_(0, bag[part], terms.abs())
        right = output[:, columns]
        bound[:, columns] = _stored(right, case.dtype) + _roundings(lengths.double())[:, None] * unit * magnitude
        made.append(_steps(work, number, ids, bag, coefficients, unit))
        if case.weights == "learned":
            # of the second step, whose rows are those after the first
            slope, allowed = _weight_slopes(work, number, ids, bag, unit)
            slopes.append(slope)
            slope_bounds.append(allowed)
    return Expected(
        output, bound, [rows for rows, _, _ in made], [after for _, after, _ in made],
        [allowed for _, _, allowed in made], torch.cat(slopes) if slopes else None,
        torch.cat(slope_bounds) if slopes else None,
    )  # fmt: skip


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + ROWS_AT_ONCE) for start in range(0, count, ROWS_AT_ONCE))


def _stored(values: Tensor, dtype: str) -> Tensor:
    return UNIT[dtype] * values.abs() + SMALLEST[dtype]


def _columns(work: Workload, number: int) -> slice:
    start = sum(work.case.dims[:number])
    return slice(start, start + work.case.dims[number])


def _steps(
    work: Workload, number: int, ids: Tensor, bag: Tensor, coefficients: Tensor, unit: float, steps: int = STEPS
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of the batch after the checked steps: which, what they become, and the error allowed."""
    case, rule = work.case, rule_of(work.case.optimizer)
    kind, hyper = rule.kernel_class(), rule.hyper(rule.current_learning_rate())
    rows, run = ids.unique(return_inverse=True)
    w = work.weights[number][rows].double()
    allowed = torch.zeros_like(w)
    slots = tuple(
        torch.full(
            (len(rows), w.shape[1] if slot.per == "element" else 1), slot.initial, dtype=w.dtype, device=w.device
        )
        for slot in rule.slots()
    )
    terms = _roundings(torch.bincount(run, minlength=len(rows)).double())[:, None]
    for step, batch in enumerate((work.batches[0], work.again)[:steps], 1):
        grad, magnitude = torch.zeros_like(w), torch.zeros_like(w)
        upstream = batch.grad[:, _columns(work, number)]
        for part in _parts(len(ids)):
            own = upstream[bag[part]].double() * coefficients[part, None]
            grad.index_add_(0, run[part], own)
            magnitude.index_add_(0, run[part], own.abs())
        error = terms * unit * magnitude
        at = torch.tensor(step, device=w.device)
        new, new_slots = apply_rule(kind, w, grad, slots, hyper, at, torch)
        spread = torch.zeros_like(w)
        for shifted in (grad + error, grad - error):
            other, _ = apply_rule(kind, w, shifted, slots, hyper, at, torch)
            spread = torch.maximum(spread, (other - new).abs())
        inside = RULE_ROUNDINGS * unit * (w.abs() + new.abs() + (new - w).abs().max())
        # half the spacing above, since the rounding of the first step may fall to the other side
        allowed = allowed + 2 * spread + inside + step * _stored(new, case.dtype)
        w, slots = new, new_slots
    return rows, w, allowed


def _weight_slopes(work: Workload, number: int, ids: Tensor, bag: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """The gradient of each id's weight in the second step."""
    batch: Batch = work.batches[0]
    place = slice(batch.starts[number], batch.starts[number + 1])
    assert batch.weights is not None
    rows, w, allowed = _steps(work, number, ids, bag, batch.weights[place].double(), unit, steps=1)
    run = torch.searchsorted(rows, ids)
    upstream = work.again.grad[:, _columns(work, number)]
    found, bounds = [], []
    for part in _parts(len(ids)):
        grad = upstream[bag[part]].double()
        terms = w[run[part]] * grad
        found.append(terms.sum(1))
        dim = torch.tensor(float(terms.shape[1]), dtype=torch.float64, device=terms.device)
        rounding = _roundings(dim) * unit * terms.abs().sum(1) + (allowed[run[part]] * grad.abs()).sum(1)
        bounds.append(rounding + SMALLEST["float32"])
    return torch.cat(found), torch.cat(bounds)
