"""JAX as one writes it by hand: `take` and `segment_sum` per table; each row's gradients summed, then one step."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..batches import Batch, Workload
from ..rules import EPSILON, INITIAL, RATE
from . import Phase, Provider, Shared, Unsupported, not_importable
from .tensorflow import to_numpy


def version() -> str:
    """Of JAX."""
    return str(importlib.import_module("jax").__version__)


def why_not(device: torch.device, option: str) -> str | None:
    """CPU alone: on a GPU it would take the memory for itself, and run on streams that our clocks do not see."""
    return "is measured on the CPU only" if device.type != "cpu" else not_importable("jax")


def make(work: Workload, option: str, shared: Shared) -> Provider:
    """SGD and both forms of Adagrad."""
    if work.case.optimizer == "adam" or work.case.weights == "learned":
        raise Unsupported("not written for Adam or gradients of weights")
    jax = importlib.import_module("jax")
    # else it would take a GPU, if there is one
    jax.config.update("jax_platforms", "cpu")
    return Jax(work, jax)


class Jax:
    """Tables are donated to each step, so that they are changed in place. Its threads are its own."""

    capturable = False

    def __init__(self, work: Workload, jax: Any) -> None:
        self.work, self.jax, self.jnp = work, jax, jax.numpy
        self.inputs = {id(batch): self._inputs(batch) for batch in (*work.batches, work.again)}
        self.look_up = jax.jit(self._look_up)
        self.step = jax.jit(self._step, donate_argnums=(0, 1))
        self.phases: Mapping[str, Phase] = {
            "forward": Phase(lambda batch, _: self._forward(batch)),
            "train": Phase(lambda batch, _: self.train(batch)),
        }
        self.reset()

    def _array(self, tensor: Tensor) -> Any:
        kind = str(tensor.dtype).removeprefix("torch.")
        # a copy: donating an array that shares memory with ours would let JAX write there
        return self.jnp.array(to_numpy(tensor), copy=True).astype("int32" if kind == "int64" else kind)

    def _inputs(self, batch: Batch) -> list[dict[str, Any]]:
        made = []
        for number, place, columns, offsets in self.work.features(batch):
            lengths = offsets[1:] - offsets[:-1]
            bag = torch.arange(len(lengths)).repeat_interleave(lengths)
            coefficients = torch.ones(len(bag)) if batch.weights is None else batch.weights[place]
            if self.work.case.combiner == "mean":
                coefficients = coefficients / lengths[bag]
            # one length for all batches, else each is compiled for itself; row 0 with coefficient 0 changes nothing
            more = max(other.starts[number + 1] - other.starts[number] for other in self.work.batches) - len(bag)
            parts = {
                "ids": pad(batch.ids[place], (0, more)), "bag": pad(bag, (0, more), value=len(lengths) - 1),
                "coefficients": pad(coefficients, (0, more)), "grad": batch.grad[:, columns],
            }  # fmt: skip
            made.append({name: self._array(part) for name, part in parts.items()})
        return made

    def reset(self) -> None:
        self.tables = [self._array(weights) for weights in self.work.weights]
        rowwise = self.work.case.optimizer == "rowwise_adagrad"
        self.states = [
            self.jnp.full((rows, 1 if rowwise else dim), INITIAL)
            for rows, dim in zip(self.work.case.rows, self.work.case.dims, strict=True)
        ]

    def _look_up(self, tables: list[Any], inputs: list[dict[str, Any]]) -> list[Any]:
        outputs = []
        for table, given in zip(tables, inputs, strict=True):
            terms = table[given["ids"]].astype("float32") * given["coefficients"][:, None]
            total = self.jax.ops.segment_sum(terms, given["bag"], self.work.case.bags, indices_are_sorted=True)
            outputs.append(total.astype(table.dtype))
        return outputs

    def _step(self, tables: list[Any], states: list[Any], inputs: list[dict[str, Any]]) -> tuple[Any, Any, Any]:
        jnp, outputs, made = self.jnp, self._look_up(tables, inputs), []
        for table, state, given in zip(tables, states, inputs, strict=True):
            count = len(given["ids"])
            rows, run = jnp.unique(given["ids"], return_inverse=True, size=count, fill_value=len(table))
            terms = given["grad"][given["bag"]].astype("float32") * given["coefficients"][:, None]
            grad = self.jax.ops.segment_sum(terms, run.reshape(-1), count)
            if self.work.case.optimizer == "sgd":
                made.append((table.at[rows].add((-RATE * grad).astype(table.dtype), mode="drop"), state))
                continue
            square = grad * grad
            if self.work.case.optimizer == "rowwise_adagrad":
                square = square.mean(1, keepdims=True)
            new = state.at[rows].get(mode="fill", fill_value=1.0) + square
            move = RATE * grad / (jnp.sqrt(new) + EPSILON)
            values = table.at[rows].get(mode="fill", fill_value=0.0).astype("float32") - move
            made.append(
                (table.at[rows].set(values.astype(table.dtype), mode="drop"), state.at[rows].set(new, mode="drop"))
            )
        return [table for table, _ in made], [state for _, state in made], outputs

    def _forward(self, batch: Batch) -> list[Any]:
        outputs: list[Any] = self.jax.block_until_ready(self.look_up(self.tables, self.inputs[id(batch)]))
        return outputs

    def train(self, batch: Batch) -> None:
        self.tables, self.states, _ = self.jax.block_until_ready(
            self.step(self.tables, self.states, self.inputs[id(batch)])
        )

    def _tensor(self, array: Any) -> Tensor:
        # a copy: memory of donated arrays is used again
        return torch.from_numpy(np.array(array.astype("float32"), copy=True))

    def output(self, batch: Batch) -> Tensor:
        return torch.cat([self._tensor(out) for out in self._forward(batch)], 1)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self._tensor(self.tables[table][ids.numpy()])

    def weight_grad(self) -> Tensor | None:
        return None
