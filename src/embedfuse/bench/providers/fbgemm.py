"""fbgemm-gpu's table-batched embeddings, on a GPU with its first and its experimental kernels, and on the CPU."""

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch, Workload
from ..rules import ADAM_EPSILON, ADAM_RATE, BETAS, EPSILON, INITIAL, RATE
from . import LIBRARY_ERRORS, Phase, Provider, Shared, Unsupported, not_importable

OPTIMIZERS = {
    "sgd": "EXACT_SGD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adagrad": "EXACT_ADAGRAD",
    "adam": "ADAM",
}
PRECISIONS = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}


def version() -> str:
    """Of whichever of its packages is here."""
    for name in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(importlib.import_module("fbgemm_gpu"), "__version__", "unknown"))


def why_not(device: torch.device, option: str) -> str | None:
    """It is optional, and comes in a build for the CPU alone too."""
    if option == "v2" and device.type == "cpu":
        return "its experimental kernels are for GPUs"
    reason = not_importable("fbgemm_gpu")
    if reason:
        return reason
    # imports that register the ops
    return not_importable("fbgemm_gpu.split_table_batched_embeddings_ops_training")


def make(work: Workload, option: str, shared: Shared) -> Provider:
    """Version 1 and 2 are the same module with a flag, so they share its tables."""
    case = work.case
    if any(dim % 4 for dim in case.dims):
        raise Unsupported("dims must be multiples of 4")
    if work.device.type == "cpu" and case.dtype == "bfloat16":
        raise Unsupported("has no bfloat16 on the CPU")
    if option == "v2" and case.sequence:
        raise Unsupported("version 2 has no sequences")
    if case.sequence and len(set(case.dims)) > 1:
        raise Unsupported("sequences of several dims are one module each")
    if "fbgemm" not in shared:
        try:
            shared["fbgemm"] = _module(work)
        except LIBRARY_ERRORS as error:
            raise Unsupported(str(error).strip() or type(error).__name__) from error
    return Fbgemm(work, shared["fbgemm"], option == "v2")


def _module(work: Workload) -> Any:
    ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    case, on_gpu = work.case, work.device.type == "cuda"
    location = common.EmbeddingLocation.DEVICE if on_gpu else common.EmbeddingLocation.HOST
    place = ops.ComputeDevice.CUDA if on_gpu else ops.ComputeDevice.CPU
    precision = getattr(configs.SparseType, PRECISIONS[case.dtype])
    pooling = "NONE" if case.sequence else case.combiner.upper()
    module = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, location, place) for rows, dim in zip(case.rows, case.dims, strict=True)],
        optimizer=getattr(configs.EmbOptimType, OPTIMIZERS[case.optimizer]),
        learning_rate=ADAM_RATE if case.optimizer == "adam" else RATE,
        eps=ADAM_EPSILON if case.optimizer == "adam" else EPSILON,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weights_precision=precision,
        output_dtype=precision,
        stochastic_rounding=False,
        pooling_mode=getattr(common.PoolingMode, pooling),
        bounds_check_mode=common.BoundsCheckMode.NONE,
        device=work.device,
    )
    return module.to(work.device)


class Fbgemm:
    """One `SplitTableBatchedEmbeddingBagsCodegen`, whose optimizer runs in backward; ids are not checked."""

    capturable = True

    def __init__(self, work: Workload, module: Any, second: bool) -> None:
        self.work, self.module, self.second = work, module, second
        self.kept: dict[int, tuple[Tensor, Tensor, Tensor | None, Tensor]] = {
            id(batch): self._arguments(batch) for batch in (*work.batches, work.again)
        }
        self.last: Tensor | None = None
        self.tables: list[Tensor] = module.split_embedding_weights()
        self.phases: Mapping[str, Phase] = {
            "forward": Phase(lambda batch, _: self._forward(batch)),
            "backward": Phase(self._backward, self._look_up),
            "train": Phase(lambda batch, _: self.train(batch)),
        }
        self.reset()

    def _arguments(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        grad, weights = batch.grad, None if batch.weights is None else batch.weights.clone()
        if weights is not None and self.work.case.weights == "learned":
            weights.requires_grad_()
        if self.work.case.sequence:
            dim = self.work.case.dims[0]
            grad = grad.view(len(grad), -1, dim).transpose(0, 1).reshape(-1, dim)
        return batch.ids, batch.offsets.to(batch.ids.dtype), weights, grad

    def reset(self) -> None:
        with torch.no_grad():
            for table, weights in zip(self.tables, self.work.weights, strict=True):
                table.copy_(weights)
            initial = INITIAL if self.work.case.optimizer.endswith("adagrad") else 0.0
            for name in ("momentum1_dev", "momentum1_host", "momentum2_dev", "momentum2_host"):
                state = getattr(self.module, name, None)
                if isinstance(state, Tensor) and state.is_floating_point():
                    state.fill_(initial)
            for counter in self._counters():
                counter.zero_()

    def _counters(self) -> list[Tensor]:
        """What counts the steps of Adam."""
        found = [getattr(self.module, name, None) for name in ("iter", "iter_cpu")]
        return [counter for counter in found if isinstance(counter, Tensor)]

    def _look_up(self, batch: Batch) -> Tensor:
        self.module.is_experimental = self.second
        ids, offsets, weights, _ = self.kept[id(batch)]
        if weights is not None:
            weights.grad = None
        out: Tensor = self.module(ids, offsets, per_sample_weights=weights)
        return out

    @torch.no_grad()
    def _forward(self, batch: Batch) -> Tensor:
        return self._look_up(batch)

    def _backward(self, batch: Batch, out: Tensor) -> None:
        _, _, weights, grad = self.kept[id(batch)]
        out.backward(grad)
        self.last = weights

    def train(self, batch: Batch) -> None:
        self._backward(batch, self._look_up(batch))

    def output(self, batch: Batch) -> Tensor:
        # every forward counts as a step of Adam, evaluations too
        before = [counter.clone() for counter in self._counters()]
        out = self._forward(batch)
        for counter, value in zip(self._counters(), before, strict=True):
            counter.copy_(value)
        if self.work.case.sequence:
            count = len(self.work.case.rows)
            out = out.view(count, -1, self.work.case.dims[0]).transpose(0, 1).reshape(-1, self.work.case.width)
        return out

    def rows(self, table: int, ids: Tensor) -> Tensor:
        return self.tables[table].detach()[ids]

    def weight_grad(self) -> Tensor | None:
        return None if self.last is None else self.last.grad
