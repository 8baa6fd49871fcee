"""The tables of a layer of columns: those of fused columns in one collection, the others each by itself."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...config import FeatureConfig, TableConfig
from ...optim import Optimizer
from ..bags import Bags
from ..collection import EmbeddingCollection
from ..initializers import initialize
from ..tables import Tables, check_device
from .column import CategoricalColumn
from .embedding import EmbeddingTable
from .plain import plain_lookup


class Lookup(NamedTuple):
    """One lookup: of the ids of a column, in a table that others may share."""

    name: str
    column: CategoricalColumn
    table: EmbeddingTable
    combiner: str
    do_fusion: bool


class Options(NamedTuple):
    """How tables are held and updated; see `EmbeddingCollection`."""

    optimizer: Optimizer | str | None = None
    update: Literal["step", "backward", "autograd"] = "step"
    device: Any = None
    grad: Literal["dense", "sparse"] = "dense"


class ColumnTables(nn.Module):
    """Looks up some columns; `fused` is None if there are no fused ones.

    Args:
        lookups: in the order in which their results are wanted.
        options: see `Options`; of all but `device` and `grad`, plain lookups know nothing.
    """

    fused: EmbeddingCollection | None

    def __init__(self, lookups: Sequence[Lookup], options: Options) -> None:
        super().__init__()
        check_device(options.device)
        self.lookups = list(lookups)
        self._sparse = options.grad == "sparse"
        configs = _configs(self.lookups)
        self._names = {table: config.name or "" for table, config in configs.items()}
        features = {
            look.name: FeatureConfig(configs[look.table], combiner=look.combiner)
            for look in self.lookups
            if look.do_fusion
        }
        self.fused = None
        if features:
            self.fused = EmbeddingCollection(
                features, options.optimizer, options.update, options.device, grad=options.grad
            )
        self.plain = Tables()
        for table, config in configs.items():
            if not any(look.table is table and look.do_fusion for look in self.lookups):
                dtype = getattr(torch, config.dtype)
                fresh = torch.zeros(config.vocabulary_size, config.dim, dtype=dtype, device=options.device)
                initialize(fresh, config)
                self.plain.put(config.name or "", nn.Parameter(fresh))
        for table in configs:
            self.table(table).requires_grad_(table.trainable)

    def table(self, table: EmbeddingTable) -> nn.Parameter:
        """The parameter of a table."""
        name = self._names[table]
        return self.plain[name] if self.fused is None or name in self.plain else self.fused.tables[name]

    def named_tables(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of all tables."""
        for table, name in self._names.items():
            yield name, self.table(table)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return next(iter(self.named_tables()))[1].device

    def forward(self, bags: dict[str, Bags]) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The results of all fused lookups side by side, in their order, and those of the others by name."""
        plain = {
            look.name: plain_lookup(
                self.table(look.table), bags[look.name], look.combiner, look.table.max_norm, self._sparse
            )
            for look in self.lookups
            if not look.do_fusion
        }
        if self.fused is None:
            return None, plain
        return self.fused.concatenated({look.name: bags[look.name] for look in self.lookups if look.do_fusion}), plain


def _configs(lookups: Sequence[Lookup]) -> dict[EmbeddingTable, TableConfig]:
    """A config for each table, whose name has no dots, in which module paths could not be told apart."""
    found: dict[EmbeddingTable, TableConfig] = {}
    names: set[str] = set()
    for look in lookups:
        table = look.table
        if table in found:
            continue
        name = table.name.replace(".", "_")
        if name in names:
            raise ValueError(
                f"tables must have different names, got {name!r} twice: give shared_embedding_columns a "
                "`shared_embedding_collection_name`"
            )
        names.add(name)
        initializer = table.initializer
        if table.ckpt_to_load_from is not None and table.tensor_name_in_ckpt is not None:
            from ..convert import read_variable

            initializer = read_variable(table.ckpt_to_load_from, table.tensor_name_in_ckpt)
        found[table] = TableConfig(
            look.column.num_buckets, table.dimension, initializer, combiner=look.combiner, name=name,
            max_norm=table.max_norm,
        )  # fmt: skip
    for table in found:
        kinds = {look.do_fusion for look in lookups if look.table is table}
        if len(kinds) > 1:
            raise ValueError(f"columns that share the table {table.name!r} must have one `do_fusion`, got both")
    return found


def moved(bags: dict[str, Bags], device: torch.device) -> dict[str, Bags]:
    """The bags on `device`; those from the CPU travel together, since each copy has its price."""
    away = [name for name, one in bags.items() if one.device != device]
    if not away:
        return bags
    if device.type == "cpu" or len(away) == 1 or any(bags[name].device.type != "cpu" for name in away):
        return {name: one.to(device, non_blocking=True) for name, one in bags.items()}
    ids = _together([bags[name].ids.long() for name in away], device)
    offsets = _together([bags[name].offsets for name in away], device)
    weighted = [name for name in away if bags[name].weights is not None]
    weights = dict(zip(weighted, _together([bags[name].weights.float() for name in weighted], device), strict=True))  # type: ignore[union-attr]
    made = {name: Bags(ids[number], offsets[number], weights.get(name)) for number, name in enumerate(away)}
    return {name: made.get(name, one) for name, one in bags.items()}


def _together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    if not tensors:
        return []
    joined = torch.cat(list(tensors))
    # pinning has no derivative
    if device.type == "cuda" and not joined.requires_grad:
        joined = joined.pin_memory()
    return list(joined.to(device, non_blocking=True).split([tensor.shape[0] for tensor in tensors]))
