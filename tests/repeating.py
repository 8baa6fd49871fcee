"""CPU backends that repeat what was done before, as Triton's does on a GPU (`usual_lookup.py`, `usual_step.py`)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from embedfuse.torch.backends import BadId, Csr, Update, accumulation_dtype, load


def _kind(table: Tensor, csr: Csr, *others: Tensor) -> Any:
    """What a program fixes of a batch; None of one that must be prepared first."""
    types = accumulation_dtype(table.dtype), torch.int64
    for tensor, dtype in ((csr.weights, types[0]), (csr.offsets, types[1]), (csr.ids, csr.ids.dtype)):
        if tensor is not None and (tensor.dtype != dtype or not tensor.is_contiguous()):
            return None
    if csr.bags == 0:
        return None
    tensors = (table, *csr[:3], *others)
    return tuple(None if one is None else (one.dtype, one.device, one.dim()) for one in tensors)


class _Lookups:
    def __init__(self, backend: Any, features: Tensor) -> None:
        self.backend, self.features = backend, features
        self.kinds: set[Any] = set()
        self.count = 0

    def again(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, normalised: bool, policy: Any
    ) -> tuple[Tensor, Tensor] | None:
        assert features is self.features
        found = _kind(table, csr)
        kind = found, width, normalised, policy
        if found is None or kind not in self.kinds:
            self.kinds.add(kind)
            return None
        assert table.device == csr.ids.device == features.device
        try:
            made: tuple[Tensor, Tensor] = self.backend.pooled_lookup(table, features, csr, width, normalised, policy)
        except BadId:
            # a GPU says so later
            return None
        Repeats.lookups += 1
        return made


class Repeats:
    """How often something was repeated."""

    lookups = 0
    steps = 0


def repeat(monkeypatch: pytest.MonkeyPatch) -> type[Repeats]:
    """Lets backends repeat for the time of a test."""
    Repeats.lookups = Repeats.steps = 0
    known: dict[tuple[str, int], _Lookups] = {}
    kept: list[Tensor] = []

    def lookups(backend: Any, features: Tensor) -> _Lookups:
        kept.append(features)
        return known.setdefault((backend.name, id(features)), _Lookups(backend, features))

    def row_update_again(backend: Any, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> bool:
        kind = _kind(update.table, csr, scale, grad)
        if update.programs is None or kind is None or csr.ids.shape[0] == 0:
            return False
        if kind not in update.programs:
            update.programs.append(kind)
            return False
        assert update.table.device == grad.device and grad.shape[1] >= 1
        backend.row_update(update, csr, scale, grad)
        Repeats.steps += 1
        return True

    for name in ("eager", "cpu"):
        kind = type(load(name))
        monkeypatch.setattr(kind, "lookups", lookups, raising=False)
        monkeypatch.setattr(kind, "row_update_again", row_update_again, raising=False)
    return Repeats
