"""The native CPU engine, for the arrays of any library.

The functions here take arrays that lie in the memory of this machine, NumPy or PyTorch ones, and hand their addresses
to C++; results go into arrays that the caller made. They are the ops of `embedfuse.torch.backends.Backend`, by the same
names. A `csr` is anything with `ids`, `offsets`, `weights` and `bags`; descriptors are those of `plan.py`.

The instruction set is chosen once, when the engine is first used: the best that the processor runs. The environment
variable `EMBEDFUSE_CPU_ISA` names another: `baseline`, `avx2` or `avx512`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from ..plan import FEATURE_WIDTH, TABLE_WIDTH
from . import _engine
from ._engine import has_threads, isa, isas, rule_names

__all__ = [
    "coefficient_grad",
    "collect_rows",
    "has_threads",
    "isa",
    "isas",
    "max_grad",
    "max_lookup",
    "pooled_lookup",
    "prefer_large_pages",
    "prepare_ids",
    "product_topk",
    "row_grad",
    "row_square_sum",
    "row_update",
    "rule_names",
    "rule_number",
]

DTYPES = ("float32", "float16", "bfloat16", "float64")


class Csr(Protocol):
    """The ids of a group, see `embedfuse.torch.backends.Csr`."""

    @property
    def ids(self) -> Any: ...
    @property
    def offsets(self) -> Any: ...
    @property
    def weights(self) -> Any: ...
    @property
    def bags(self) -> int: ...


class Rows(Protocol):
    """Where rows can be read, see `embedfuse.torch.backends.Rows`."""

    @property
    def table(self) -> Any: ...
    @property
    def tables(self) -> Any: ...


class Shards(Protocol):
    """A table in parts, see `embedfuse.torch.backends.Shards`."""

    @property
    def described(self) -> Any: ...
    @property
    def modulo(self) -> bool: ...
    @property
    def stride(self) -> int: ...


class Prepared(Protocol):
    """What `prepare_ids` fills, see `embedfuse.torch.backends.Prepared`."""

    @property
    def rows(self) -> Any: ...
    @property
    def starts(self) -> Any: ...
    @property
    def offsets(self) -> Any: ...
    @property
    def weights(self) -> Any: ...
    @property
    def places(self) -> Any: ...


class Update(Protocol):
    """What `row_update` needs beside the ids, see `embedfuse.torch.backends.Update`."""

    table: Any
    features: Any
    tables: Any
    slots: Any
    hyper: Any
    steps: Any


# --- arrays as numbers ---------------------------------------------------------------------------------------------


@cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _code(dtype: Any) -> int:
    if _name(dtype) not in DTYPES:
        raise TypeError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype}: convert the array")
    return DTYPES.index(_name(dtype))


@cache
def accumulation_dtype(dtype: Any) -> str:
    """Name of the type that sums of that type are made in."""
    return "float64" if _name(dtype) == "float64" else "float32"


def _address(array: Any) -> int:
    """Where the first element lies; the others may lie anywhere."""
    pointer = getattr(array, "data_ptr", None)
    address: int = pointer() if pointer is not None else array.ctypes.data
    return address


def _packed(name: str, array: Any, dtype: str | None = None) -> int:
    """The address of an array without gaps."""
    torch_check = getattr(array, "is_contiguous", None)
    if not (torch_check() if torch_check is not None else array.flags.c_contiguous):
        raise ValueError(f"`{name}` must be contiguous, got strides {_strides(array)}: make a contiguous copy")
    if dtype is not None and _name(array.dtype) != dtype:
        raise TypeError(f"`{name}` must be of type {dtype}, got {array.dtype}: convert it")
    return _address(array)


def _strides(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    stride = getattr(array, "stride", None)
    return tuple(stride()) if stride is not None else tuple(size // array.itemsize for size in array.strides)


def _described(name: str, array: Any, width: int) -> int:
    """The address of descriptors."""
    if array.shape[1] != width:
        raise ValueError(f"`{name}` must have {width} columns, got {array.shape[1]}: see embedfuse.plan")
    return _packed(name, array, "int64")


def _batch(features: Any, csr: Csr, accumulation: str) -> _engine.Batch:
    kind = _name(csr.ids.dtype)
    if kind not in ("int32", "int64"):
        raise TypeError(f"`ids` must be int32 or int64, got {csr.ids.dtype}: convert them")
    weights = 0 if csr.weights is None else _packed("weights", csr.weights, accumulation)
    if csr.weights is not None and csr.weights.shape[0] != csr.ids.shape[0]:
        raise ValueError(f"`weights` must be one an id, {csr.ids.shape[0]}, got {csr.weights.shape[0]}")
    count = features.shape[0]
    bags = count * csr.bags
    records, rest = divmod(csr.offsets.shape[0] - 1, bags) if bags else (0, csr.offsets.shape[0] - 1)
    if rest:
        raise ValueError(f"`offsets` must be one more than a multiple of {bags} bags, got {csr.offsets.shape[0]}")
    return _engine.Batch(
        _described("features", features, FEATURE_WIDTH), count, _packed("ids", csr.ids), kind == "int64",
        csr.ids.shape[0], _packed("offsets", csr.offsets, "int64"), weights, csr.bags, records,
    )  # fmt: skip


def _upstream(scale: Any, grad: Any, accumulation: str) -> _engine.Upstream:
    address = 0 if scale is None or scale.shape[0] == 0 else _packed("scale", scale, accumulation)
    row_stride, column_stride = _strides(grad)
    return _engine.Upstream(address, _address(grad), _code(grad.dtype), row_stride, column_stride, grad.shape[1])


def _learner(update: Update, accumulation: str, rules: Sequence[int], grad_scale: float = 1.0) -> _engine.Learner:
    return _engine.Learner(
        _address(update.table), _code(update.table.dtype), _described("tables", update.tables, TABLE_WIDTH),
        update.tables.shape[0], rules, _packed("slots", update.slots, accumulation),
        _packed("hyper", update.hyper, "float64"), _packed("steps", update.steps, "int64"), grad_scale,
    )  # fmt: skip


@cache
def rule_number(name: str | None) -> int:
    """The number of a native row rule for `row_update`, or -1 if there is none of that name (`Optimizer.native`)."""
    return rule_names().index(name) if name in rule_names() else -1


def prefer_large_pages(array: Any) -> bool:
    """Asks the system for large memory pages behind an array that nothing has been written to yet.

    Rows of large tables are then found in fewer steps: lookups took 25 % less time (650 MB of tables, one thread of a
    Xeon of family 6 model 207, Linux 6.18, 2026-11).

    Returns:
        Whether the system takes such wishes: Linux does where `/sys/kernel/mm/transparent_hugepage/enabled` is
        `madvise` or `always`.
    """
    return _engine.prefer_large_pages(_address(array), array.nbytes)


# --- the ops -------------------------------------------------------------------------------------------------------


def pooled_lookup(
    table: Any, features: Any, csr: Csr, out: Any, scale: Any = None, *, checked: bool = True, threads: int = 1
) -> int | None:
    """Fills `out` `[B, width]`, and `scale` `[F * B]` where bags are normalised.

    Returns the first position of an id out of range, if `checked` and there is one; what was written is then void.
    """
    kind = accumulation_dtype(table.dtype)
    scale_address = 0 if scale is None or scale.shape[0] == 0 else _packed("scale", scale, kind)
    return _engine.pooled_lookup(
        _batch(features, csr, kind), _address(table), _code(table.dtype), _packed("out", out, _name(table.dtype)),
        out.shape[1], scale_address, checked, threads,
    )  # fmt: skip


def max_lookup(
    table: Any, features: Any, csr: Csr, out: Any, winners: Any, *, checked: bool = True, threads: int = 1
) -> int | None:
    """`out[b, columns] = max_i w_i row(id_i)` elementwise, and in `winners` (int64) the position it came from.

    The first of equal values wins, and the first NaN over all numbers; an empty bag gives 0 and -1. Returns what
    `pooled_lookup` returns.
    """
    return _engine.max_lookup(
        _batch(features, csr, accumulation_dtype(table.dtype)), _address(table), _code(table.dtype),
        _packed("out", out, _name(table.dtype)), out.shape[1], _packed("winners", winners, "int64"), checked, threads,
    )  # fmt: skip


def max_grad(out: Any, features: Any, csr: Csr, winners: Any, grad: Any, *, threads: int = 1) -> None:
    """`w * grad` of each element that won, summed into `out` (flat, zero on entry) at its element of the table."""
    kind = accumulation_dtype(out.dtype)
    _engine.max_grad(
        _batch(features, csr, kind), _upstream(None, grad, kind), _packed("winners", winners, "int64"),
        _address(out), _code(out.dtype), threads,
    )  # fmt: skip


def row_update(
    update: Update, csr: Csr, scale: Any, grad: Any, rules: Sequence[int], *, grad_scale: float = 1.0, threads: int = 1
) -> None:
    """One optimizer step, in place; `rules` holds a `rule_number` for each value of T_RULE, -1 to leave a table."""
    kind = accumulation_dtype(update.table.dtype)
    learner = _learner(update, kind, rules, grad_scale)
    _engine.row_update(_batch(update.features, csr, kind), _upstream(scale, grad, kind), learner, threads)


def row_square_sum(update: Update, csr: Csr, scale: Any, grad: Any, *, threads: int = 1) -> float:
    """`Σ_rows ||g[row]||²` of the tables that learn."""
    kind = accumulation_dtype(update.table.dtype)
    learner = _learner(update, kind, ())
    return _engine.row_square_sum(_batch(update.features, csr, kind), _upstream(scale, grad, kind), learner, threads)


def collect_rows(update: Update, csr: Csr, scale: Any, grad: Any, table: int, *, threads: int = 1) -> tuple[Any, Any]:
    """The rows of one table that are in the batch, ascending, int64 `[U]`, and their summed gradients `[U, dim]`."""
    kind = accumulation_dtype(update.table.dtype)
    learner = _learner(update, kind, ())
    batch = _batch(update.features, csr, kind)
    return _engine.collect_rows(batch, _upstream(scale, grad, kind), learner, table, threads)


def row_grad(
    out: Any, features: Any, csr: Csr, scale: Any, grad: Any, rows: Rows | None = None, dots: Any = None, *,
    threads: int = 1,
) -> None:  # fmt: skip
    """The summed gradient of every row in the batch, into `out` (flat, zero on entry) at OFFSET + id * DIM.

    With `rows`, whose `table` has the type of `out`, at the places that its descriptors give, through the cut to
    MAX_NORM. `dots` `[N]` of the accumulation type, zero on entry, then gets the dot of each id's row with the gradient
    of its bag.
    """
    kind = accumulation_dtype(out.dtype)
    read = _engine.Rows(0, 0, 0)
    if rows is not None:
        if _name(rows.table.dtype) != _name(out.dtype):
            raise TypeError(f"`rows` must be of the type of `out`, {_name(out.dtype)}, got {rows.table.dtype}: convert")
        described = _described("tables", rows.tables, TABLE_WIDTH)
        read = _engine.Rows(_address(rows.table), described, rows.tables.shape[0])
    places = 0
    if dots is not None:
        if rows is None:
            raise ValueError("`rows` must be given with `dots`, which are made with them")
        if dots.shape[0] != csr.ids.shape[0]:
            raise ValueError(f"`dots` must be one an id, {csr.ids.shape[0]}, got {dots.shape[0]}")
        places = _packed("dots", dots, kind)
    _engine.row_grad(
        _batch(features, csr, kind), _upstream(scale, grad, kind), read, _address(out), _code(out.dtype), places,
        threads,
    )  # fmt: skip


def prepare_ids(
    features: Any, csr: Csr, shards: Shards | None, prepared: Prepared, *, checked: bool = True, threads: int = 1
) -> int | None:
    """Fills `prepared`: the row of each id that counts, else -1, with a default in every bag, and its place in memory.

    `prepared.starts` is None without `shards`, `prepared.weights` without weights. Returns what `pooled_lookup` does.
    """
    kind = "float32" if csr.weights is None else accumulation_dtype(csr.weights.dtype)
    parts, starts = _engine.Shards(0, 0, False, 0), 0
    if shards is not None:
        described = _packed("described", shards.described, "int64")
        parts = _engine.Shards(described, len(shards.described), shards.modulo, shards.stride)
        starts = _packed("starts", prepared.starts, "int64")
    made = _engine.Prepared(
        _packed("rows", prepared.rows, "int64"), starts, _packed("offsets", prepared.offsets, "int64"),
        0 if prepared.weights is None else _packed("weights", prepared.weights, kind),
        _packed("places", prepared.places, "int64"),
    )  # fmt: skip
    return _engine.prepare_ids(_batch(features, csr, kind), parts, _code(kind), made, checked, threads)


def coefficient_grad(table: Any, features: Any, csr: Csr, scale: Any, grad: Any, out: Any, *, threads: int = 1) -> None:
    """The gradient of each weight, into `out` `[N]` of the accumulation type."""
    kind = accumulation_dtype(table.dtype)
    _engine.coefficient_grad(
        _batch(features, csr, kind), _upstream(scale, grad, kind), _address(table), _code(table.dtype),
        _packed("out", out, kind), threads,
    )  # fmt: skip


def product_topk(scores_a: Any, scores_b: Any, ids: Any, *, threads: int = 1) -> None:
    """Fills `ids` int64 `[R, k]` with the best pairs of rows `[R, n]` and `[R, m]`; see `torch/product_topk.py`."""
    (a_stride, a_step), (b_stride, b_step) = _strides(scores_a), _strides(scores_b)
    if a_step != 1 or b_step != 1:
        raise ValueError(f"rows of scores must be without gaps, got strides {a_step} and {b_step}: make a copy")
    if _name(scores_a.dtype) != _name(scores_b.dtype):
        raise TypeError(f"scores must be of one type, got {scores_a.dtype} and {scores_b.dtype}: convert one")
    rows, k = ids.shape
    _engine.product_topk(
        _address(scores_a), scores_a.shape[1], a_stride, _address(scores_b), scores_b.shape[1], b_stride,
        _code(scores_a.dtype), rows, k, _packed("ids", ids, "int64"), threads,
    )  # fmt: skip
