"""The tables of a collection: ordinary parameters, whose rows lie in one buffer per storage type."""

import contextlib
import math
import operator
import weakref
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config import TableConfig
from ..plan import T_OFFSET, PlannedTable, plan_group
from .native import EXCHANGE, NATIVE

# `torch.autograd.graph.increment_version`, without its look at what it was given
_count_writing: Any = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
LEARN = 2
"""What `Arena.state` gives of tables that are in order, if any of them learn."""


class Tables(nn.Module):
    """Tables by name. A dict-like holder; unlike `nn.ParameterDict` it allows the names of its methods, as "items"."""

    def __init__(self) -> None:
        super().__init__()
        # what was put here to stay; a functional call puts other tensors in `_parameters` for its time
        self._own: dict[str, nn.Parameter | None] = {}
        self._changes = 0  # how often that was

    def put(self, name: str, table: nn.Parameter) -> None:
        """Adds or replaces a table."""
        self._parameters[name] = self._own[name] = table
        self._changes += 1

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """What an assignment does, as `load_state_dict(assign=True)` makes it."""
        super().register_parameter(name, param)
        self._own[name] = param
        self._changes += 1

    def is_own(self) -> bool:
        """Whether the tables are those put here, and not others that a functional call has put in their place."""
        # a compiler sees through Python only
        if NATIVE is not None and not torch.compiler.is_compiling():
            same: bool = NATIVE.same(self._parameters, self._own)
            return same
        return all(map(operator.is_, self._parameters.values(), self._own.values()))

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
        self.buffer = torch.empty(0, device="cpu")
        self._places: list[int] = []  # bytes of the buffer where the tables begin; none if it is "meta"
        self._steps = [(dim, 1) for _, dim in self.shapes]
        self._planned: Any = None  # the same for C++, which is quicker
        self._seen, self._holds_all = -1, False  # whether there were no other tables, when they changed last
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()  # who is to `forget` a buffer that is replaced

    @property
    def is_cut(self) -> bool:
        """Whether rows of any table are cut to a length."""
        return any(table.max_norm != math.inf for table in self.planned)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The tables, in order."""
        # asked for several times in a step, of hundreds of tables
        held: Any = self._tables._parameters
        if self._seen != self._tables._changes:
            self._seen, self._holds_all = self._tables._changes, list(held) == self.names
        return list(held.values()) if self._holds_all else list(map(held.__getitem__, self.names))

    def allocate(self, dtype: torch.dtype, device: Any) -> None:
        """Makes the buffer, and parameters that lie in it, for the first time."""
        self.buffer = zeros(self.size, dtype, device)
        for name, view in zip(self.names, self._views(), strict=True):
            self._tables.put(name, nn.Parameter(view))

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function such as `.to(device)` to the buffer, and moves the tables along."""
        if not self.is_whole():
            self.gather()
        grads = [table.grad for table in self.parameters]
        with torch.no_grad():
            self.buffer = function(self.buffer)
            self._point()
            for table, grad in zip(self.parameters, grads, strict=True):
                table.grad = None if grad is None else function(grad)

    def gather(self) -> None:
        """Brings tables that lie elsewhere (after unpickling, or an assignment to `.data`) back into one buffer.

        Raises:
            RuntimeError: during a functional call, whose tensors are not ours to move.
            ValueError: tables of another shape than planned, or of several types or devices.
        """
        if not self.is_own():
            raise RuntimeError(
                "a functional call needs a collection that leaves its tables alone: create it with "
                'update="autograd", or evaluate it with tables of its own'
            )
        tables = self.parameters
        for name, table, shape in zip(self.names, tables, self.shapes, strict=True):
            if tuple(table.shape) != shape:
                raise ValueError(f"table {name!r} must keep its shape {list(shape)}, got {list(table.shape)}")
            if (table.dtype, table.device) != (tables[0].dtype, tables[0].device):
                raise ValueError(
                    f"tables of one collection and storage type must stay on one device, got {tables[0].dtype} on "
                    f"{tables[0].device} and {table.dtype} on {table.device} for {name!r}: move the whole collection"
                )
        # tables made in inference mode could not be trained
        with torch.inference_mode(False), torch.no_grad():
            old = [table.data for table in tables]
            self.buffer = zeros(self.size, tables[0].dtype, tables[0].device)
            self._point()
            for table, values in zip(self.parameters, old, strict=True):
                table.copy_(values)

    def is_own(self) -> bool:
        """Whether the tables are the collection's, and not tensors that a functional call has put in their place."""
        return self._tables.is_own()

    def is_whole(self) -> bool:
        """Whether every table still lies where the descriptors say."""
        if not self._places:
            if self.buffer.is_meta:
                return all(table.is_meta for table in self.parameters)
            self._plan_places()
        # asked in every step, of hundreds of tables
        if self._planned is not None:
            held: bool = self._planned.hold(self.parameters, self.buffer)
            return held
        tables, origin = self.parameters, self.buffer.data_ptr()
        if list(map(Tensor.data_ptr, tables)) != [origin + start for start in self._places]:
            return False
        # a transposed view of the same memory holds other rows
        return list(map(Tensor.stride, tables)) == self._steps

    def state(self) -> int:
        """0 unless the tables are the collection's and all lie where the descriptors say, else 1, or LEARN."""
        tables = self._tables
        # asked in every step, of hundreds of tables
        if self._planned is not None and self._seen == tables._changes and self._holds_all:
            found: int = self._planned.hold_own(tables._parameters, tables._own, self.buffer)
            return found
        if not (self.is_own() and self.is_whole()):
            return 0
        return LEARN if self.learns() else 1

    def is_settled(self) -> bool:
        """Whether the tables are the collection's, and all lie where the descriptors say."""
        return self.state() != 0

    def learns(self) -> bool:
        """Whether any table does."""
        parameters = self.parameters
        return parameters[0].requires_grad or any(table.requires_grad for table in parameters)

    def settled(self) -> Tensor:
        """The buffer, after gathering what does not lie in it."""
        if not self.is_settled():
            self.gather()
        return self.buffer

    def written(self) -> None:
        """Tells autograd that rows have changed, so that a backward that needs the old ones is refused."""
        # nearly always all have one counter, but who swaps tensors can give a table its own
        _count_writing([self.buffer, *self.parameters])

    def _views(self) -> list[Tensor]:
        return [
            self.buffer[start : start + rows * dim].view(rows, dim)
            for start, (rows, dim) in zip(self.starts, self.shapes, strict=True)
        ]

    def _plan_places(self) -> None:
        step = self.buffer.element_size()
        self._places = [start * step for start in self.starts]
        if EXCHANGE is not None and NATIVE is not None:
            self._planned = NATIVE.Places(self._places, [dim for _, dim in self.shapes])

    def _point(self) -> None:
        self._places, self._planned = [], None
        for follower in self.followers:
            follower.forget()
        for name, table, view in zip(self.names, self.parameters, self._views(), strict=True):
            if table.is_inference() or not torch._has_compatible_shallow_copy_type(table, view):
                # this one can never hold the rows, be it of inference mode or of the device "meta"
                self._tables.put(name, nn.Parameter(view, requires_grad=table.requires_grad))
            else:
                table.data = view


def named_tables(configs: Sequence[TableConfig]) -> list[str]:
    """A name for each table: its own, or `table_<number>`.

    Raises:
        ValueError: two tables of one name, or a name of what the module that holds them keeps.
    """
    names = [config.name or f"table_{number}" for number, config in enumerate(configs)]
    taken = vars(Tables()).keys()
    for number, name in enumerate(names):
        if name in taken:
            raise ValueError(
                f"`name` of a table must not be one that torch.nn.Module uses itself, got {name!r}: choose another, "
                f"such as {name + '_table'!r}"
            )
        if name in names[:number]:
            raise ValueError(
                f"`name` of a table must be unique, got two tables named {name!r}: rename one, or share a TableConfig "
                "object to share the table"
            )
    return names


def check_device(device: Any) -> None:
    """Raises RuntimeError if `device` is a GPU and this machine offers none."""
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f'`device` must be one this machine has, got {str(device)!r} and torch sees no CUDA GPU: use device="cpu", '
            "or install a CUDA build of torch on a machine with a GPU"
        )
