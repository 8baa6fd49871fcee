"""TensorFlow: `tf.nn.embedding_lookup_sparse` per table under `tf.function`, with its own sparse optimizers."""

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch, Workload
from ..rules import INITIAL, RATE
from . import Phase, Provider, Shared, Unsupported, not_importable


def version() -> str:
    """Of TensorFlow."""
    return str(importlib.import_module("tensorflow").__version__)


def why_not(device: torch.device, option: str) -> str | None:
    """CPU alone: on a GPU it would take the memory for itself, and run on streams that our clocks do not see."""
    return "is measured on the CPU only" if device.type != "cpu" else not_importable("tensorflow")


def make(work: Workload, option: str, shared: Shared) -> Provider:
    """Where its optimizers step only the rows that were looked up."""
    if work.case.optimizer not in ("sgd", "adagrad"):
        raise Unsupported(f"TensorFlow has no {work.case.optimizer} that leaves untouched rows alone")
    return TensorFlow(work, importlib.import_module("tensorflow"))


def to_numpy(tensor: Tensor) -> Any:
    """A tensor as NumPy's, bfloat16 by way of float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


class TensorFlow:
    """Its threads are its own: `torch.set_num_threads` does not reach them."""

    capturable = False

    def __init__(self, work: Workload, tf: Any) -> None:
        self.work, self.tf = work, tf
        self.kind = getattr(tf, work.case.dtype)
        self.tables = [tf.Variable(tf.cast(to_numpy(weights), self.kind)) for weights in work.weights]
        self.inputs = {id(batch): self._inputs(batch) for batch in (*work.batches, work.again)}
        self.look_up = tf.function(self._look_up, reduce_retracing=True)
        self.last: list[Any] = []
        self.phases: Mapping[str, Phase] = {
            "forward": Phase(lambda batch, _: self.look_up(*self.inputs[id(batch)][:2])),
            "train": Phase(lambda batch, _: self.train(batch)),
        }
        self.reset()

    def _inputs(self, batch: Batch) -> tuple[list[Any], list[Any], list[Any]]:
        tf, case = self.tf, self.work.case
        ids, weights, grads = [], [], []
        for number, place, columns, offsets in self.work.features(batch):
            ids.append(tf.RaggedTensor.from_row_splits(to_numpy(batch.ids[place]), to_numpy(offsets)).to_sparse())
            if batch.weights is not None:
                weights.append(tf.SparseTensor(ids[-1].indices, to_numpy(batch.weights[place]), ids[-1].dense_shape))
            grad = to_numpy(batch.grad[:, columns]).reshape(case.bags, case.dims[number])
            grads.append(tf.cast(grad, self.kind))
        return ids, weights, grads

    def reset(self) -> None:
        train = self.tf.compat.v1.train
        for table, weights in zip(self.tables, self.work.weights, strict=True):
            table.assign(self.tf.cast(to_numpy(weights), self.kind))
        if self.work.case.optimizer == "sgd":
            self.optimizer = train.GradientDescentOptimizer(RATE)
        else:
            self.optimizer = train.AdagradOptimizer(RATE, initial_accumulator_value=INITIAL)
        # traced anew, so that it makes new state
        self.step = self.tf.function(self._step, reduce_retracing=True)

    def _look_up(self, ids: list[Any], weights: list[Any]) -> list[Any]:
        each: list[Any] = weights or [None] * len(ids)
        return [
            self.tf.nn.embedding_lookup_sparse(table, own, weight, combiner=self.work.case.combiner)
            for table, own, weight in zip(self.tables, ids, each, strict=True)
        ]

    def _step(self, ids: list[Any], weights: list[Any], grads: list[Any]) -> list[Any]:
        learned = [own.values for own in weights] if self.work.case.weights == "learned" else []
        with self.tf.GradientTape() as tape:
            tape.watch(learned)
            if learned:
                weights = [own.with_values(values) for own, values in zip(weights, learned, strict=True)]
            outputs = self._look_up(ids, weights)
        slopes = tape.gradient(outputs, [*self.tables, *learned], output_gradients=grads)
        self.optimizer.apply_gradients(zip(slopes[: len(self.tables)], self.tables, strict=True))
        return list(slopes[len(self.tables) :])

    def train(self, batch: Batch) -> None:
        self.last = self.step(*self.inputs[id(batch)])

    def output(self, batch: Batch) -> Tensor:
        outputs = self.look_up(*self.inputs[id(batch)][:2])
        return torch.cat([torch.from_numpy(self.tf.cast(out, self.tf.float32).numpy()) for out in outputs], 1)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        rows = self.tf.gather(self.tables[table], ids.numpy())
        return torch.from_numpy(self.tf.cast(rows, self.tf.float32).numpy())

    def weight_grad(self) -> Tensor | None:
        return torch.cat([torch.from_numpy(slope.numpy()) for slope in self.last]) if self.last else None
