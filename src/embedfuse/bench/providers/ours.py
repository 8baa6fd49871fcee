"""Ours: the module a user writes, and the bare ops below it."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

import embedfuse

from ...config import FeatureConfig, TableConfig
from ...plan import ALIGNMENT, T_OFFSET, T_RULE, T_SLOT0, PlannedFeature, plan_group
from ...torch import EmbeddingCollection, FusedOptimizer, JoinedBags
from ...torch.backends import Csr, Policy, Update, select
from ..batches import Batch, Workload
from ..rules import rule_of
from . import Phase, Provider, Shared


def version() -> str:
    """Of embedfuse."""
    return embedfuse.__version__


def why_not(device: torch.device, option: str) -> str | None:
    """Always here."""
    return None


def make(work: Workload, option: str, shared: Shared) -> Provider:
    """The collection, or the bare engine."""
    return Engine(work) if option == "engine" else Collection(work, "backward" if option == "backward" else "step")


class Collection:
    """`EmbeddingCollection.concatenated` and `FusedOptimizer.step`. Ids are not checked, as nowhere here.

    Args:
        update: when tables are, "step" or "backward".
    """

    capturable = True

    def __init__(self, work: Workload, update: Literal["step", "backward"] = "step") -> None:
        self.work, self.update, case = work, update, work.case
        tables = [
            TableConfig(rows, dim, 0.0, combiner=case.combiner, name=f"t{number}", dtype=case.dtype)
            for number, (rows, dim) in enumerate(zip(case.rows, case.dims, strict=True))
        ]
        self.collection = EmbeddingCollection(
            {table.name: FeatureConfig(table) for table in tables}, rule_of(case.optimizer), update=update,
            device=work.device, out_of_range="ignore",
        )  # fmt: skip
        self.inputs = {id(batch): self._inputs(batch) for batch in (*work.batches, work.again)}
        self.last: Any = None
        self.phases: Mapping[str, Phase] = {
            "forward": Phase(lambda batch, _: self._forward(batch)),
            "backward": Phase(self._backward, self._look_up),
            "train": Phase(lambda batch, _: self.train(batch)),
        }
        self.reset()

    def _inputs(self, batch: Batch) -> Any:
        if self.work.case.sequence:
            return {f"t{number}": batch.ids[place] for number, place, _, _ in self.work.features(batch)}
        weights = batch.weights
        if weights is not None and self.work.case.weights == "learned":
            weights = weights.clone().requires_grad_()
        return JoinedBags(batch.ids, batch.offsets, weights, names=len(self.work.case.rows))

    def reset(self) -> None:
        with torch.no_grad():
            for table, weights in zip(self.collection.tables.values(), self.work.weights, strict=True):
                table.copy_(weights)
        self.collection.discard()
        self.optimizer = FusedOptimizer(self.collection)

    @torch.no_grad()
    def _forward(self, batch: Batch) -> Tensor:
        return self.collection.concatenated(self.inputs[id(batch)])

    def _backward(self, batch: Batch, out: Tensor) -> None:
        out.backward(batch.grad)
        if self.update == "step":
            self.optimizer.step()
        if batch.weights is not None and self.work.case.weights == "learned":
            self.last = self.inputs[id(batch)]

    def train(self, batch: Batch) -> None:
        self._backward(batch, self._look_up(batch))

    def _look_up(self, batch: Batch) -> Tensor:
        inputs = self.inputs[id(batch)]
        if self.work.case.weights == "learned":
            inputs.weights.grad = None
        return self.collection.concatenated(inputs)

    def output(self, batch: Batch) -> Tensor:
        return self._forward(batch)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.collection.tables[f"t{table}"].detach()[ids]

    def weight_grad(self) -> Tensor | None:
        return None if self.last is None else self.last.weights.grad


class Engine:
    """`pooled_lookup`, `row_update` and `coefficient_grad` of the backend, ids and gradients as they lie."""

    capturable = True

    def __init__(self, work: Workload) -> None:
        self.work, case = work, work.case
        shapes = list(zip(case.rows, case.dims, strict=True))
        group = plan_group(shapes, [PlannedFeature(table, case.combiner) for table in range(len(shapes))])
        rule, tables, size = rule_of(case.optimizer), group.tables.copy(), 0
        tables[:, T_RULE] = 0
        self.places: list[tuple[int, int, float]] = []
        for described, (rows, dim) in zip(tables, shapes, strict=True):
            for number, slot in enumerate(rule.slots()):
                described[T_SLOT0 + number] = size
                count = rows * (dim if slot.per == "element" else 1)
                self.places.append((size, count, slot.initial))
                size += -(-count // ALIGNMENT) * ALIGNMENT
        self.starts = group.tables[:, T_OFFSET].tolist()
        self.table = torch.zeros(group.size, dtype=getattr(torch, case.dtype), device=work.device)
        self.features = torch.from_numpy(group.features).to(work.device)
        self.width, self.normalised = group.width, group.normalised
        self.update = Update(
            self.table, self.features, torch.from_numpy(tables).to(work.device), [rule.kernel_class()],
            torch.zeros(max(size, 1), device=work.device),
            torch.tensor([rule.hyper(rule.current_learning_rate())] * len(shapes), dtype=torch.float64).to(work.device),
            torch.zeros(len(shapes), dtype=torch.int64, device=work.device), at_random=False,
        )  # fmt: skip
        self.backend = select(work.device, self.table.dtype)
        self.csrs = {id(b): Csr(b.ids, b.offsets, b.weights, case.bags) for b in (*work.batches, work.again)}
        self.last: Tensor | None = None
        self.phases: Mapping[str, Phase] = {
            "forward": Phase(lambda batch, _: self._forward(batch)[0]),
            "forward, ids checked": Phase(lambda batch, _: self._forward(batch, "raise")[0]),
            "backward": Phase(self._backward, lambda batch: self._forward(batch)[1]),
            "train": Phase(lambda batch, _: self.train(batch)),
        }
        self.reset()

    def reset(self) -> None:
        for number, weights in enumerate(self.work.weights):
            self._view(number).copy_(weights)
        for start, count, initial in self.places:
            self.update.slots[start : start + count] = initial
        self.update.steps.zero_()

    def _view(self, number: int) -> Tensor:
        rows, dim = self.work.case.rows[number], self.work.case.dims[number]
        return self.table[self.starts[number] :][: rows * dim].view(rows, dim)

    def _forward(self, batch: Batch, policy: Policy = "ignore") -> tuple[Tensor, Tensor]:
        csr = self.csrs[id(batch)]
        return self.backend.pooled_lookup(self.table, self.features, csr, self.width, self.normalised, policy)

    def _backward(self, batch: Batch, scale: Tensor) -> None:
        csr = self.csrs[id(batch)]
        if self.work.case.weights == "learned":
            self.last = self.backend.coefficient_grad(self.table, self.features, csr, scale, batch.grad)
        self.update.steps += 1
        self.backend.row_update(self.update, csr, scale, batch.grad)

    def train(self, batch: Batch) -> None:
        self._backward(batch, self._forward(batch)[1])

    def output(self, batch: Batch) -> Tensor:
        return self._forward(batch)[0]

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self._view(table)[ids]

    def weight_grad(self) -> Tensor | None:
        return self.last
