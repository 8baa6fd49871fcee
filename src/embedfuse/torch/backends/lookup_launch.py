"""The launch of a pooled lookup: what stays the same from batch to batch of one kind."""

from typing import NamedTuple

import torch

from ...kernels.configs import SHORT_BAG, LookupConfig, ceil_div, narrow_of, whole_rows
from ...kernels.pooled_lookup import pooled_long_kernel, pooled_short_kernel
from .descriptor_facts import FeatureFacts, rows_align
from .launching import Launcher, launcher


class Lookup(NamedTuple):
    """One kernel with its constants."""

    launcher: Launcher
    bags: int  # to a program
    blocks: int  # of columns
    config: LookupConfig  # what was asked for

    @classmethod
    def of(
        cls, config: LookupConfig, facts: FeatureFacts, table: torch.dtype, ids: torch.dtype, weighted: bool,
        normalised: bool, check: bool, columns: int,
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
            columns: alignment of the features' columns and of a row of results.
        """
        tiles = whole_rows(config, facts.widest) if facts.clipped else config
        if tiles.short:
            lanes = {"BAGS": tiles.lanes}
        else:
            lanes = {
                "ROWS": tiles.lanes, "TURNS": tiles.turns, "GROUP": tiles.group, "SHORT": SHORT_BAG,
                "NARROW": narrow_of(tiles, facts.narrowest),
            }  # fmt: skip
        made = launcher(
            pooled_short_kernel if tiles.short else pooled_long_kernel, tiles.warps, {
                "HAS_WEIGHTS": weighted, "NORMALISED": normalised, "CHECK": check, "CLIPPED": facts.clipped,
                "ALIGN": rows_align(facts.starts, table), "OUT_ALIGN": rows_align(columns, table),
                "BLOCK_D": tiles.block_d, **lanes,
            }, (
                table, torch.int64, ids, torch.int64, torch.float32 if weighted else None, table,
                torch.float32 if normalised else None, torch.int64 if check else None,
            ), tiles.registers,
        )  # fmt: skip
        return cls(
            made, tiles.lanes if tiles.short else tiles.turns, ceil_div(facts.widest, tiles.block_d), config
        )  # fmt: skip
