"""Sorted runs of equal rows → what becomes of their sums: the second half of every op that sums gradients by row.

Launches: segments, long ones, and what joins the runs that were cut; once for each distinct optimizer rule.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.configs import EVEN, FEW_COLUMNS, NARROW_ROWS, UpdateConfig, ceil_div
from ...kernels.cut_runs import fold_kernel, join_kernel
from ...kernels.long_segments import long_kernel
from ...kernels.row_update import segments_kernel
from ...optim.base import Optimizer
from . import Update
from .descriptor_facts import WIDE_WORD, TableFacts, alignment, rows_align
from .issuing import Issuer
from .launching import Launcher, launcher
from .sorted_runs import Given, SortedRuns, Sorter

STEP_ROWS, STORE_SUMS, SQUARE_SUMS = range(3)
SLOT_KINDS = {"element": 1, "row": 2}
FEW = 1 << 16
"""Ids that do not keep a GPU busy: dealt out to more programs, 20,000 to 60,000 take 4 to 17 % less (H200, 2026-11)."""
BESIDE = 1 << 17
"""Ids from which on a second stream is worth the host's time."""


class Target(NamedTuple):
    """What becomes of the gradients: the mode of `kernels/row_step.py`, and what it writes and reads."""

    mode: int
    out: Tensor
    starts: int  # alignment of the rows in `out`
    update: Update | None = None
    source: Tensor | None = None  # where the rows can be read, if some are cut to a length or have dots made
    sources: int = 1  # alignment of the rows in `source`
    fill: bool = False  # whether `out` may hold anything on entry


class Sums(NamedTuple):
    """What the kernels that sum are made for, beside the tables and `Order`."""

    mode: int
    rules: tuple[type[Optimizer], ...]
    at_random: bool
    grad_scale: torch.dtype | None
    skip: torch.dtype | None
    out: torch.dtype
    out_align: int
    source: torch.dtype | None
    source_align: int
    grad: torch.dtype
    grad_aligns: tuple[tuple[int, int, int], ...]  # rules, alignments of all of its tables, and of wide ones
    winners: bool
    dots: bool

    @classmethod
    def of(
        cls, target: Target, grad: Tensor, columns: dict[int, tuple[int, int]], winners: bool, dots: bool, clipped: bool
    ) -> "Sums":
        """Those of a target; `columns` are as `known_columns` gives them."""
        update, source = target.update, target.source if clipped or dots else None
        out = target.out.dtype
        rules: tuple[type[Optimizer], ...] = ()
        at_random, grad_scale, skip = False, None, None
        if update is not None:
            rules, at_random = tuple(update.rules), update.at_random
            grad_scale = None if update.grad_scale is None else update.grad_scale.dtype
            skip = None if update.skip is None else update.skip.dtype
        return cls(
            target.mode, rules, at_random, grad_scale, skip, out, rows_align(target.starts, out),
            None if source is None else source.dtype, 1 if source is None else rows_align(target.sources, source.dtype),
            grad.dtype, tuple(
                [(rule, grad_align(every, grad), grad_align(wide, grad)) for rule, (every, wide) in columns.items()]
            ), winners, dots,
        )  # fmt: skip


class _Launchers(NamedTuple):
    """Of one optimizer rule."""

    number: int
    long: Launcher
    few_segments: Launcher
    segments: Launcher
    join: Launcher


class Summer:
    """Sums the gradient rows of sorted runs: what stays the same from batch to batch.

    Args:
        sums: what is to become of them.
        sorter: what sorted them.
        facts: of the tables.
        config: tile sizes.
    """

    def __init__(self, sums: Sums, sorter: Sorter, facts: TableFacts, config: UpdateConfig) -> None:
        self.sums, self.config, self.stride = sums, config, sorter.stride
        rules = [(n, rule) for n, rule in enumerate(sums.rules) if n in facts.rules] if sums.rules else [(0, None)]
        steps, types = sums.mode == STEP_ROWS, sorter.dtypes
        real, whole, small = torch.float32, torch.int64, torch.int32
        state = (
            sums.out, real if steps else None, whole, torch.float64 if steps else None, whole if steps else None,
            sums.grad_scale, sums.skip,
        )  # fmt: skip
        read = (
            sums.grad, whole if sums.winners else None, types["order"] if sums.winners or sums.dots else None,
            real if sums.dots else None, types["sources"], types["coefficients"], types["starts"], small,
            types["rows"],
        )  # fmt: skip
        common: dict[str, Any] = {
            "MODE": sums.mode, "AT_RANDOM": sums.at_random, "SEVERAL_RULES": len(rules) > 1,
            "HAS_GRAD_SCALE": sums.grad_scale is not None, "HAS_SKIP": sums.skip is not None,
            "CLIPPED": facts.clipped, "CHUNK": config.chunk, "BLOCK_D": config.block_d,
        }  # fmt: skip
        narrow = sorter.narrow
        reads: dict[str, Any] = {
            "HAS_COEFFICIENTS": types["coefficients"] is not None, "HAS_WINNERS": sums.winners,
            "HAS_DOTS": sums.dots, "NARROW": narrow,
        }  # fmt: skip
        tile = {"SEGMENTS": config.segments, "NARROW_SEGMENTS": min(config.segments * narrow, NARROW_ROWS)}
        # no piece of a run is longer than a window
        terms = {"TERMS": config.terms, "NARROW_TERMS": min(config.terms * narrow, config.chunk)}
        # few ids are dealt out to all programs that there can be
        self.few_parts = config.block // config.segments
        self.rules = []
        for number, rule in rules:
            kind = _rule(rule)
            aligned, reading = self._alignments(number, 1 in (kind["SLOT0"], kind["SLOT1"]), narrow, facts)
            own, reading = {**kind, **common, **aligned}, {**reads, **reading}
            segments = [
                launcher(
                    segments_kernel, config.warps,
                    {**own, **reading, **tile, "BLOCK": config.block, "PARTS": parts},
                    (*state, *read, types["first_sources"], small, real, sums.source),
                )
                for parts in (self.few_parts, config.parts)
            ]  # fmt: skip
            self.rules.append(
                _Launchers(
                    number,
                    launcher(
                        long_kernel, config.long_warps, {**own, **reading, **terms},
                        (*state, *read, small, types["long"], real, sums.source),
                    ),
                    segments[0],
                    segments[1],
                    launcher(
                        join_kernel, config.join_warps, {**own, "FOLD": config.fold, "JOIN": config.join},
                        (*state, sorter.key, small, types["cuts"], small, real, real, sums.source),
                    ),
                )
            )  # fmt: skip
        self._fold = launcher(
            fold_kernel, config.join_warps,
            {"CHUNK": config.chunk, "FOLD": config.fold, "JOIN": config.join, "BLOCK_D": config.block_d},
            (sorter.key, real, real),
        )  # fmt: skip

    def _alignments(
        self, rule: int, each: bool, narrow: int, facts: TableFacts
    ) -> tuple[dict[str, int], dict[str, int]]:
        """What rows of the tables of a rule start at multiples of; others are not touched.

        And for kernels that tell wide tables from narrow ones what rows of the wide ones do; and gradient rows.

        Args:
            rule: its number.
            each: whether it has a number of state for each element.
            narrow: as of `Sorter`.
            facts: of the tables.
        """
        sums, above = self.sums, self.config.block_d // narrow
        grads = {number: aligned for number, *aligned in sums.grad_aligns}
        every = wide = sums.out_align, 1, facts.dims
        grad = wide_grad = min(aligned for aligned, _ in grads.values())
        if sums.mode == STEP_ROWS:
            every, wide = (
                (rows_align(starts, sums.out), min(slots, WIDE_WORD // 4), dims)
                for starts, slots, dims in (facts.of_rule(rule), facts.of_rule(rule, above))
            )
            grad, wide_grad = grads[rule]
        # state of every element, gradient rows of shorter words than rows have, and narrow tables of more than a few
        # columns: 2 to 8 % slower so; where all narrow ones have few columns, 9 to 12 % faster (H200, 2026-11)
        is_slower = each and wide_grad < wide[0] and self.config.block_d >= EVEN and above > FEW_COLUMNS
        if narrow == 1 or (is_slower and any(own == rule and dim > above for own, dim in facts.by_kind)):
            wide, wide_grad = every, grad
        return {
            "ALIGN": every[0], "SOURCE_ALIGN": sums.source_align, "SLOT_ALIGN": every[1], "DIM_ALIGN": every[2],
        }, {
            "GRAD_ALIGN": grad, "WIDE_ALIGN": wide[0], "WIDE_SLOT_ALIGN": wide[1], "WIDE_GRAD_ALIGN": wide_grad,
            "WIDE_DIM_ALIGN": wide[2],
        }  # fmt: skip

    def __call__(self, runs: SortedRuns, given: Given, to: Issuer) -> None:
        """Sums the gradient rows of each run, and does with the sums what they are for.

        Args:
            runs: the ids of the batch, sorted.
            given: the batch.
            to: who issues the launches.
        """
        config, sums, at, number = self.config, self.sums, runs.at, given.number
        state = (
            given.out, given.slots, given.tables, given.hyper, given.steps, given.grad_scale, given.skip
        )  # fmt: skip
        read = (
            given.grad, given.winners, runs.order if sums.winners or sums.dots else None, given.dots,
            at["sources"], at["coefficients"], at["starts"], at["tags"], at["rows"],
        )  # fmt: skip
        partials, source = at["partials"], given.source
        # long segments wait for memory where short ones move it, so both together are faster than one after the other
        aside = number >= BESIDE and to.has_streams
        if aside:
            to.fork()
        if number > config.long:
            # programs that find nothing to do cost time, too
            grid = (min(ceil_div(number, 16 * config.long), config.long_programs),)
            for rule in self.rules:
                to(
                    rule.long, grid, (*state, *read, at["list_counts"], at["long"], partials, source),
                    (given.column, self.stride, rule.number), aside,
                )  # fmt: skip
        few = number <= FEW
        grid = (runs.blocks * (self.few_parts if few else config.parts),)
        for rule in self.rules:
            to(
                rule.few_segments if few else rule.segments, grid,
                (*state, *read, at["first_sources"], at["counts"], partials, source),
                (given.column, self.stride, rule.number),
            )  # fmt: skip
        if aside:
            to.join()
        if number <= config.chunk:
            return
        folds = at["folds"]
        if number > config.chunk * config.fold:
            to(
                self._fold, (ceil_div(runs.windows, config.fold),), (runs.keys, partials, folds),
                (number, given.rows, self.stride),
            )  # fmt: skip
        grid = (min(runs.windows, config.joiners),)
        for rule in self.rules:
            to(
                rule.join, grid,
                (*state, runs.keys, at["list_counts"], at["cuts"], at["cut_tables"], partials, folds, source),
                (number, self.stride, rule.number),
            )  # fmt: skip


def _rule(rule: type[Optimizer] | None) -> dict[str, Any]:
    """The row rule and the kinds of its slots, as the kernels take them."""
    if rule is None:
        return {"RULE": None, "SLOT0": 0, "SLOT1": 0}
    kinds = [SLOT_KINDS[kind] for kind in rule.slot_kinds] + [0, 0]
    return {"RULE": rule.rule, "SLOT0": kinds[0], "SLOT1": kinds[1]}


def grad_align(columns: int, grad: Tensor) -> int:
    """The same of gradient rows, whose features' columns are aligned to `columns`."""
    if grad.stride(1) != 1:
        return 1
    return rows_align(alignment(columns, grad.stride(0)), grad.dtype)
