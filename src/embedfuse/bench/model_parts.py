"""Models to step, with one kind of embeddings each: ours, PyTorch's, fbgemm-gpu's, or none at all."""

import dataclasses
import gc
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.schema import Field, Schema
from ..models import MODELS, FusedEmbeddings, Lookup, UnfusedEmbeddings
from .providers import LIBRARY_ERRORS, Unsupported, fbgemm
from .providers.torch_bags import DENSE_LIMIT
from .rules import EPSILON, INITIAL, RATE, rule_of

DENSE_RATE, DENSE_EPSILON = 1e-3, 1e-3
"""Of Adam. With its usual epsilon it makes whole steps of the last digits of gradients that are nearly 0."""
PROVIDERS = {
    "embedfuse": "EmbeddingCollection and FusedOptimizer",
    "embedfuse-backward": "the same with update='backward', where fbgemm-gpu updates, too",
    "torch-dense": "one nn.EmbeddingBag per table, dense gradients, torch.optim.Adagrad",
    "torch-sparse": "the same with sparse gradients",
    "fbgemm": "SplitTableBatchedEmbeddingBagsCodegen, Adagrad in backward",
    "fbgemm-v2": "the same with FBGEMM_EXPERIMENTAL_TBE",
    "none": "the dense layers alone, fed a constant",
}


class Rows(NamedTuple):
    """A batch as a model takes it."""

    inputs: dict[str, Tensor]  # int64 [B] of each field
    numeric: Tensor  # [B, n]
    labels: Tensor  # [B]


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """A model, its tables, and a batch size: 26 fields of one id, 13 numbers, as Criteo has."""

    name: str
    model: str
    batch: int
    dim: int
    rows: int
    fields: int = 26
    numeric: int = 13

    def describe(self) -> str:
        """The shape in words."""
        return f"{self.model}, batch {self.batch}, {self.fields} tables of {self.rows:,} rows, dim {self.dim}, Adagrad"

    def schema(self, rows: Sequence[int] | None = None) -> Schema:
        """The columns, perhaps with other numbers of rows."""
        sizes = rows or [self.rows] * self.fields
        fields = tuple(Field(f"C{number + 1}", size) for number, size in enumerate(sizes))
        return Schema(fields, tuple(f"I{number + 1}" for number in range(self.numeric)))

    def lookups(self, schema: Schema) -> list[Lookup]:
        """All tables, all with Adagrad: fbgemm-gpu has no FTRL for the wide tables of WDL."""
        found = MODELS[self.model].lookups(schema, rule_of("adagrad"), self.dim)
        return [dataclasses.replace(lookup, optimizer=rule_of("adagrad")) for lookup in found]

    @property
    def table_bytes(self) -> int:
        """Of one copy of all tables."""
        return 4 * sum(lookup.field.vocabulary_size * lookup.dim for lookup in self.lookups(self.schema()))


def draw(case: ModelCase, device: torch.device, batches: int) -> list[Rows]:
    """Ids with exponent 1.05, numbers and labels."""
    from .batches import draw_ids

    generator = torch.Generator(device).manual_seed(0)
    return [
        Rows(
            {field.name: draw_ids("zipf 1.05", case.rows, case.batch, generator) for field in case.schema().fields},
            torch.randn(case.batch, case.numeric, generator=generator, device=device),
            (torch.rand(case.batch, generator=generator, device=device) < 0.25).float(),
        )
        for _ in range(batches)
    ]


def filled(case: ModelCase, lookups: Sequence[Lookup]) -> list[Lookup]:
    """The lookups with initializers that give each table the same numbers in every model."""

    def initializer(seed: int) -> Any:
        # not from the default generator: a failed capture may leave it unusable
        return lambda table: table.uniform_(-0.1, 0.1, generator=torch.Generator(table.device).manual_seed(seed))

    return [dataclasses.replace(lookup, initializer=initializer(seed)) for seed, lookup in enumerate(lookups, 1)]


class FbgemmEmbeddings(nn.Module):
    """All lookups in one fbgemm-gpu module. Its dims are multiples of 4, so tables of dim 1 are 4 wide, 3 unused."""

    def __init__(self, lookups: Sequence[Lookup], device: torch.device, second: bool) -> None:
        super().__init__()
        self.lookups = tuple(lookups)
        ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        on_gpu = device.type == "cuda"
        location = common.EmbeddingLocation.DEVICE if on_gpu else common.EmbeddingLocation.HOST
        place = ops.ComputeDevice.CUDA if on_gpu else ops.ComputeDevice.CPU
        self.tables = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(one.field.vocabulary_size, -(-one.dim // 4) * 4, location, place) for one in lookups],
            optimizer=configs.EmbOptimType.EXACT_ADAGRAD, learning_rate=RATE, eps=EPSILON, stochastic_rounding=False,
            bounds_check_mode=common.BoundsCheckMode.NONE, device=device,
        ).to(device)  # fmt: skip
        self.tables.is_experimental = second
        wide = [number for number, one in enumerate(lookups) if one.dim % 4 == 0]
        self.split = sum(lookups[number].dim for number in wide)
        self.narrow = len(lookups) - len(wide)
        if wide != list(range(len(wide))) or any(one.dim != 1 for one in lookups[len(wide) :]):
            raise Unsupported("tables of dim 1 must come last, the others have multiples of 4")
        for lookup, table in zip(lookups, self.tables.split_embedding_weights(), strict=True):
            table.data[:, : lookup.dim] = lookup.initializer(torch.empty(len(table), lookup.dim, device=device))
        self.begin()

    def begin(self) -> None:
        """A fresh optimizer."""
        for name in ("momentum1_dev", "momentum1_host"):
            state = getattr(self.tables, name)
            if state.is_floating_point():
                state.data.fill_(INITIAL)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        ids = torch.cat([inputs[lookup.field.name] for lookup in self.lookups])
        out: Tensor = self.tables(ids, torch.arange(len(ids) + 1, device=ids.device))
        if not self.narrow:
            return out
        terms = out[:, self.split :].view(len(out), self.narrow, 4)[:, :, 0]
        return torch.cat([out[:, : self.split], terms], 1)

    def weights(self) -> dict[str, Tensor]:
        """The tables by name."""
        tables = self.tables.split_embedding_weights()
        return {one.name: table[:, : one.dim] for one, table in zip(self.lookups, tables, strict=True)}

    def make_optimizer(self) -> None:
        """None: it steps in backward."""
        self.begin()


class NoEmbeddings(nn.Module):
    """A constant where the embeddings would be; it is its own optimizer, which only forgets the gradient."""

    def __init__(self, batch: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.full((batch, width), 0.01, device=device))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.constant

    def weights(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def make_optimizer(self) -> "NoEmbeddings":
        """Itself."""
        return self

    def step(self) -> None:
        """Nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradient."""
        self.constant.grad = None


class Trainable:
    """A model with its optimizers; every one of the same case begins with the same numbers."""

    def __init__(self, case: ModelCase, provider: str, device: torch.device) -> None:
        self.provider, self.device = provider, device
        schema = case.schema()
        lookups = filled(case, case.lookups(schema))
        self.embeddings: Any = _embeddings(case, provider, lookups, device)
        torch.manual_seed(0)
        make: Any = MODELS[case.model]
        # tables apart, for moving them may copy them
        self.model: Any = make(nn.Identity(), schema, dim=case.dim).to(device)
        self.model.embeddings = self.embeddings
        self.dense = {n: p for n, p in self.model.named_parameters() if not n.startswith("embeddings.")}
        self.first = {name: value.detach().clone() for name, value in self.dense.items()}
        self.called: Any = self.model
        self.loss = torch.zeros(())
        self.begin()

    def begin(self) -> None:
        """Fresh optimizers; the old state goes first, for it may be as large as the tables."""
        self.table_optimizer: Any = None
        gc.collect()
        self.table_optimizer = self.embeddings.make_optimizer()
        if self.provider == "embedfuse-backward":
            # the tables keep it, and it steps in backward
            self.table_optimizer = None
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            self.dense.values(), DENSE_RATE, eps=DENSE_EPSILON, capturable=on_gpu, fused=on_gpu
        )

    @torch.no_grad()
    def reset(self, saved: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Back to the beginning, given the rows that moved."""
        for name, value in self.dense.items():
            value.copy_(self.first[name])
        for name, table in self.embeddings.weights().items():
            rows, values = saved[name]
            table[rows] = values
        self.begin()

    def step(self, rows: Rows, mark: Any = lambda: None) -> None:
        """One training step; `mark` is called after each of its phases."""
        logits = self.called(rows.inputs, rows.numeric)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, rows.labels)
        # its graph must not outlive the step: gradients would go on being added up on the stream of the first one
        self.loss = loss.detach()
        mark()
        loss.backward()
        del loss
        mark()
        if self.table_optimizer is not None:
            self.table_optimizer.step()
            self.table_optimizer.zero_grad()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()

    def step_tables(self, rows: Rows) -> None:
        """The embeddings alone: lookup, backward, update."""
        out = self.embeddings(rows.inputs)
        out.backward(torch.full_like(out, 1e-3))
        if self.table_optimizer is not None:
            self.table_optimizer.step()
            self.table_optimizer.zero_grad()


def _embeddings(case: ModelCase, provider: str, lookups: Sequence[Lookup], device: torch.device) -> nn.Module:
    if provider.startswith("embedfuse"):
        fused = FusedEmbeddings(lookups, device, "backward" if provider == "embedfuse-backward" else "step")
        fused.collection.out_of_range = "ignore"
        return fused
    if provider.startswith("torch"):
        if provider == "torch-dense" and case.table_bytes > DENSE_LIMIT:
            raise Unsupported(f"dense gradients of {case.table_bytes / 2**30:.0f} GiB each step")
        return UnfusedEmbeddings(lookups, device, "dense" if provider == "torch-dense" else "sparse")
    if provider == "none":
        return NoEmbeddings(case.batch, sum(lookup.dim for lookup in lookups), device)
    try:
        return FbgemmEmbeddings(lookups, device, provider == "fbgemm-v2")
    except LIBRARY_ERRORS as error:
        raise Unsupported(str(error).strip() or type(error).__name__) from error


def why_not(provider: str, device: torch.device) -> str | None:
    """None if it can be tried here."""
    if not provider.startswith("fbgemm"):
        return None
    return fbgemm.why_not(device, "v2" if provider.endswith("v2") else "v1")
