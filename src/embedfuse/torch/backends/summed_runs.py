"""Sorted runs of equal rows → what becomes of their sums: the second half of every op that sums gradients by row.

Launches: segments, long ones, and what joins the runs that were cut; once for each distinct optimizer rule.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...kernels.configs import UpdateConfig
from ...kernels.cut_runs import fold_kernel, join_kernel
from ...kernels.row_update import long_kernel, segments_kernel
from ...optim.base import Optimizer
from . import Update
from .descriptor_facts import TableFacts, alignment
from .launching import launch, side_of
from .sorted_runs import SortedRuns, ceil_div

STEP_ROWS, STORE_SUMS, SQUARE_SUMS = range(3)
SLOT_KINDS = {"element": 1, "row": 2}
WIDE_WORD = 16
"""Bytes of the widest load."""
FEW = 1 << 14
"""Ids that do not keep a GPU busy."""
BESIDE = 1 << 17
"""Ids from which on a second stream is worth the host's time."""


@dataclass(frozen=True)
class Target:
    """What becomes of the gradients: the mode of `kernels/row_step.py`, what it writes, and its optimizers."""

    mode: int
    out: Tensor
    starts: int  # alignment of the rows in `out`
    slots: int = 1
    rules: tuple[tuple[int, type[Optimizer] | None], ...] = ((0, None),)
    update: Update | None = None
    source: Tensor | None = None  # where the rows can be read, if some are cut to a length or have dots made
    sources: int = 1  # alignment of the rows in `source`


def finish(
    target: Target, tables: Tensor, facts: TableFacts, runs: SortedRuns, grad: Tensor,
    winners: Tensor | None, columns: int, config: UpdateConfig, dots: Tensor | None = None,
) -> None:  # fmt: skip
    """Sums the gradient rows of each run, and does with the sums what `target` says.

    Args:
        target: what becomes of the sums.
        tables: descriptors.
        facts: of `tables`.
        runs: the ids of the batch, sorted.
        grad: where the gradient rows lie.
        winners: of max pooling: positions in the ids; only elements won by an id are of its gradient.
        columns: alignment of the features' columns.
        config: tile sizes, those that `runs` was made with.
        dots: gets the dot of each id's row, read from `target.source`, with its gradient row; see `Backend.row_grad`.
    """
    update = target.update
    slots, hyper, steps = (update.slots, update.hyper, update.steps) if update else (None,) * 3
    grad_scale, skip = (update.grad_scale, update.skip) if update else (None, None)
    source = target.source if facts.clipped or dots is not None else None
    common: dict[str, Any] = {
        "MODE": target.mode, "AT_RANDOM": update is not None and update.at_random,
        "SEVERAL_RULES": len(target.rules) > 1, "HAS_GRAD_SCALE": grad_scale is not None,
        "HAS_SKIP": skip is not None, "CLIPPED": facts.clipped, "ALIGN": rows_align(target.starts, target.out),
        "SOURCE_ALIGN": 1 if source is None else rows_align(target.sources, source),
        "SLOT_ALIGN": min(target.slots, WIDE_WORD // 4), "DIM_ALIGN": facts.dims, "CHUNK": config.chunk,
        "BLOCK_D": config.block_d,
    }  # fmt: skip
    state = (target.out, slots, tables, hyper, steps, grad_scale, skip)
    order = None if winners is None and dots is None else runs.order
    read = (grad, winners, order, dots, runs.sources, runs.coefficients)
    reading = {
        "HAS_COEFFICIENTS": runs.coefficients is not None, "HAS_WINNERS": winners is not None,
        "HAS_DOTS": dots is not None, "GRAD_ALIGN": grad_align(columns, grad),
    }  # fmt: skip
    rules = [(number, _rule(rule)) for number, rule in target.rules]
    # long segments wait for memory where short ones move it, so both together are faster than one after the other
    side = side_of(grad.device) if grad.is_cuda and runs.number >= BESIDE else None
    stream = None if side is None else side.fork()
    for number, rule in rules if runs.number > config.long else ():
        # programs that find nothing to do cost time, too
        launch(
            long_kernel, (min(ceil_div(runs.number, 16 * config.long), config.long_programs),), (
                *state, *read, runs.starts, runs.tags, runs.rows, runs.list_counts, runs.long, runs.partials,
                source,
            ), (grad.stride(1), runs.stride, number), config.long_warps,
            {**rule, **reading, **common, "TERMS": config.terms}, stream,
        )  # fmt: skip
    # few ids are dealt out to all programs that there can be
    parts = config.block // config.segments if runs.number <= FEW else config.parts
    for number, rule in rules:
        launch(
            segments_kernel, (runs.blocks * parts,), (
                *state, *read, runs.starts, runs.tags, runs.rows, runs.first_sources, runs.counts, runs.partials,
                source,
            ), (grad.stride(1), runs.stride, number), config.warps,
            {**rule, **reading, **common, "BLOCK": config.block, "PARTS": parts,
             "SEGMENTS": config.segments},
        )  # fmt: skip
    if side is not None:
        side.join()
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


def rows_align(starts: int, tensor: Tensor) -> int:
    """Elements of `tensor` that can be read in one word, if rows start at multiples of `starts`."""
    return min(starts, WIDE_WORD // tensor.element_size())


def grad_align(columns: int, grad: Tensor) -> int:
    if grad.stride(1) != 1:
        return 1
    return rows_align(alignment(columns, grad.stride(0)), grad)
