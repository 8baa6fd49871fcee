"""The launch of a pooled lookup: what stays the same from batch to batch of one kind, and what issues it again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.configs import EVEN, SHORT_BAG, LookupConfig, ceil_div, narrow_lanes, narrow_of, whole_rows
from ...kernels.pooled_lookup import pooled_long_kernel, pooled_short_kernel
from . import Csr, Policy
from .descriptor_facts import FeatureFacts, alignment, rows_align
from .device_errors import reported
from .issuing import Issuer
from .launching import Launcher, launcher
from .program import Program
from .programs import ask_contiguous, issued, run


class LookupBatch(NamedTuple):
    """All that a lookup reads and writes, and the numbers that it takes."""

    table: Any
    features: Any
    ids: Any
    offsets: Any
    weights: Any
    out: Any
    scale: Any  # None if no bag is divided
    bad: Any  # gets a bad id, if anybody asks
    bags: Any
    width: Any


class Lookup(NamedTuple):
    """One kernel with its constants."""

    launcher: Launcher
    bags: int  # to a program
    blocks: int  # of columns

    @classmethod
    def of(
        cls, config: LookupConfig, facts: FeatureFacts, table: torch.dtype, ids: torch.dtype, weighted: bool,
        normalised: bool, check: bool, width: int,
    ) -> "Lookup":  # fmt: skip
        """That of tiles `config` (or of whole rows, where rows are cut to a length).

        Args:
            config: tile sizes.
            facts: of the features.
            table: the tables' type, and the results'.
            ids: type of the ids.
            weighted: whether each id has a weight.
            normalised: whether bags have scales.
            check: whether bad ids are reported.
            width: of a row of results.
        """
        tiles = whole_rows(config, facts.widest) if facts.clipped else config
        # narrow tables keep wide ones from being read in long words, if one kernel reads both alike
        starts, columns = facts.wide(tiles.block_d // tiles.narrow)
        uneven = rows_align(starts, table) > rows_align(facts.starts, table)
        narrow = narrow_of(tiles, facts.by_dim, tiles.block_d >= EVEN and (uneven or not tiles.short))
        if narrow == 1:
            starts, columns = facts.starts, facts.columns
        wide_lanes, lanes_of_narrow = narrow_lanes(tiles, narrow)
        lanes: dict[str, Any] = {"BAGS": wide_lanes}
        if not tiles.short:
            lanes = {"ROWS": wide_lanes, "TURNS": tiles.turns, "GROUP": tiles.group, "SHORT": SHORT_BAG}
        made = launcher(
            pooled_short_kernel if tiles.short else pooled_long_kernel, tiles.warps, {
                "HAS_WEIGHTS": weighted, "NORMALISED": normalised, "CHECK": check, "CLIPPED": facts.clipped,
                "ALIGN": rows_align(starts, table), "OUT_ALIGN": rows_align(alignment(columns, width), table),
                "NARROW_ALIGN": rows_align(facts.starts, table),
                "NARROW_OUT_ALIGN": rows_align(alignment(facts.columns, width), table),
                "BLOCK_D": tiles.block_d, "NARROW": narrow, "NARROW_LANES": lanes_of_narrow, **lanes,
            }, (
                table, torch.int64, ids, torch.int64, torch.float32 if weighted else None, table,
                torch.float32 if normalised else None, torch.int64 if check else None,
            ), tiles.registers,
        )  # fmt: skip
        return cls(made, wide_lanes if tiles.short else tiles.turns, ceil_div(facts.widest, tiles.block_d))


class Lookups:
    """Looks batches of one `features` tensor up.

    Args:
        choose: `(widest, whether bags are short) → tiles`.
        facts: of the features.
        features: themselves.
    """

    def __init__(self, choose: Callable[[int, bool], LookupConfig], facts: FeatureFacts, features: Tensor) -> None:
        self.programs: list[Program] = []
        self._choose, self._facts, self._features = choose, facts, features.shape[0]
        # one for all: it can hold nothing, and making it costs the host as much as the launch of a kernel
        with torch.inference_mode(False):
            self._no_scale = torch.empty(0, dtype=torch.float32, device=features.device)
        self._found: dict[tuple[Any, ...], Lookup] = {}

    def made(self, table: Tensor, bags: int, width: int, normalised: bool) -> tuple[Tensor, Tensor]:
        """Where outputs and scales are to go."""
        scale = self._no_scale
        if normalised:
            scale = table.new_empty(self._features * bags, dtype=torch.float32)
        return table.new_empty((bags, width)), scale

    def again(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, normalised: bool, policy: Policy
    ) -> tuple[Tensor, Tensor] | None:
        """See `Backend.pooled_lookup`, if there was such a batch before; else None, and nothing is launched."""
        if not self.programs:
            return None
        bad = reported(table.device) if policy == "raise" else None
        ids, offsets, weights, bags = csr
        out, scale = self.made(table, bags, width, normalised)
        scales = scale if normalised else None
        done = run(self.programs, (table, features, ids, offsets, weights, out, scales, bad, bags, width))
        return (out, scale) if done else None

    def __call__(self, batch: LookupBatch) -> None:
        """Launches, on the current device. Ids, offsets and weights are contiguous, of the kernels' types."""
        short = is_short(batch)
        kind = (
            batch.table.dtype, batch.ids.dtype, batch.weights is not None, batch.scale is not None,
            batch.bad is not None, batch.width,
        )  # fmt: skip
        lookup = self._found.get((*kind, short))
        if lookup is None:
            tiles = self._choose(self._facts.widest, short)
            lookup = self._found[*kind, short] = Lookup.of(tiles, self._facts, *kind)

        def issue(given: LookupBatch, to: Issuer) -> None:
            programs = given.features.shape[0] * ceil_div(given.bags, lookup.bags)
            pointers = tuple(map(to.pointer, given[:8]))
            to(lookup.launcher, (programs, lookup.blocks), pointers, given[8:])

        def ask(given: LookupBatch) -> None:
            bool(is_short(given)), bool(given.width == batch.width), bool(given.bags > 0)
            ask_contiguous(given.ids, given.offsets, given.weights)

        issued(self.programs, batch, batch.table, issue, ask)


def is_short(batch: Any) -> Any:
    """Whether bags have few ids on average."""
    return batch.ids.shape[0] <= SHORT_BAG * batch.features.shape[0] * batch.bags
