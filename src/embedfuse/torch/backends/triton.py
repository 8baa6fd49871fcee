"""The Triton backend: launches the kernels of `embedfuse/kernels` on CUDA tensors.

No op waits for the device, and the number of launches does not depend on the number of tables, features, bags or ids
(once for each distinct optimizer rule). Every sum is made in a fixed order, so results repeat bit for bit.

With TRITON_INTERPRET=1 in the environment before the first import, the same kernels run on CPU tensors, slowly, for
tests.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels import configs
from ...kernels.coefficient_grad import coefficient_grad_kernel
from ...kernels.max_lookup import max_kernel
from ...kernels.pooled_lookup import pooled_long_kernel, pooled_short_kernel
from ...kernels.prepare_ids import prepare_ids_kernel
from ...kernels.row_update import fold_kernel, join_kernel, long_kernel, segments_kernel
from ...optim.base import Optimizer
from ...plan import FROZEN
from . import BadId, Csr, Policy, Prepared, Rows, Shards, Update, device_errors
from .descriptor_facts import TableFacts, alignment, feature_facts, known_columns, table_facts
from .launching import launch
from .sorted_runs import SortedRuns, ceil_div, sorted_runs

try:
    import triton
except ImportError as error:
    raise ImportError(
        f"backend 'triton' needs Triton, which cannot be imported here ({error}): pip install 'embedfuse[triton]'"
    ) from error

INTERPRETED = not isinstance(pooled_long_kernel, triton.JITFunction)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STEP_ROWS, STORE_SUMS, SQUARE_SUMS = range(3)
SLOT_KINDS = {"element": 1, "row": 2}
WIDE_WORD = 16
"""Bytes of the widest load."""
PREPARED = 256
"""Ids, or bags, to a program of `kernels/prepare_ids.py`."""
_NOTHING = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Target:
    """What becomes of the gradients: the mode of `kernels/row_update.py`, what it writes, and its optimizers."""

    mode: int
    out: Tensor
    starts: int  # alignment of the rows in `out`
    slots: int = 1
    rules: tuple[tuple[int, type[Optimizer] | None], ...] = ((0, None),)
    update: Update | None = None
    source: Tensor | None = None  # where the rows can be read, if some are cut to a length
    sources: int = 1  # alignment of the rows in `source`


class TritonBackend:
    """Fills in `Backend`. Tile sizes come from `configs.py`; the arguments replace them, for tests and benchmarks.

    Args:
        lookup: `(widest, mean length of a bag) → LookupConfig`.
        update: `widest → UpdateConfig`.
    """

    name = "triton"

    def __init__(
        self,
        lookup: Callable[[int, float], configs.LookupConfig] = configs.lookup_config,
        update: Callable[[int], configs.UpdateConfig] = configs.update_config,
    ) -> None:
        self._lookup_config, self._update_config = lookup, update

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """None if tables of this kind are served, else the reason why not."""
        if dtype not in DTYPES:
            return f"the Triton kernels serve float32, float16 and bfloat16 tables, not {dtype}"
        if INTERPRETED:
            if device.type == "cpu":
                return None
            return "TRITON_INTERPRET=1 is set, so the Triton kernels run in the interpreter, on CPU tensors only"
        if device.type != "cuda":
            return f"the Triton kernels run on CUDA GPUs, not on {device.type} (TRITON_INTERPRET=1 emulates one)"
        return None

    # --- lookups ---------------------------------------------------------------------------------------------------

    def pooled_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, normalised: bool, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """See `Backend`. On a GPU, `policy="raise"` reports at a later call, see `device_errors.py`."""
        count = features.shape[0]
        out = table.new_empty((csr.bags, width))
        scale = torch.empty(count * csr.bags if normalised else 0, dtype=torch.float32, device=table.device)
        if csr.bags == 0 or count == 0:
            return out, scale
        csr = _contiguous(csr)
        facts = feature_facts(features)
        config = self._lookup_config(facts.widest, csr.ids.shape[0] / (count * csr.bags))
        if facts.clipped:
            config = configs.whole_rows(config, facts.widest)
        programs = count * ceil_div(csr.bags, config.lanes) if config.short else count * csr.bags
        with _on(table.device), _checking(table.device, policy) as bad:
            launch(
                pooled_short_kernel if config.short else pooled_long_kernel,
                (programs, ceil_div(facts.widest, config.block_d)), (
                    table, features, csr.ids, csr.offsets, csr.weights, out, scale if normalised else None, bad,
                ), (csr.bags, width), config.warps, {
                    "HAS_WEIGHTS": csr.weights is not None, "NORMALISED": normalised, "CHECK": bad is not None,
                    "CLIPPED": facts.clipped, "ALIGN": _rows_align(facts.starts, table),
                    "OUT_ALIGN": _rows_align(alignment(facts.columns, width), out), "BLOCK_D": config.block_d,
                    "BAGS" if config.short else "ROWS": config.lanes,
                },
            )  # fmt: skip
        return out, scale

    def max_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """`out[b, columns] = max_i w_i row(id_i)` elementwise `[B, width]`, and `winners`, the positions in `ids` they
        came from, int64 `[B, width]`; -1 in an empty bag, whose `out` is 0.

        The first of equal values wins, and the first NaN over all numbers.
        """
        count = features.shape[0]
        out = table.new_empty((csr.bags, width))
        winners = torch.empty((csr.bags, width), dtype=torch.int64, device=table.device)
        if csr.bags == 0 or count == 0:
            return out, winners
        csr = _contiguous(csr)
        facts = feature_facts(features)
        config = configs.max_config(facts.widest)
        if facts.clipped:
            config = configs.whole_rows(config, facts.widest)
        grid = (count * ceil_div(csr.bags, config.lanes), ceil_div(facts.widest, config.block_d))
        with _on(table.device), _checking(table.device, policy) as bad:
            launch(
                max_kernel, grid, (
                    table, features, csr.ids, csr.offsets, csr.weights, out, winners, bad,
                ), (csr.bags, width), config.warps, {
                    "HAS_WEIGHTS": csr.weights is not None, "CHECK": bad is not None, "CLIPPED": facts.clipped,
                    "ALIGN": _rows_align(facts.starts, table),
                    "OUT_ALIGN": _rows_align(alignment(facts.columns, width), out),
                    "BAGS": config.lanes, "BLOCK_D": config.block_d,
                },
            )  # fmt: skip
        return out, winners

    def coefficient_grad(self, table: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        """See `Backend`."""
        out = torch.empty(csr.ids.shape[0], dtype=torch.float32, device=table.device)
        count = features.shape[0]
        if csr.ids.shape[0] == 0 or csr.bags == 0 or count == 0:
            return out
        csr = _contiguous(csr)
        facts = feature_facts(features)
        config = configs.coefficient_config(facts.widest, csr.ids.shape[0] / (count * csr.bags))
        normalised = scale.shape[0] != 0
        with _on(table.device):
            launch(
                coefficient_grad_kernel, (count * csr.bags,), (
                    table, features, csr.ids, csr.offsets, csr.weights, scale if normalised else None, grad, out,
                ), (csr.bags, grad.stride(0), grad.stride(1)), config.warps, {
                    "HAS_WEIGHTS": csr.weights is not None, "NORMALISED": normalised, "CLIPPED": facts.clipped,
                    "ALIGN": _rows_align(facts.starts, table), "GRAD_ALIGN": _grad_align(facts.columns, grad),
                    "DIM_ALIGN": facts.dims, "ROWS": config.lanes, "BLOCK_D": config.block_d,
                },
            )  # fmt: skip
        return out

    def prepare_ids(self, features: Tensor, csr: Csr, shards: Shards | None, policy: Policy) -> Prepared:
        """See `Backend`. On a GPU, `policy="raise"` reports at a later call, see `device_errors.py`."""
        number, total, device = csr.ids.shape[0], csr.offsets.shape[0] - 1, csr.ids.device
        csr = _contiguous(csr)

        def empty(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int64, device=device)

        made = Prepared(
            rows=empty(number + total),
            starts=None if shards is None else empty(number + total),
            offsets=empty(total + 1),
            weights=None if csr.weights is None else csr.weights.new_empty(number + total),
            places=empty(number),
        )
        if total == 0:
            made.offsets.zero_()
            return made
        described = None if shards is None else shards.described.contiguous()
        programs = ceil_div(number, PREPARED) + ceil_div(total + 1, PREPARED)
        with _on(device), _checking(device, policy) as bad:
            launch(
                prepare_ids_kernel, (programs,), (
                    features, csr.ids, csr.offsets, csr.weights, described, made.rows, made.starts, made.offsets,
                    made.weights, made.places, bad,
                ), (
                    number, csr.bags, total, features.shape[0], 0 if described is None else described.shape[0],
                    0 if shards is None else shards.stride,
                ), 4, {
                    "HAS_WEIGHTS": csr.weights is not None, "SHARDED": shards is not None,
                    "MODULO": shards is not None and shards.modulo, "CHECK": bad is not None, "BLOCK": PREPARED,
                },
            )  # fmt: skip
        return made

    # --- sums by row -----------------------------------------------------------------------------------------------

    def row_update(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> None:
        """See `Backend`."""
        facts = table_facts(update.tables)
        rules = tuple((number, rule) for number, rule in enumerate(update.rules) if number in facts.rules)
        if not rules:
            return
        target = Target(STEP_ROWS, update.table, facts.starts, facts.slots, rules, update)
        self._sum_by_row(target, update.features, update.tables, csr, scale, grad)

    def row_grad(
        self, out: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor, rows: Rows | None = None
    ) -> None:
        """See `Backend`."""
        if features.shape[0] == 0:
            return
        if rows is not None:
            facts = table_facts(rows.tables)
            target = Target(STORE_SUMS, out, facts.starts, source=rows.table, sources=facts.sources)
            self._sum_by_row(target, features, rows.tables, csr, scale, grad)
            return
        read = feature_facts(features)
        if read.clipped:
            raise ValueError("`rows` must be given where a feature has a MAX_NORM: the gradient depends on them")
        self._sum_by_row(Target(STORE_SUMS, out, read.starts), features, read.tables, csr, scale, grad)

    def max_grad(self, out: Tensor, features: Tensor, csr: Csr, winners: Tensor, grad: Tensor) -> None:
        """`w * grad` of each element that won, summed into `out` at its element of the table; see `row_grad`."""
        if features.shape[0]:
            facts = feature_facts(features)
            target = Target(STORE_SUMS, out, facts.starts)
            no_scale = torch.empty(0, dtype=torch.float32, device=out.device)
            # contiguous, so that one offset serves both
            self._sum_by_row(target, features, facts.tables, csr, no_scale, grad.contiguous(), winners.contiguous())

    def row_square_sum(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        """See `Backend`; `grad_scale` and `skip` play no part."""
        squares = torch.zeros(csr.ids.shape[0], dtype=torch.float32, device=grad.device)
        facts = table_facts(update.tables)
        if facts.rules - {FROZEN}:
            target = Target(SQUARE_SUMS, squares, 1, source=update.table, sources=facts.starts)
            self._sum_by_row(target, update.features, update.tables, csr, scale, grad)
        return squares.sum()

    def _sum_by_row(
        self, target: Target, features: Tensor, tables: Tensor, csr: Csr, scale: Tensor, grad: Tensor,
        winners: Tensor | None = None,
    ) -> None:  # fmt: skip
        if csr.ids.shape[0] == 0 or csr.bags == 0:
            return
        csr = _contiguous(csr)
        facts = table_facts(tables)
        config = self._update_config(facts.widest)
        with _on(grad.device):
            runs = sorted_runs(features, tables, facts, csr, scale, grad, config, target.mode != STORE_SUMS)
            self._finish(target, tables, facts, runs, grad, winners, known_columns(features), config)

    def _finish(
        self, target: Target, tables: Tensor, facts: TableFacts, runs: SortedRuns, grad: Tensor,
        winners: Tensor | None, columns: int, config: configs.UpdateConfig,
    ) -> None:  # fmt: skip
        update = target.update
        slots, hyper, steps = (update.slots, update.hyper, update.steps) if update else (None,) * 3
        grad_scale, skip = (update.grad_scale, update.skip) if update else (None, None)
        source = target.source if facts.clipped else None
        common: dict[str, Any] = {
            "MODE": target.mode, "SEVERAL_RULES": len(target.rules) > 1, "HAS_GRAD_SCALE": grad_scale is not None,
            "HAS_SKIP": skip is not None, "CLIPPED": facts.clipped, "ALIGN": _rows_align(target.starts, target.out),
            "SOURCE_ALIGN": 1 if source is None else _rows_align(target.sources, source),
            "SLOT_ALIGN": min(target.slots, WIDE_WORD // 4), "DIM_ALIGN": facts.dims, "CHUNK": config.chunk,
            "BLOCK_D": config.block_d,
        }  # fmt: skip
        state = (target.out, slots, tables, hyper, steps, grad_scale, skip)
        read = (grad, winners, runs.order if winners is not None else None, runs.sources, runs.coefficients)
        reading = {
            "HAS_COEFFICIENTS": runs.coefficients is not None, "HAS_WINNERS": winners is not None,
            "GRAD_ALIGN": _grad_align(columns, grad),
        }  # fmt: skip
        rules = [(number, _rule(rule)) for number, rule in target.rules]
        for number, rule in rules:
            launch(
                segments_kernel, (runs.blocks * config.parts,), (
                    *state, *read, runs.starts, runs.tags, runs.rows, runs.first_sources, runs.counts, runs.partials,
                    source,
                ), (grad.stride(1), runs.stride, number), config.warps,
                {**rule, **reading, **common, "BLOCK": config.block, "PARTS": config.parts,
                 "SEGMENTS": config.segments},
            )  # fmt: skip
        if runs.number <= config.long:
            return
        for number, rule in rules:
            launch(
                long_kernel, (min(runs.number // config.long, config.long_programs),), (
                    *state, *read, runs.starts, runs.tags, runs.rows, runs.list_counts, runs.long, runs.partials,
                    source,
                ), (grad.stride(1), runs.stride, number), config.long_warps,
                {**rule, **reading, **common, "TERMS": config.terms},
            )  # fmt: skip
        if runs.number <= config.chunk:
            return
        if runs.number > config.chunk * config.fold:
            launch(
                fold_kernel, (ceil_div(runs.windows, config.fold),),
                (runs.keys, runs.partials, runs.folds), (runs.number, runs.absent, runs.stride), config.join_warps,
                {"CHUNK": config.chunk, "FOLD": config.fold, "JOIN": config.join, "BLOCK_D": config.block_d},
            )  # fmt: skip
        for number, rule in rules:
            launch(
                join_kernel, (min(runs.windows, config.joiners),), (
                    *state, runs.keys, runs.list_counts, runs.cuts, runs.cut_tables, runs.partials, runs.folds, source,
                ), (runs.number, runs.stride, number), config.join_warps,
                {**rule, **common, "FOLD": config.fold, "JOIN": config.join},
            )  # fmt: skip


def _rule(rule: type[Optimizer] | None) -> dict[str, Any]:
    """The row rule and the kinds of its slots, as the kernels take them."""
    if rule is None:
        return {"RULE": None, "SLOT0": 0, "SLOT1": 0}
    kinds = [SLOT_KINDS[kind] for kind in rule.slot_kinds] + [0, 0]
    return {"RULE": rule.rule, "SLOT0": kinds[0], "SLOT1": kinds[1]}


def _contiguous(csr: Csr) -> Csr:
    weights = csr.weights
    return Csr(
        csr.ids.contiguous(),
        csr.offsets.contiguous(),
        None if weights is None else weights.to(torch.float32).contiguous(),
        csr.bags,
    )


def _rows_align(starts: int, tensor: Tensor) -> int:
    """Elements of `tensor` that can be read in one word, if rows start at multiples of `starts`."""
    return min(starts, WIDE_WORD // tensor.element_size())


def _grad_align(columns: int, grad: Tensor) -> int:
    if grad.stride(1) != 1:
        return 1
    return _rows_align(alignment(columns, grad.stride(0)), grad)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


@contextlib.contextmanager
def _checking(device: torch.device, policy: Policy) -> Any:
    """The word that kernels write bad ids to, or None if nobody asks; raises afterwards what is known by then."""
    if policy != "raise":
        yield None
    elif device.type == "cuda":
        yield device_errors.flag(device)
        device_errors.report(device)
    else:
        word = torch.zeros(1, dtype=torch.int64)
        yield word
        found = device_errors.decode(int(word))
        if found is not None:
            raise BadId(found[0])


BACKEND = TritonBackend()
