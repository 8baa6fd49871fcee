"""The tables of a collection: ordinary parameters, whose rows lie in one buffer per storage type."""

import contextlib
import math
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config import TableConfig
from ..plan import T_OFFSET, PlannedTable, plan_group


class Tables(nn.Module):
    """Tables by name. A dict-like holder; unlike `nn.ParameterDict` it allows every name, "items" included."""

    def put(self, name: str, table: nn.Parameter) -> None:
        """Adds or replaces a table."""
        self._parameters[name] = table

    def __getitem__(self, name: str) -> nn.Parameter:
        if name not in self._parameters:
            raise KeyError(f"no table {name!r}; there are {', '.join(self._parameters)}")
        return cast(nn.Parameter, self._parameters[name])

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def keys(self) -> KeysView[str]:
        """Names of the tables."""
        return self._parameters.keys()

    def values(self) -> ValuesView[nn.Parameter]:
        """The tables."""
        return cast("dict[str, nn.Parameter]", self._parameters).values()

    def items(self) -> ItemsView[str, nn.Parameter]:
        """Names and tables."""
        return cast("dict[str, nn.Parameter]", self._parameters).items()

    def extra_repr(self) -> str:
        return "\n".join(f"{name}: {list(table.shape)} {table.dtype}" for name, table in self.items())


def zeros(size: int, dtype: torch.dtype, device: Any) -> Tensor:
    """`torch.zeros`, in large pages of memory where the CPU engine can have them: rows are read faster there."""
    made = torch.empty(size, dtype=dtype, device=device)
    if made.device.type == "cpu" and type(made) is Tensor:
        with contextlib.suppress(ImportError):
            from ..cpu import prefer_large_pages

            prefer_large_pages(made)
    return made.zero_()


class Arena:
    """One flat buffer and the tables that lie in it.

    Args:
        tables: the holder of the parameters.
        names: the tables of this buffer, of one dtype, in order.
        planned: what they are like.
    """

    def __init__(self, tables: Tables, names: Sequence[str], planned: Sequence[PlannedTable]) -> None:
        self.names, self.planned = list(names), list(planned)
        self.shapes = [(table.rows, table.dim) for table in planned]
        plan = plan_group(planned, [])
        self.descriptors = plan.tables
        self.size = plan.size
        self.starts = [int(start) for start in plan.tables[:, T_OFFSET]]
        self._tables = tables
        self.buffer = torch.empty(0)

    @property
    def is_cut(self) -> bool:
        """Whether rows of any table are cut to a length."""
        return any(table.max_norm != math.inf for table in self.planned)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The tables, in order."""
        return [self._tables[name] for name in self.names]

    def allocate(self, dtype: torch.dtype, device: Any) -> None:
        """Makes the buffer, and parameters that lie in it, for the first time."""
        self.buffer = zeros(self.size, dtype, device)
        for name, view in zip(self.names, self._views(), strict=True):
            self._tables.put(name, nn.Parameter(view))

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function such as `.to(device)` to the buffer, and moves the tables along."""
        self.buffer = function(self.buffer)
        self._point()
        for table in self.parameters:
            if table.grad is not None:
                table.grad = function(table.grad)

    def gather(self) -> None:
        """Brings tables that lie elsewhere (after unpickling, or an assignment to `.data`) back into one buffer."""
        tables = self.parameters
        for name, table, shape in zip(self.names, tables, self.shapes, strict=True):
            if tuple(table.shape) != shape:
                raise ValueError(f"table {name!r} must keep its shape {list(shape)}, got {list(table.shape)}")
            if (table.dtype, table.device) != (tables[0].dtype, tables[0].device):
                raise ValueError(
                    f"tables of one collection and storage type must stay on one device, got {tables[0].dtype} on "
                    f"{tables[0].device} and {table.dtype} on {table.device} for {name!r}: move the whole collection"
                )
        old = [table.data for table in tables]
        self.buffer = zeros(self.size, tables[0].dtype, tables[0].device)
        self._point()
        with torch.no_grad():
            for table, values in zip(tables, old, strict=True):
                table.copy_(values)

    def is_own(self) -> bool:
        """Whether the tables are parameters, and not tensors that a functional call has put in their place."""
        return all(isinstance(table, nn.Parameter) for table in self.parameters)

    def is_whole(self) -> bool:
        """Whether every table still lies where the descriptors say."""
        origin, step = self.buffer.data_ptr(), self.buffer.element_size()
        return all(
            table.data_ptr() == origin + start * step for table, start in zip(self.parameters, self.starts, strict=True)
        )

    def _views(self) -> list[Tensor]:
        return [
            self.buffer[start : start + rows * dim].view(rows, dim)
            for start, (rows, dim) in zip(self.starts, self.shapes, strict=True)
        ]

    def _point(self) -> None:
        for table, view in zip(self.parameters, self._views(), strict=True):
            table.data = view


def named_tables(configs: Sequence[TableConfig]) -> list[str]:
    """A name for each table: its own, or `table_<number>`.

    Raises:
        ValueError: two tables of one name.
    """
    names = [config.name or f"table_{number}" for number, config in enumerate(configs)]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(
                f"`name` of a table must be unique, got two tables named {name!r}: rename one, or share a TableConfig "
                "object to share the table"
            )
    return names
