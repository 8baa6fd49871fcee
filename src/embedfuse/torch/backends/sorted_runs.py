"""Ids of a batch → sorted runs of equal rows on the device: the first half of every op that sums gradients by row.

Launches: keys, sort, segments; a fixed number, whatever the number of tables and features. Few ids are sorted by one
launch or two, many by `radix_sort.py`, or by PyTorch where that is not to be had.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.configs import UpdateConfig, ceil_div, narrow_of
from ...kernels.runs import key_kernel, segment_kernel
from . import Csr, Update
from .descriptor_facts import TableFacts
from .few_sort import FewSort
from .launching import HOST, device_of, launcher
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
ROUND = 4096
"""Ids that scratch memory is rounded up to, so that batches of about one size share a layout."""
LAYOUTS = 256
"""The most layouts that are kept."""


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
        last_source = max(grad.shape[0] - 1, 0) * grad.stride(0) + max(grad.shape[1] - 1, 0) * grad.stride(1)
        return cls(
            csr.ids.dtype, csr.weights is not None, scale.shape[0] != 0, last_source > INT32,
            csr.ids.shape[0] > INT32 // 2, positions, frozen, counted, skip,
        )  # fmt: skip


class SortedRuns(NamedTuple):
    """What `kernels/runs.py` writes, and scratch for partial sums. Pointers as launchers take them."""

    number: int  # N
    absent: int  # the key of ids that do not count
    blocks: int  # of sorted keys
    windows: int  # of CHUNK ids
    keys: Any  # [N], sorted
    order: Any  # [N] positions of ids; None where gradient rows were sorted in their place
    at: dict[str, Any]  # the names of `Sorter.scratch`
    memory: tuple[Tensor, ...]  # where the pointers point to, as long as kernels are still to be issued


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
        self.narrow = narrow_of(config, facts.narrowest)
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
        self._layouts: dict[tuple[int, int], tuple[list[int], list[int], int]] = {}

    def __call__(
        self, features: Tensor, tables: Tensor, csr: Csr, scale: Tensor, grad: Tensor, update: Update | None
    ) -> SortedRuns:
        """Sorts the ids of a batch.

        Args:
            features: descriptors, as `tables`.
            scale: of each bag; empty for all ones.
            grad: the gradient whose rows will be summed; only its strides matter here.
            update: the step to count, if `Order` says so.
        """
        order, config, number = self.order, self.config, csr.ids.shape[0]
        device, pointer = device_of(csr.ids)
        if number > config.some and self._undecided:
            self.radix = radix_sort(self.facts.rows.bit_length(), device)
            self.carries = self.radix is not None and self._may_carry
            # last, since other threads come here, too
            self._undecided = False
        radix = self.radix if number > config.some else None
        how = RADIX if radix is not None else FEW if number <= config.few else TORCH
        memory, at = self._scratch(number, how, csr.ids.device, device == HOST)
        weights = None if csr.weights is None else pointer(csr.weights)
        steps: tuple[Any, ...] = (None, None, None)
        if order.counted and update is not None and update.counted is not None:
            skip = None if update.skip is None else pointer(update.skip)
            steps = (pointer(update.steps), pointer(update.counted), skip)
        # by itself where PyTorch sorts, so that what was sorted need not be kept
        keys = torch.empty(number, dtype=self.key, device=csr.ids.device) if how == TORCH else None
        self._keys(
            (ceil_div(number, config.keys),), (
                pointer(features), pointer(tables), pointer(csr.ids), pointer(csr.offsets), weights,
                pointer(scale) if order.scaled else None, at["keys"] if keys is None else pointer(keys),
                at["position_sources"], at["position_coefficients"], at["list_counts"], *steps,
            ), (
                number, csr.bags, csr.offsets.shape[0] - 1, features.shape[0], self.facts.rows, grad.stride(0),
                grad.stride(1), tables.shape[0],
            ), device,
        )  # fmt: skip
        kept: tuple[Tensor, ...] = (memory,)
        segments = self._segments
        if radix is not None:
            p_keys, positions = self._by_radix(radix, number, at)
            if self.carries:
                segments, at["sources"], positions = self._carried, positions, None
        elif keys is None:
            positions = at["order"]
            p_keys = self._few(number, (at["keys"], at["other_keys"]), positions, at["beside"], device)
        else:
            keys, ordered = torch.sort(keys, stable=True)
            ordered = ordered.to(self.position)
            p_keys, positions, kept = pointer(keys), pointer(ordered), (memory, keys, ordered)
        blocks = ceil_div(number, config.block)
        owners = self.facts.owners
        segments(
            (blocks,), (
                pointer(owners), p_keys, positions, at["position_sources"],
                at["position_coefficients"] if order.scaled else weights, at["sources"], at["coefficients"],
                at["starts"], at["tags"], at["rows"], at["first_sources"], at["counts"], at["list_counts"], at["long"],
                at["cuts"], at["cut_tables"], pointer(tables) if self.narrow > 1 else None,
            ), (number, self.facts.rows, owners.shape[0]), device,
        )  # fmt: skip
        windows = ceil_div(number, config.chunk)
        return SortedRuns(number, self.facts.rows, blocks, windows, p_keys, positions, at, kept)

    def _by_radix(self, radix: RadixSort, number: int, at: dict[str, Any]) -> tuple[Any, Any]:
        """Sorted keys, and positions; or where gradient rows start, if those are carried."""
        beside, first = ("sources", at["position_sources"]) if self.carries else ("order", 0)
        return radix(
            number, (at["keys"], at["other_keys"]), (at[beside], at["beside"]), at["digits"],
            at["list_counts"] + ARRIVED, first,
        )  # fmt: skip

    def _scratch(self, number: int, how: int, device: torch.device, as_tensors: bool) -> tuple[Tensor, dict[str, Any]]:
        """Memory for a batch of so many ids, in one allocation since each takes the host a while; and its parts."""
        rounded = ceil_div(number, ROUND) * ROUND if number > ROUND else ceil_div(number, ALIGNMENT) * ALIGNMENT
        found = self._layouts.get((rounded, how))
        if found is None:
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
            found = self._layouts[rounded, how] = self._layout(rounded, how)
        starts, lengths, size = found
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        parts: list[Any]
        if as_tensors:
            parts = [
                memory[start : start + length].view(dtype)
                for start, length, dtype in zip(starts, lengths, self._types.values(), strict=True)
            ]
        else:
            base = memory.data_ptr()
            parts = [base + start for start in starts]
        at: dict[str, Any] = dict(zip(self._types, parts, strict=True))
        at.update(self._absent)
        return memory, at

    def _layout(self, number: int, how: int) -> tuple[list[int], list[int], int]:
        """For each name the first byte, and how many; and the bytes of all."""
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
        lengths = [elements[name] * dtype.itemsize for name, dtype in self._types.items()]
        rounded = [ceil_div(length, ALIGNMENT) * ALIGNMENT for length in lengths]
        return [sum(rounded[:place]) for place in range(len(rounded))], lengths, sum(rounded)
