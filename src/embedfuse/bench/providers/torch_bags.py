"""Plain PyTorch: one `nn.EmbeddingBag` per table, `torch.optim` where it has the rule, eager and compiled."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...models.torch_optimizers import TorchOptimizers, moves_only_touched
from ..batches import Batch, Workload
from ..rules import rule_of
from . import Phase, Provider, Shared, Unsupported

DENSE_LIMIT = 2 * 2**30
"""Bytes of tables beyond which dense gradients are not tried: each step would make and read as much again."""


def version() -> str:
    """Of PyTorch."""
    return torch.__version__


def why_not(device: torch.device, option: str) -> str | None:
    """Always here."""
    return None


def make(work: Workload, option: str, shared: Shared) -> Provider:
    """Eager or compiled; both use the same bags."""
    case = work.case
    if len(case.rows) > 64 and option == "compiled":
        raise Unsupported(f"torch.compile would unroll {len(case.rows)} tables")
    if "torch bags" not in shared:
        kind: Any = nn.Embedding if case.sequence else nn.EmbeddingBag
        own = {} if case.sequence else {"mode": case.combiner, "include_last_offset": True}
        shared["torch bags"] = nn.ModuleList(
            [kind(*weights.shape, sparse=True, _weight=weights.clone(), **own) for weights in work.weights]
        )
    return TorchBags(work, shared["torch bags"], option == "compiled")


class TorchBags:
    """Outputs stay apart, table by table: putting them side by side would cost PyTorch a copy."""

    capturable = False

    def __init__(self, work: Workload, bags: nn.ModuleList, compiled: bool) -> None:
        self.work, self.bags, self.sparse = work, bags, not compiled
        self.rule = rule_of(work.case.optimizer)
        self.inputs = {id(batch): self._inputs(batch) for batch in (*work.batches, work.again)}
        self.grads = {id(b): list(b.grad.split(work.case.dims, 1)) for b in (*work.batches, work.again)}
        self.look_up: Any = torch.compile(self._look_up, dynamic=False) if compiled else self._look_up
        self.last: list[list[Tensor]] = []
        self.phases: Mapping[str, Phase] = {"forward": Phase(lambda batch, _: self._forward(batch))}
        if self.sparse or (moves_only_touched(self.rule) and work.case.table_bytes <= DENSE_LIMIT):
            self.phases |= {
                "backward": Phase(self._backward, self._outputs),
                "train": Phase(lambda batch, _: self.train(batch)),
            }
        self.reset()

    def _inputs(self, batch: Batch) -> list[list[Tensor]]:
        made = []
        for _, place, _, offsets in self.work.features(batch):
            arguments = [batch.ids[place]]
            if not self.work.case.sequence:
                arguments.append(offsets.to(batch.ids.dtype))
            if batch.weights is not None:
                # torch wants weights of the table's type
                weights = batch.weights[place].to(batch.grad.dtype, copy=True)
                arguments.append(weights.requires_grad_(self.work.case.weights == "learned"))
            made.append(arguments)
        return made

    def reset(self) -> None:
        parameters: list[Any] = [bag.weight for bag in self.bags]
        with torch.no_grad():
            for parameter, weights in zip(parameters, self.work.weights, strict=True):
                parameter.copy_(weights)
        self.optimizer = TorchOptimizers([(parameter, self.rule, self.sparse) for parameter in parameters])

    def _look_up(self, inputs: list[list[Tensor]]) -> list[Tensor]:
        outputs = []
        for bag, (ids, *rest) in zip(self.bags, inputs, strict=True):
            weight: Any = bag.weight
            if isinstance(bag, nn.EmbeddingBag):
                offsets, weights = rest[0], rest[1] if len(rest) > 1 else None
                outputs.append(
                    nn.functional.embedding_bag(
                        ids, weight, offsets, mode=bag.mode, sparse=self.sparse, per_sample_weights=weights,
                        include_last_offset=True,
                    )
                )  # fmt: skip
            else:
                outputs.append(nn.functional.embedding(ids, weight, sparse=self.sparse))
        return outputs

    @torch.no_grad()
    def _forward(self, batch: Batch) -> list[Tensor]:
        outputs: list[Tensor] = self.look_up(self.inputs[id(batch)])
        return outputs

    def _backward(self, batch: Batch, outputs: list[Tensor]) -> None:
        torch.autograd.backward(outputs, self.grads[id(batch)])
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.work.case.weights == "learned":
            self.last = self.inputs[id(batch)]

    def train(self, batch: Batch) -> None:
        self._backward(batch, self._outputs(batch))

    def _outputs(self, batch: Batch) -> list[Tensor]:
        inputs = self.inputs[id(batch)]
        if self.work.case.weights == "learned":
            for arguments in inputs:
                arguments[2].grad = None
        outputs: list[Tensor] = self.look_up(inputs)
        return outputs

    def output(self, batch: Batch) -> Tensor:
        return torch.cat(self._forward(batch), 1)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        bag: Any = self.bags[table]
        return bag.weight.detach()[ids]  # type: ignore[no-any-return]

    def weight_grad(self) -> Tensor | None:
        found = [arguments[2].grad for arguments in self.last]
        return torch.cat([grad for grad in found if grad is not None]) if found else None
