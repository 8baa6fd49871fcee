"""Ids of a batch → sorted runs of equal rows on the device: the first half of every op that sums gradients by row.

Launches: keys, sort, segments; a fixed number, whatever the number of tables and features. Few ids are sorted by one
launch or two, many by `radix_sort.py`, or by PyTorch where that is not to be had.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.configs import EVEN, UpdateConfig, ceil_div, narrow_of
from ...kernels.runs import key_kernel, segment_kernel
from . import Csr, Update
from .descriptor_facts import TableFacts
from .few_sort import FewSort
from .issuing import Issuer
from .launching import launcher
from .radix_sort import RadixSort, radix_sort

INT32 = 2**31 - 1
STEP = 4
"""Partial sums start at multiples of this many elements."""
FEW, RADIX, TORCH = range(3)
"""How ids are sorted: by `few_sort.py`, by `radix_sort.py`, by PyTorch."""
ALIGNMENT = 128
"""Bytes; tensors that share an allocation start at multiples."""
ARRIVED = 8
"""Bytes from the list counts on: a word that is 0 until the sort counts its blocks in it."""


class Given(NamedTuple):
    """What the launches of a batch are given: numbers, and pointers as launchers take them (None where none is)."""

    number: Any  # N
    bags: Any  # B
    total: Any  # bags of all features and records
    row: Any  # from one element of the gradient to the next, as `column`
    column: Any
    count: Any  # of features
    described: Any  # tables
    owned: Any  # tables that have rows
    rows: Any  # of all tables
    features: Any
    tables: Any
    owners: Any
    ids: Any
    offsets: Any
    weights: Any
    scale: Any
    grad: Any
    winners: Any
    dots: Any
    out: Any
    source: Any
    slots: Any
    hyper: Any
    steps: Any
    counted: Any
    grad_scale: Any
    skip: Any


class Order(NamedTuple):
    """What the kernels that sort are made for, beside the tables."""

    ids: torch.dtype
    weighted: bool
    scaled: bool
    wide_sources: bool  # whether gradients are so many elements that 32 bits are too few
    wide_positions: bool  # the same of ids
    positions: bool  # whether kernels that sum read positions of ids, in sorted order
    frozen: bool  # whether tables may be FROZEN
    counted: bool  # whether the step is counted, too
    skip: torch.dtype | None  # of the word that says not to

    @classmethod
    def of(cls, csr: Csr, scale: Tensor, grad: Tensor, positions: bool, frozen: bool, update: Update | None) -> "Order":
        """That of a batch."""
        counted = update is not None and update.counted is not None
        skip = update.skip.dtype if counted and update is not None and update.skip is not None else None
        last_source = last_element(*grad.shape, *grad.stride())
        return cls(
            csr.ids.dtype, csr.weights is not None, scale.shape[0] != 0, last_source > INT32,
            csr.ids.shape[0] > INT32 // 2, positions, frozen, counted, skip,
        )  # fmt: skip


def last_element(rows: Any, columns: Any, row: Any, column: Any) -> Any:
    """Where the last element of a matrix lies, counted from its first."""
    return (rows + -1) * row + (columns + -1) * column


class SortedRuns(NamedTuple):
    """What `kernels/runs.py` writes, and scratch for partial sums. Pointers as launchers take them."""

    blocks: Any  # of sorted keys
    windows: Any  # of CHUNK ids
    keys: Any  # [N], sorted
    order: Any  # [N] positions of ids; None where gradient rows were sorted in their place
    at: dict[str, Any]  # the names of `Sorter.dtypes`


def key_type(facts: TableFacts) -> torch.dtype:
    """Of keys: row numbers of all tables, and one more."""
    return torch.int32 if facts.rows <= INT32 else torch.int64


class Sorter:
    """Sorts batches by row: what stays the same from batch to batch.

    Args:
        order: what batches are like.
        facts: of the tables.
        config: tile sizes.
    """

    def __init__(self, order: Order, facts: TableFacts, config: UpdateConfig) -> None:
        self.order, self.facts, self.config = order, facts, config
        self.stride = ceil_div(facts.widest, STEP) * STEP  # elements from one partial sum to the next
        source = torch.int64 if order.wide_sources else torch.int32
        position = self.position = torch.int64 if order.wide_positions else torch.int32
        self.key = key_type(facts)
        real, small = torch.float32, torch.int32
        has_coefficients = order.scaled or order.weighted
        # made for the first batch that needs it
        self.radix: RadixSort | None = None
        self._few = FewSort(self.key, position, config.whole, config.window)
        # where nothing else is to be put in order, gradient rows are sorted beside the keys, in place of positions
        self.carries = False
        self._undecided = self.key is torch.int32 and not order.wide_positions
        self._may_carry = not (has_coefficients or order.positions or order.wide_sources)
        self.dtypes = {
            "position_sources": source, "position_coefficients": real if order.scaled else None,
            "list_counts": small, "sources": source, "coefficients": real if has_coefficients else None,
            "starts": position, "tags": small, "rows": self.key, "first_sources": source, "counts": small,
            "long": position, "cuts": position, "cut_tables": small, "partials": real, "folds": real,
            "order": position, "keys": self.key, "other_keys": self.key, "beside": small, "digits": small,
        }  # fmt: skip
        types = self.dtypes
        self._keys = launcher(
            key_kernel, 4, {
                "HAS_WEIGHTS": order.weighted, "HAS_SCALE": order.scaled, "HAS_FROZEN": order.frozen,
                "COUNTED": order.counted, "HAS_SKIP": order.skip is not None, "BLOCK": config.keys,
            }, (
                torch.int64, torch.int64, order.ids, torch.int64, real if order.weighted else None,
                real if order.scaled else None, self.key, source, types["position_coefficients"], small,
                *[torch.int64 if order.counted else None] * 2, order.skip,
            ),
        )  # fmt: skip
        wanted = config.block_d >= EVEN or facts.is_uneven(config.block_d // config.narrow)
        self.narrow = narrow_of(config, [dim for _, dim in facts.by_kind], wanted)
        self._segments, self._carried = (
            launcher(
                segment_kernel, 4, {
                    "HAS_COEFFICIENTS": has_coefficients, "CARRIED": carried, "CHUNK": config.chunk,
                    "LONG": config.long, "NARROW_D": config.block_d // self.narrow if self.narrow > 1 else 0,
                    "BLOCK": config.block,
                }, (
                    torch.int64, self.key, None if carried else position, source, types["coefficients"], source,
                    types["coefficients"], position, small, self.key, source, small, small, position, position, small,
                    torch.int64 if self.narrow > 1 else None,
                ),
            )
            for carried in (False, True)
        )  # fmt: skip
        self._types = {name: dtype for name, dtype in types.items() if dtype is not None}
        self._absent = dict.fromkeys(types.keys() - self._types.keys())

    def __call__(self, given: Given, to: Issuer) -> SortedRuns:
        """Sorts the ids of a batch.

        Args:
            given: the batch.
            to: who issues the launches.
        """
        order, config, number = self.order, self.config, given.number
        if number > config.some and self._undecided:
            self.radix = radix_sort(self.facts.rows.bit_length(), to.device)
            self.carries = self.radix is not None and self._may_carry
            # last, since other threads come here, too
            self._undecided = False
        radix = self.radix if number > config.some else None
        how = RADIX if radix is not None else FEW if number <= config.few else TORCH
        at = self._scratch(number, how, to)
        scale = given.scale if order.scaled else None
        steps = (given.steps, given.counted, given.skip) if order.counted else (None, None, None)
        # by itself where PyTorch sorts, so that what was sorted need not be kept
        own = to.tensor(number, self.key) if how == TORCH else None
        keys = at["keys"] if own is None else own[1]
        to(
            self._keys, (ceil_div(number, config.keys),), (
                given.features, given.tables, given.ids, given.offsets, given.weights, scale, keys,
                at["position_sources"], at["position_coefficients"], at["list_counts"], *steps,
            ), (
                number, given.bags, given.total, given.count, given.rows, given.row, given.column, given.described,
            ),
        )  # fmt: skip
        segments = self._segments
        if radix is not None:
            keys, positions = self._by_radix(radix, number, at, to)
            if self.carries:
                segments, at["sources"], positions = self._carried, positions, None
        elif own is None:
            positions = at["order"]
            keys = self._few(number, (at["keys"], at["other_keys"]), positions, at["beside"], to)
        else:
            ordered = torch.sort(own[0], stable=True)
            keys, positions = to.kept(ordered.values), to.kept(ordered.indices.to(self.position))
        blocks = ceil_div(number, config.block)
        to(
            segments, (blocks,), (
                given.owners, keys, positions, at["position_sources"],
                at["position_coefficients"] if order.scaled else given.weights, at["sources"], at["coefficients"],
                at["starts"], at["tags"], at["rows"], at["first_sources"], at["counts"], at["list_counts"], at["long"],
                at["cuts"], at["cut_tables"], given.tables if self.narrow > 1 else None,
            ), (number, given.rows, given.owned),
        )  # fmt: skip
        return SortedRuns(blocks, ceil_div(number, config.chunk), keys, positions, at)

    def _by_radix(self, radix: RadixSort, number: Any, at: dict[str, Any], to: Issuer) -> tuple[Any, Any]:
        """Sorted keys, and positions; or where gradient rows start, if those are carried."""
        beside, first = ("sources", at["position_sources"]) if self.carries else ("order", 0)
        return radix(
            number, (at["keys"], at["other_keys"]), (at[beside], at["beside"]), at["digits"],
            at["list_counts"] + ARRIVED, first, to,
        )  # fmt: skip

    def _scratch(self, number: Any, how: int, to: Issuer) -> dict[str, Any]:
        """Memory for a batch of so many ids, in one allocation since each takes the host a while: its parts by name."""
        config = self.config
        blocks, windows = ceil_div(number, config.block), ceil_div(number, config.chunk)
        segments = blocks * (config.block + 1)
        keys = number if how != TORCH else 0
        elements = {
            "position_sources": number, "position_coefficients": number, "list_counts": 4, "sources": number,
            "coefficients": number, "starts": segments, "tags": segments, "rows": segments, "first_sources": segments,
            "counts": blocks, "long": number // config.long, "cuts": windows, "cut_tables": windows,
            "partials": 2 * windows * self.stride, "folds": ceil_div(windows, config.fold) * self.stride,
            "keys": keys, "other_keys": keys, "beside": keys, "order": 0 if how == RADIX and self.carries else keys,
            "digits": self.radix.words(number) if how == RADIX and self.radix is not None else 0,
        }  # fmt: skip
        starts, end = [], 0
        for name, dtype in self._types.items():
            starts.append(end)
            end = end + ceil_div(elements[name] * dtype.itemsize, ALIGNMENT) * ALIGNMENT
        at = dict(zip(self._types, to.memory(end, starts, list(self._types.values())), strict=True))
        at.update(self._absent)
        return at
