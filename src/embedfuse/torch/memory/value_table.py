"""`ValueTable`: the rows that memory layers read, which several layers may share."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...config import FeatureConfig, TableConfig
from ...optim import Optimizer
from ..collection import EmbeddingCollection
from ..gather import gather_reduce_sum

NAME = "weight"


class ValueTable(nn.Module):
    """A table of rows to be weighed and summed. Give one object to several layers, and they share it.

    Equivalent to `torch.nn.EmbeddingBag(num_rows, dim, mode="sum")` called with `per_sample_weights`, for any number of
    dimensions and without the gathered rows in memory. The rows are the one table of an `EmbeddingCollection`, so
    everything that steps those steps these.

    Assign bool `[num_rows]` to `row_mask`, and only rows where it is True learn; the others are read as ever. (The
    experts of a `PEER` learn as the mask of its `down` says.)

    Args:
        num_rows: of the table.
        dim: width of a row.
        update: when rows change. "autograd": the table is an ordinary parameter for any torch optimizer (see
            `param_groups`). "step": a `FusedOptimizer` changes the rows that were read, and no gradient of the size of
            the table is ever made. "backward": the same during `loss.backward()`.
        optimizer: for "step" and "backward", of this table; `FusedOptimizer(model, default=...)` otherwise.
        grad: for "autograd": gradients are "dense", or "sparse" as `torch.optim.SparseAdam` takes them.
        initializer: as that of `TableConfig`; a normal of deviation 1/√dim if None.
        dtype: "float32", "float16", "bfloat16" or "float64".
        device: where the table lives.

    Raises:
        ValueError: a size below 1, an unknown choice, or an optimizer that would not be used.
    """

    def __init__(
        self, num_rows: int, dim: int, *, update: Literal["autograd", "step", "backward"] = "autograd",
        optimizer: Optimizer | str | None = None, grad: Literal["dense", "sparse"] = "dense", initializer: Any = None,
        dtype: str = "float32", device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if update == "autograd" and optimizer is not None:
            raise ValueError(
                '`optimizer` must be None with update="autograd", whose rows a torch optimizer steps, got '
                f'{optimizer!r}: leave it out, or choose update="step" and FusedOptimizer(model)'
            )
        fill = _normal if initializer is None else initializer
        table = TableConfig(num_rows, dim, fill, combiner="sum", name=NAME, dtype=dtype)
        # padding asks for row -1, which is to count as absent
        feature = FeatureConfig(table, validate_weights_and_indices=False)
        self.collection = EmbeddingCollection(
            feature, optimizer=optimizer, update=update, device=device, out_of_range="drop", grad=grad
        )
        self.row_mask: Tensor | None
        self.register_buffer("row_mask", None, persistent=False)
        self.register_load_state_dict_pre_hook(_from_embedding_bag)  # type: ignore[no-untyped-call]

    @property
    def weight(self) -> nn.Parameter:
        """The rows, `[num_rows, dim]`."""
        return self.collection.tables[NAME]

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.collection.table_configs[NAME].vocabulary_size

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self.collection.table_configs[NAME].dim

    @property
    def update(self) -> str:
        """When rows change."""
        return self.collection.update

    @property
    def source(self) -> Tensor | EmbeddingCollection:
        """What the functions of this package take as their table, so that its rows learn as `update` says."""
        return self.weight if self.update == "autograd" else self.collection

    def forward(self, indices: Tensor, weights: Tensor | None = None) -> Tensor:
        """Weighted sums of rows, `[..., K] → [..., dim]`; negative indices count as absent."""
        if self.update != "autograd":
            return gather_reduce_sum(self.collection, indices, weights, row_mask=self.row_mask, out_of_range="drop")
        # sparse gradients are for eager training only
        sparse = self.collection.grad == "sparse" and torch.is_grad_enabled()
        return gather_reduce_sum(
            self.weight, indices, weights, grad="sparse" if sparse else "dense", row_mask=self.row_mask,
            out_of_range="drop",
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.dim}, update={self.update!r}"


def _normal(table: Tensor) -> None:
    nn.init.normal_(table, std=1 / math.sqrt(table.shape[1]))


def _from_embedding_bag(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes the state of a `torch.nn.EmbeddingBag` or `Embedding` too."""
    found = state.pop(f"{prefix}{NAME}", None)
    if found is not None:
        state.setdefault(f"{prefix}collection.tables.{NAME}", found)


def checked_table(name: str, given: Any, num_rows: int, dim: int) -> "ValueTable":
    """`given` if it has that shape, a new table if it is None.

    Raises:
        TypeError: something else.
        ValueError: a table of another shape.
    """
    if given is None:
        return ValueTable(num_rows, dim)
    if not isinstance(given, ValueTable):
        raise TypeError(
            f"`{name}` must be a ValueTable, or None for one of the layer's own, got {type(given).__name__}"
        )
    if (given.num_rows, given.dim) != (num_rows, dim):
        raise ValueError(
            f"`{name}` must have {num_rows} rows of width {dim}, as the layer's keys name, got {given.num_rows} "
            f"rows of width {given.dim}"
        )
    return given
