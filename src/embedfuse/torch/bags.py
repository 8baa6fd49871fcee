"""The batch of one feature: B bags of ids, each with any number of them, in compressed (CSR) form."""

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .bag_checks import (
    ID_TYPES,
    check_ids,
    check_jagged,
    check_offsets,
    check_same_lengths,
    check_sparse_values,
    check_weights,
    flattened,
    ids_of,
)
from .compiling import mark_dynamic, mark_static


class Bags:
    """B bags of ids: bag `b` owns `ids[offsets[b]:offsets[b + 1]]`, and `weights` at the same positions.

    Args:
        ids: int32 or int64 `[N]`.
        offsets: int32 or int64 `[B + 1]`, starting at 0, ending at N, not decreasing.
        weights: any float type `[N]`, or None for ones. May require gradients.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape, or offsets that break the rule. Offsets on a GPU are checked by shape only, since
            reading them would wait for the device; build bags on the CPU and move them to have them checked.
    """

    __slots__ = ("ids", "offsets", "weights")

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None

    def __init__(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> None:
        check_ids("ids", ids)
        check_ids("offsets", offsets)
        if ids.dim() != 1:
            raise ValueError(f"`ids` must have one dimension, got shape {tuple(ids.shape)}: use Bags.from_padded")
        if offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ValueError(f"`offsets` must be [B + 1] with at least one entry, got shape {tuple(offsets.shape)}")
        if offsets.device != ids.device:
            raise ValueError(f"`offsets` must be on the device of `ids`, {ids.device}, got {offsets.device}")
        if weights is not None:
            check_weights(weights, ids)
        if offsets.device.type == "cpu":
            if torch.compiler.is_compiling():
                offsets = torch.ops.embedfuse.checked_bags(offsets, ids.shape[0])
            else:
                check_offsets(offsets, ids.shape[0])
        self.ids, self.offsets, self.weights = ids, offsets.to(torch.int64), weights
        _mark_dynamic(self)

    # --- constructors ----------------------------------------------------------------------------------------------

    @classmethod
    def from_lists(
        cls, bags: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None, *,
        dtype: torch.dtype = torch.int64, device: Any = None,
    ) -> "Bags":  # fmt: skip
        """Bags from nested Python lists: `Bags.from_lists([[1, 2], [], [7]])`."""
        if dtype not in ID_TYPES:
            raise TypeError(f"`dtype` must be torch.int32 or torch.int64, got {dtype}")
        values, lengths = flattened("bags", bags)
        # where the device is said, nothing goes by way of torch's default
        here = None if device is None else "cpu"
        ids = ids_of(values, dtype, here)
        flat = None
        if weights is not None:
            numbers, weight_lengths = flattened("weights", weights)
            if weight_lengths != lengths:
                raise ValueError(f"`weights` must have the lengths of `bags`, {lengths}, got {weight_lengths}")
            try:
                flat = torch.tensor(numbers, dtype=torch.float32, device=here)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(f"`weights` must hold numbers: {error}") from error
        made = cls.from_lengths(ids, torch.tensor(lengths, dtype=torch.int64, device=here), flat)
        return made if device is None else made.to(device)

    @classmethod
    def from_lengths(cls, ids: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "Bags":
        """Bags from the number of ids in each; equals `offsets = [0, *cumsum(lengths)]`."""
        check_ids("ids", ids)
        check_ids("lengths", lengths)
        if ids.dim() != 1:
            raise ValueError(f"`ids` must have one dimension, got shape {tuple(ids.shape)}: use Bags.from_padded")
        if lengths.dim() != 1:
            raise ValueError(f"`lengths` must have one dimension, got shape {tuple(lengths.shape)}")
        offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
        if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            if bool((lengths < 0).any()):
                raise ValueError(f"`lengths` must not be negative, got {int(lengths.min())}")
            total = int(offsets[-1])
            if total != ids.shape[0]:
                raise ValueError(f"`lengths` must sum to the number of ids, {ids.shape[0]}, got a sum of {total}")
        return cls(ids, offsets, weights)

    @classmethod
    def from_padded(cls, ids: Tensor, padding_id: int | None = -1, weights: Tensor | None = None) -> "Bags":
        """Bags from a matrix `[B, K]`, one bag a row, whose places holding `padding_id` are empty.

        Equals `Bags.from_lists([[i for i in row if i != padding_id] for row in ids])`. `padding_id=None`: none is
        empty.
        """
        check_ids("ids", ids)
        if ids.dim() != 2:
            raise ValueError(f"`ids` must be [B, K], got shape {tuple(ids.shape)}")
        if weights is not None:
            check_weights(weights, ids)
        count, width = ids.shape
        if padding_id is None:
            offsets = torch.arange(count + 1, device=ids.device) * width
            return cls(ids.reshape(-1), offsets, None if weights is None else weights.reshape(-1))
        present = ids != padding_id
        return cls.from_lengths(ids[present], present.sum(1), None if weights is None else weights[present])

    @classmethod
    def from_sparse(
        cls, indices: Tensor, values: Tensor, dense_shape: Sequence[int] | Tensor, weights: Tensor | None = None
    ) -> "Bags":
        """Bags from TensorFlow's SparseTensor triple, rows in any order.

        All dimensions but the last count bags, in row-major order; within a bag ids keep the order they are given in.
        """
        return SparseIds(indices, values, dense_shape).to_bags(weights)

    @classmethod
    def from_nested(cls, ids: Tensor, weights: Tensor | None = None) -> "Bags":
        """Bags from a jagged nested tensor `[B, *]`, without a copy."""
        check_jagged("ids", ids)
        if weights is not None:
            check_jagged("weights", weights)
            check_same_lengths("weights", weights, ids)
            weights = weights.values()
        # offsets() is a method of nested tensors alone
        offsets: Tensor = ids.offsets()  # type: ignore[attr-defined]
        return cls(ids.values(), offsets, weights)

    @classmethod
    def from_arrow(cls, column: Any, weights: Any = None) -> "Bags":
        """Bags from a pyarrow list column (`ListArray` or `LargeListArray`; one chunk), sharing its memory.

        A null list is an empty bag; null ids are refused.
        """
        ids, offsets = _from_list_array("column", column)
        flat = None
        if weights is not None:
            flat, weight_offsets = _from_list_array("weights", weights)
            if not torch.equal(weight_offsets, offsets):
                raise ValueError("`weights` must have lists of the lengths of `column`")
        return cls(ids, offsets, flat)

    @classmethod
    def from_keyed_jagged(cls, features: Any) -> dict[str, "Bags"]:
        """One `Bags` for each key of a `torchrec.KeyedJaggedTensor` (anything with `to_dict()` of jagged tensors)."""
        return {
            key: cls(jagged.values(), jagged.offsets(), jagged.weights_or_none())
            for key, jagged in features.to_dict().items()
        }

    # --- as a value ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self.offsets.shape[0]) - 1

    @property
    def device(self) -> torch.device:
        """Where the ids are."""
        return self.ids.device

    def lengths(self) -> Tensor:
        """Number of ids in each bag, int64 `[B]`."""
        return self.offsets.diff()

    def to_lists(self) -> list[list[int]]:
        """The ids as nested Python lists."""
        ids, offsets = self.ids.tolist(), self.offsets.tolist()
        return [ids[a:b] for a, b in itertools.pairwise(offsets)]

    def to(self, device: Any, non_blocking: bool = False) -> "Bags":
        """The same bags on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Bags":
        """The same bags in page-locked memory, for asynchronous copies to a GPU; also what a DataLoader calls."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Any) -> "Bags":
        return _unchecked(
            change(self.ids), change(self.offsets), None if self.weights is None else change(self.weights)
        )

    def __repr__(self) -> str:
        weighted = "" if self.weights is None else ", weighted"
        return f"Bags({len(self)} bags, {self.ids.shape[0]} ids{weighted}, {self.ids.dtype}, {self.device})"


class SparseIds:
    """TensorFlow's SparseTensor of ids: `values[i]` stands at `indices[i]` of a tensor of `dense_shape`.

    Args:
        indices: int64 `[nnz, rank]`, rows in any order.
        values: int32 or int64 `[nnz]`.
        dense_shape: `rank` sizes; the last dimension is the one that is pooled.
    """

    def __init__(self, indices: Tensor, values: Tensor, dense_shape: Sequence[int] | Tensor) -> None:
        check_ids("indices", indices)
        check_sparse_values(values)
        if values.dim() != 1:
            raise ValueError(f"`values` must have one dimension, [nnz], got shape {tuple(values.shape)}")
        try:
            sizes = dense_shape.tolist() if isinstance(dense_shape, Tensor) else dense_shape
            shape = tuple(int(size) for size in sizes)
        except (TypeError, ValueError) as error:
            raise TypeError(f"`dense_shape` must be a sequence of sizes, got {dense_shape!r}") from error
        if len(shape) < 2:
            raise ValueError(f"`dense_shape` must have at least 2 sizes, got {shape}: a bag is its last dimension")
        if min(shape) < 0:
            raise ValueError(f"`dense_shape` must hold sizes of at least 0, got {shape}")
        if indices.device != values.device:
            raise ValueError(f"`indices` must be on the device of `values`, {values.device}, got {indices.device}")
        if indices.dim() != 2 or indices.shape != (values.shape[0], len(shape)):
            raise ValueError(
                f"`indices` must be [nnz, rank] = [{values.shape[0]}, {len(shape)}], got {tuple(indices.shape)}"
            )
        if indices.device.type == "cpu" and indices.shape[0] and not torch.compiler.is_compiling():
            outside = ((indices < 0) | (indices >= torch.tensor(shape, device=indices.device))).any(1)
            if bool(outside.any()):
                first = int(outside.nonzero()[0])
                raise ValueError(
                    f"`indices` must lie inside `dense_shape` {shape}, got {indices[first].tolist()} at row {first}"
                )
        self.indices, self.values, self.dense_shape = indices, values, shape

    def to_bags(self, weights: Tensor | None = None) -> Bags:
        """The bags of all leading dimensions, in row-major order."""
        if weights is not None:
            check_weights(weights, self.values)
        bag = torch.zeros_like(self.indices[:, 0])
        count = 1
        for axis, size in enumerate(self.dense_shape[:-1]):
            bag = bag * size + self.indices[:, axis]
            count *= size
        values, edges = self.values, torch.arange(count + 1, device=bag.device, dtype=bag.dtype)
        # whether they are sorted already is known without waiting on a CPU only
        untraced = bag.device.type == "cpu" and not torch.compiler.is_compiling()
        if not (untraced and bool((bag[1:] >= bag[:-1]).all())):
            bag, order = torch.sort(bag, stable=True)
            values, weights = values[order], None if weights is None else weights[order]
        offsets = torch.searchsorted(bag, edges).to(torch.int64)
        return _unchecked(values, offsets, weights)

    def __repr__(self) -> str:
        return f"SparseIds(shape {self.dense_shape}, {self.values.shape[0]} ids, {self.values.dtype})"


class Batch(Protocol):
    """What has ids in bags, as `Bags` and `Csr` do."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor | None: ...


def joined(parts: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor | None]:
    """`ids`, `offsets` and `weights` of the bags of all parts, one after the other; nothing waits for a device."""
    kind = torch.int64 if len({part.ids.dtype for part in parts}) > 1 else parts[0].ids.dtype
    ids = torch.cat([part.ids.to(kind) for part in parts])
    offsets, start = [], 0
    for part in parts:
        offsets.append(part.offsets[:-1] + start)
        start += part.ids.shape[0]
    offsets.append(parts[-1].offsets[-1:] + (start - parts[-1].ids.shape[0]))
    weights = None
    if any(part.weights is not None for part in parts):
        dtype = next(part.weights.dtype for part in parts if part.weights is not None)
        weights = torch.cat(
            [torch.ones_like(p.ids, dtype=dtype) if p.weights is None else p.weights.to(dtype) for p in parts]
        )
    return ids, torch.cat(offsets), weights


def _unchecked(ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Bags:
    made = object.__new__(Bags)
    made.ids, made.offsets, made.weights = ids, offsets, weights
    _mark_dynamic(made)
    return made


def _mark_dynamic(bags: Bags) -> None:
    if not torch.compiler.is_compiling():
        mark_dynamic(bags.ids, bags.offsets, bags.weights)


def _from_list_array(name: str, column: Any) -> tuple[Tensor, Tensor]:
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
        if hasattr(column, "chunks"):
            column = column.chunk(0)
    if not hasattr(column, "offsets") or not hasattr(column, "values"):
        kind = getattr(column, "type", type(column).__name__)
        raise TypeError(f"`{name}` must be a pyarrow list array, got {kind}: cast it to pa.list_(pa.int64())")
    if column.null_count:
        lengths = [0 if n is None else n for n in column.value_lengths().to_pylist()]
        values = column.flatten()
        offsets = torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0)
    else:
        raw = torch.utils.dlpack.from_dlpack(column.offsets)
        values = column.values.slice(int(raw[0]), int(raw[-1] - raw[0]))
        offsets = raw.to(torch.int64) - int(raw[0])
    if values.null_count:
        raise ValueError(f"`{name}` must hold no nulls in its lists, got {values.null_count}: fill or drop them")
    try:
        return torch.utils.dlpack.from_dlpack(values), offsets
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise TypeError(f"`{name}` must hold lists of numbers, got {column.type}: hash or look up strings") from error


def _tensors(bags: Bags) -> list[Tensor | None]:
    tensors = [bags.ids, bags.offsets, bags.weights]
    mark_static(*tensors)
    return tensors


# a saved export holds examples of its inputs
torch.serialization.add_safe_globals([Bags])
# lets torch.export, vmap and DataLoader workers see the tensors inside
torch.utils._pytree.register_pytree_node(
    Bags,
    lambda bags: (_tensors(bags), None),
    lambda children, _context: _unchecked(*children),
    flatten_with_keys_fn=lambda bags: (
        [(torch.utils._pytree.GetAttrKey(n), t) for n, t in zip(Bags.__slots__, _tensors(bags), strict=True)],
        None,
    ),
    serialized_type_name="embedfuse.torch.Bags",
    to_dumpable_context=lambda _context: "",
    from_dumpable_context=lambda _text: None,
)
