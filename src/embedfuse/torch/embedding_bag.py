"""Drop-ins for `torch.nn.EmbeddingBag` and `torch.nn.functional.embedding_bag`: change the import, nothing else.

Where torch's own are wrong, these are right: ids after the last offset do not count, `scale_grad_by_freq` divides each
row by its own count, and 16-bit tables are summed in float32. They also take what torch refuses: weights with every
mode but max, weights of another dtype than the table's, `mode="sqrtn"`, ids of any number of dimensions, bags without
places, and double backward.
"""

import warnings

import torch
from torch import Tensor

from ..combiners import COMBINERS
from ..plan import DROP_NEGATIVE_IDS
from . import one_table
from .backends import BadId, accumulation_dtype
from .bag_arguments import FLOAT_TYPES, read, read_nested, without
from .functions import is_transformed, is_watched
from .max_norm import shorten_rows

MODES = ("sum", "mean", "sqrtn", "max")


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sums, means or maxima of bags of rows of `weight`, without the gathered rows ever being in memory.

    Equivalent, for 1-D `input`, to

        bags = [weight[input[start:end]] for start, end in zip(offsets, [*offsets[1:], len(input)])]
        torch.stack([bag.mean(0) if len(bag) else torch.zeros(dim) for bag in bags])

    with `w` for `per_sample_weights` (ones if None): "sum" is `Σ w·row`, "mean" `Σ w·row / Σ w`, "sqrtn"
    `Σ w·row / √Σ w²`, "max" the largest element. A bag without ids, or whose denominator is 0, gives zeros.

    Args:
        input: integer ids; 1-D with `offsets`, or `[..., K]`, the last dimension being the bag, or jagged nested.
        weight: `[V, D]`, of any float dtype.
        offsets: where each bag starts, `[B]`; first 0, not decreasing, not beyond `input`.
        max_norm: rows that are looked up and whose norm exceeds this are scaled to it first, in place.
        norm_type: the p of that norm.
        scale_grad_by_freq: divides the gradient of each row by how often it is looked up.
        mode: "sum", "mean", "sqrtn" or "max".
        sparse: the gradient of `weight` is a sparse tensor that holds each row once (compiled: followed by zeros).
        per_sample_weights: any float dtype, of the shape of `input`; not with "max".
        include_last_offset: `offsets` is `[B + 1]`, the last entry ends the last bag; ids after it do not count.
        padding_idx: this id counts as absent; negative values count from the end.

    Returns:
        `[B, D]`, or `[..., D]`, of the dtype of `weight`.

    Raises:
        IndexError: an id outside of `[0, V)` (on a GPU at a later call, since checking must not wait).
        ValueError, TypeError: arguments that do not fit together.
        NotImplementedError: weights with "max".
    """
    if weight.dtype == torch.int64 and input.is_floating_point():
        warnings.warn(
            "embedding_bag(weight, input, ...) is deprecated: the order of arguments is (input, weight, ...)",
            stacklevel=2,
        )
        input, weight = weight, input
    _check(input, weight, mode, scale_grad_by_freq, sparse, per_sample_weights)
    if input.is_nested:
        input, offsets, per_sample_weights = read_nested(input, offsets, per_sample_weights)
        include_last_offset = True
    watched = is_watched(input, weight, offsets, per_sample_weights)
    readable = not watched and not is_transformed()
    ids, offsets, weights, shape, absent = read(input, offsets, per_sample_weights, include_last_offset, readable)
    rows, dim = weight.shape
    if max_norm is not None:
        _shorten(weight, ids if absent is None else torch.where(absent, -1, ids), max_norm, norm_type, watched)
    if padding_idx is not None:
        padding = ids == _wrapped(padding_idx, rows)
        absent = padding if absent is None else absent | padding
    flags = 0
    if absent is not None:
        ids, flags = without(ids, absent, rows), DROP_NEGATIVE_IDS
    if scale_grad_by_freq and weight.requires_grad:
        weight = _by_frequency(weight, ids, sparse and watched)
    if weights is not None:
        weights = weights.to(accumulation_dtype(weight.dtype)).contiguous()
    try:
        out = _look_up(weight, ids, offsets, weights, mode, flags, sparse, watched)
    except BadId as error:
        raise IndexError(_bad_id(input, rows, offsets, error.position)) from None
    return out if len(shape) == 1 else out.reshape(*shape, dim)


class EmbeddingBag(torch.nn.EmbeddingBag):
    """A table of embeddings that looks up sums, means or maxima of bags of its rows.

    Equivalent to `torch.nn.EmbeddingBag`, whose arguments, parameter `weight`, initial values and state dict it has,
    with `embedding_bag` of this package as its forward. `mode` may also be "sqrtn".
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Looks up a batch; see `embedding_bag`."""
        return embedding_bag(
            input, self.weight, offsets, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.mode, self.sparse,
            per_sample_weights, self.include_last_offset, self.padding_idx,
        )  # fmt: skip


def _look_up(
    weight: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: str, flags: int, sparse: bool,
    watched: bool,
) -> Tensor:  # fmt: skip
    features = one_table.descriptor(weight, "sum" if mode == "max" else mode, flags, watched)
    if mode == "max":
        return one_table.largest(weight, features, ids, offsets, "raise", watched)
    normalised = COMBINERS[mode].power != 0
    if sparse and weight.requires_grad and torch.is_grad_enabled():
        return one_table.pooled_sparse(weight, features, ids, offsets, weights, normalised, "raise", watched)
    return one_table.pooled(weight, features, ids, offsets, weights, normalised, "raise", watched)


def _check(
    input: Tensor, weight: Tensor, mode: str, scale_grad_by_freq: bool, sparse: bool, weights: Tensor | None
) -> None:
    if weight.dim() != 2:
        raise ValueError(f"`weight` must be [V, D], got shape {tuple(weight.shape)}")
    if weight.dtype not in FLOAT_TYPES:
        raise TypeError(f"`weight` must be float32, float16, bfloat16 or float64, got {weight.dtype}")
    if input.device != weight.device:
        raise ValueError(f"`input` must be on the device of `weight`, {weight.device}, got {input.device}")
    if mode not in MODES:
        raise ValueError(f"`mode` must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "max":
        if scale_grad_by_freq or sparse:
            name = "scale_grad_by_freq" if scale_grad_by_freq else "sparse"
            raise ValueError(f'`{name}` must be False with mode="max": choose another mode')
        if weights is not None:
            raise NotImplementedError(
                '`per_sample_weights` must be None with mode="max": scale the rows, or choose another mode'
            )


def _by_frequency(weight: Tensor, ids: Tensor, traced_and_sparse: bool) -> Tensor:
    if traced_and_sparse:
        raise NotImplementedError(
            "`scale_grad_by_freq` with `sparse=True` cannot be compiled: set one of them to False, or do not compile"
        )
    made: Tensor = one_table.DivideByFrequency.apply(weight, ids)  # type: ignore[no-untyped-call]
    return made


def _wrapped(padding_idx: int, rows: int) -> int:
    if not -rows <= padding_idx < rows:
        raise ValueError(f"`padding_idx` must lie in [-{rows}, {rows}), the rows of `weight`, got {padding_idx}")
    return padding_idx % rows


def _shorten(weight: Tensor, ids: Tensor, max_norm: float, norm_type: float, watched: bool) -> None:
    if watched:
        torch.ops.embedfuse.shorten_rows(weight.detach(), ids, float(max_norm), float(norm_type))
    else:
        shorten_rows(weight, ids, max_norm, norm_type)


def _bad_id(input: Tensor, rows: int, offsets: Tensor, position: int) -> str:
    """The message for the id at `position` of the flattened `input`."""
    place: list[int] = []
    rest = position
    for size in reversed(input.shape):
        place.insert(0, rest % size)
        rest //= size
    bag = int(torch.searchsorted(offsets, position, right=True)) - 1
    return (
        f"`input` must hold ids in [0, {rows}), the rows of `weight`, got {int(input[tuple(place)])} at "
        f"input{place}, in bag {bag}: clean the ids or enlarge the table"
    )
