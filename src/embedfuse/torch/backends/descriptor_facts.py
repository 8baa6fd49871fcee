"""What the host must know of descriptors that live on a device: the widest row, the number of rows, common alignments.

Read once for each descriptor tensor, which makes the host wait once; after that a look-up by storage. So descriptors
must be kept from call to call, and be changed through PyTorch (which counts versions) or not at all.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...plan import (
    COLUMN,
    DIM,
    MAX_NORM,
    NO_MAX_NORM,
    OFFSET,
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
    T_SLOT1,
    T_SOURCE,
    TABLE,
    TABLE_WIDTH,
)

LARGEST_ALIGNMENT = 16
"""Elements; more than any wide word holds."""
WIDE_WORD = 16
"""Bytes of the widest load."""


@dataclass
class FeatureFacts:
    """Of a `features` tensor. Alignments are powers of two, in elements."""

    widest: int
    rows: int  # V
    dims: int
    starts: int  # of OFFSET, STRIDE and DIM together: every row starts at a multiple
    columns: int
    by_dim: dict[int, tuple[int, int]]  # `starts` and `columns` of the features of each DIM
    by_table: dict[int, int]  # `columns` of the features of each table
    clipped: bool  # whether any feature has a MAX_NORM
    tables: Tensor  # descriptors of the tables read, each learning by rule 0, none with a MAX_NORM
    lookups: dict[Any, Any] = field(default_factory=dict)  # what a backend has prepared for batches of a kind

    def wide(self, above: int) -> tuple[int, int]:
        """`starts` and `columns` of the features of more than so many columns."""
        found = [aligned for dim, aligned in self.by_dim.items() if dim > above]
        return alignment(*(starts for starts, _ in found)), alignment(*(columns for _, columns in found))


@dataclass
class TableFacts:
    """Of a `tables` tensor."""

    widest: int
    narrowest: int
    rows: int
    dims: int
    starts: int
    sources: int  # of T_SOURCE and T_DIM together
    kinds: list[tuple[int, int]]  # T_RULE and T_DIM of each table
    by_kind: dict[tuple[int, int], tuple[int, int]]  # `starts` and `slots` of the tables of each kind
    rules: frozenset[int]
    clipped: bool
    owners: Tensor  # int64 [tables that have rows, 2], on the device: ROW_BASE and number, sorted
    passes: dict[Any, Any] = field(default_factory=dict)  # what a backend has prepared for batches of a kind

    def is_uneven(self, above: int) -> bool:
        """Whether some tables of more than so many columns can be read in longer words than all of their rule's."""
        for rule in {rule for rule, dim in self.by_kind if dim > above}:
            wide, every = (self.of_rule(rule, least)[:2] for least in (above, 0))
            if any(min(one, WIDE_WORD // 4) > other for one, other in zip(wide, every, strict=True)):
                return True
        return False

    def of_rule(self, rule: int, above: int = 0) -> tuple[int, int, int]:
        """`starts`, `slots` and `dims` of the tables of a rule that have more than so many columns."""
        found = [(*a, dim) for (own, dim), a in self.by_kind.items() if own == rule and dim > above]
        starts, slots, dims = zip(*found, strict=True) if found else ((), (), ())
        return alignment(*starts), alignment(*slots), alignment(*dims)


T = TypeVar("T")
_known: dict[tuple[Any, ...], tuple[StorageWeakRef, Any]] = {}
_changing = threading.Lock()
_noted: dict[tuple[int, Any], tuple[Any, int, Any]] = {}
"""By the ids of descriptors: the descriptors, their versions, and the facts."""


def feature_facts(features: Tensor) -> FeatureFacts:
    """Facts of `features`; waits for the device the first time."""
    return _facts(features, _read_features)


def table_facts(tables: Tensor) -> TableFacts:
    """Facts of `tables`; waits for the device the first time."""
    return _facts(tables, _read_tables)


def known_columns(features: Tensor, facts: TableFacts, above: int) -> dict[int, tuple[int, int]]:
    """For each rule the alignment of the columns of its tables, and of those of more than `above` columns.

    1 where it is not known without waiting.
    """
    entry = _known.get(_key(features, _read_features))
    if entry is None:
        return dict.fromkeys(facts.rules, (1, 1))
    read: FeatureFacts = entry[1]
    if len(facts.rules) == 1 and facts.narrowest > above:
        return dict.fromkeys(facts.rules, (read.columns, read.columns))
    found = {}
    for rule in facts.rules:
        of_rule = [(dim, read.by_table.get(n, 0)) for n, (own, dim) in enumerate(facts.kinds) if own == rule]
        found[rule] = alignment(*(c for _, c in of_rule)), alignment(*(c for dim, c in of_rule if dim > above))
    return found


def _key(tensor: Tensor, read: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return read, tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, version


def _facts(tensor: Tensor, read: Callable[[Tensor], T]) -> T:
    noted = _noted.get((id(tensor), read))
    # the quick way for the very same object
    if noted is not None and noted[0]() is tensor and noted[1] == tensor._version:
        facts: T = noted[2]
        return facts
    facts = _looked_up(tensor, read)
    if not tensor.is_inference():
        with _changing:
            for gone in [key for key, (reference, *_) in _noted.items() if reference() is None]:
                del _noted[gone]
            _noted[id(tensor), read] = weakref.ref(tensor), tensor._version, facts
    return facts


def _looked_up(tensor: Tensor, read: Callable[[Tensor], T]) -> T:
    key = _key(tensor, read)
    entry = _known.get(key)
    if entry is None:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first lookup of these features cannot be captured in a CUDA graph: run one batch before capturing"
            )
        # the weak reference keeps the address, hence the key, from being used again
        entry = (StorageWeakRef(tensor.untyped_storage()), read(tensor))
        with _changing:
            for old in [old for old, (reference, _) in _known.items() if reference.expired()]:
                del _known[old]
            # another thread's, if it was quicker: launches are kept there
            entry = _known.setdefault(key, entry)
    facts: T = entry[1]
    return facts


def alignment(*values: Any) -> int:
    """The largest power of two, at most `LARGEST_ALIGNMENT`, that divides all values."""
    bits = LARGEST_ALIGNMENT
    for value in values:
        bits |= value if isinstance(value, int) else int(np.bitwise_or.reduce(np.asarray(value, np.int64), axis=None))
    return bits & -bits


def rows_align(starts: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that can be read in one word, if rows start at multiples of `starts`."""
    return min(starts, WIDE_WORD // dtype.itemsize)


def _places(values: Any, everywhere: Any = None) -> Iterator[tuple[int, Any]]:
    """Each of the values, and where it is; among those `everywhere`, if not among themselves."""
    for value in np.unique(values).tolist():
        yield value, (values if everywhere is None else everywhere) == value


def _read_features(features: Tensor) -> FeatureFacts:
    host = features.detach().cpu().numpy()
    tables = np.zeros((int(host[:, TABLE].max()) + 1, TABLE_WIDTH), np.int64)
    tables[:, T_MAX_NORM] = NO_MAX_NORM
    for target, source in ((T_OFFSET, OFFSET), (T_ROWS, ROWS), (T_DIM, DIM), (T_ROW_BASE, ROW_BASE)):
        tables[host[:, TABLE], target] = host[:, source]
    return FeatureFacts(
        widest=int(host[:, DIM].max()),
        rows=int((host[:, ROW_BASE] + host[:, ROWS]).max()),
        dims=alignment(host[:, DIM]),
        starts=alignment(host[:, OFFSET], host[:, STRIDE], host[:, DIM]),
        columns=alignment(host[:, COLUMN]),
        by_dim={
            dim: (alignment(host[at, OFFSET], host[at, STRIDE], host[at, DIM]), alignment(host[at, COLUMN]))
            for dim, at in _places(host[:, DIM])
        },
        by_table={table: alignment(host[at, COLUMN]) for table, at in _places(host[:, TABLE])},
        clipped=bool((host[:, MAX_NORM] != NO_MAX_NORM).any()),
        tables=torch.from_numpy(tables).to(features.device),
    )


def _read_tables(tables: Tensor) -> TableFacts:
    host = tables.detach().cpu().numpy()
    owners = sorted((base, number) for number, base in enumerate(host[:, T_ROW_BASE].tolist()) if host[number, T_ROWS])
    return TableFacts(
        widest=int(host[:, T_DIM].max()),
        narrowest=int(host[:, T_DIM].min()),
        rows=int((host[:, T_ROW_BASE] + host[:, T_ROWS]).max()),
        dims=alignment(host[:, T_DIM]),
        starts=alignment(host[:, T_OFFSET], host[:, T_DIM]),
        sources=alignment(host[:, T_SOURCE], host[:, T_DIM]),
        kinds=list(map(tuple, host[:, [T_RULE, T_DIM]].tolist())),
        by_kind={
            (rule, dim): (
                alignment(host[at & own, T_OFFSET], dim),
                alignment(host[at & own, T_SLOT0], host[at & own, T_SLOT1], dim),
            )
            for rule, own in _places(host[:, T_RULE])
            for dim, at in _places(host[own, T_DIM], host[:, T_DIM])
        },
        rules=frozenset(host[:, T_RULE].tolist()),
        clipped=bool((host[:, T_MAX_NORM] != NO_MAX_NORM).any()),
        owners=torch.tensor(owners or [(0, 0)], dtype=torch.int64, device=tables.device),
    )
