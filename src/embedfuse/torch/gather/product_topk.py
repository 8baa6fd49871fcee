"""The best pairs of a product of scores: `a[i] + b[j]` over all i and j, without looking at all of them.

With both score vectors sorted, the pair of ranks (r, s) has (r + 1)(s + 1) - 1 others that are at least as good. So
only pairs with (r + 1)(s + 1) <= k can be among the best k: 119 of 1024 for k = 32, 1466 of 65536 for k = 256.

Order. Pairs are ordered by their exact sums, which the rounded ones that are returned may not tell apart: sums are made
in float64 together with their rounding errors. Equal sums: the lowest id first. An infinity counts as a number larger
than all finite ones (so `inf + 1` comes before `inf + 0`, and `inf - inf` is a 0 that is returned as NaN), a NaN as one
larger than infinity: as in `torch.topk` NaN comes first, and shows in the scores. Without such an order the bound above
would not hold for them.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import select
from ..bag_arguments import FLOAT_TYPES
from ..compiling import EVERY_TIME
from ..functions import is_transformed, is_watched

_lib: Any = torch.library.Library("embedfuse", "FRAGMENT")
_lib.define("product_topk_ids(Tensor scores_a, Tensor scores_b, SymInt k) -> Tensor", tags=EVERY_TIME)


def product_topk(
    scores_a: Tensor | Sequence[Tensor], scores_b: Tensor | None = None, k: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest sums of one score of `scores_a` and one of `scores_b`, and which ones they are.

    Equivalent, but for ties, to

        grid = scores_a[..., :, None] + scores_b[..., None, :]
        scores, ids = grid.flatten(-2).topk(k)

    Exact, sorted, and the same bit for bit in every run: equal sums come in the order of their ids. Gradients of the
    scores go to both inputs.

    Args:
        scores_a: `[..., n]` of any float dtype; or a sequence of two or more such tensors, in place of `scores_b` too.
        scores_b: `[..., m]`.
        k: how many, from 1 to `n * m`.

    Returns:
        `scores [..., k]`, falling, of the dtype that the inputs promote to (those of more than two inputs fall before
        they are rounded); and `ids [..., k]`, int64: `a * m + b`, and
        so on for more inputs (the last varies fastest).

    Raises:
        ValueError, TypeError: arguments that do not fit together, such as more pairs wanted than there are.
    """
    given = [scores_a, scores_b] if isinstance(scores_a, Tensor) else list(scores_a)
    if scores_b is not None and not isinstance(scores_a, Tensor):
        raise ValueError("`scores_b` must be left out where `scores_a` is a sequence of all score vectors")
    inputs = _checked(given, k)
    assert k is not None
    dtype = inputs[0].dtype
    for other in inputs[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    if any(scores.dtype != dtype for scores in inputs):
        inputs = [scores.to(dtype) for scores in inputs]
    if len(inputs) > 2:
        ids = _best_of_many(inputs, k)
    elif is_watched(*inputs):
        ids = torch.ops.embedfuse.product_topk_ids(*inputs, k)
    elif is_transformed():
        ids = _BestIds.apply(*inputs, k)  # type: ignore[no-untyped-call]
    else:
        scores, ids = best_pairs(inputs[0], inputs[1], k)
        if scores is not None and not (torch.is_grad_enabled() and any(part.requires_grad for part in inputs)):
            return scores, ids
    return _scores(inputs, ids), ids


def _checked(given: Sequence[Any], k: int | None) -> list[Tensor]:
    if len(given) < 2 or any(not isinstance(scores, Tensor) for scores in given):
        raise TypeError("`scores_a` and `scores_b` must be tensors, or `scores_a` a sequence of at least two tensors")
    first = given[0]
    for scores in given:
        if scores.dtype not in FLOAT_TYPES:
            raise TypeError(f"scores must be float32, float16, bfloat16 or float64, got {scores.dtype}")
        if scores.dim() == 0 or scores.dim() != first.dim() or scores.shape[:-1] != first.shape[:-1]:
            raise ValueError(
                f"scores must have the same dimensions but for the last, got shapes {tuple(first.shape)} and "
                f"{tuple(scores.shape)}"
            )
        if scores.device != first.device:
            raise ValueError(f"scores must be on one device, got {first.device} and {scores.device}")
    most = math.prod([scores.shape[-1] for scores in given])
    # no union: the compiler of torch 2.9 knows none
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise TypeError(f"`k` must be an integer, got {k!r}")
    if not 1 <= k <= most:
        raise ValueError(f"`k` must be from 1 to {most}, the number of sums there are, got {k}: use more keys")
    return list(given)


def _scores(inputs: Sequence[Tensor], ids: Tensor) -> Tensor:
    """The sums that `ids` name, rounded once for two inputs; differentiable."""
    dtype = inputs[0].dtype
    # 16-bit sums are rounded at the end
    wide = torch.promote_types(dtype, torch.float32)
    picked, rest = [], ids
    for scores in reversed(inputs):
        picked.append(_pick(scores, rest % scores.shape[-1]).to(wide))
        rest = rest // scores.shape[-1]
    total = picked.pop()
    while picked:
        total = total + picked.pop()
    return total.to(dtype)


# --- gradients ------------------------------------------------------------------------------------------------------


def _pick(scores: Tensor, index: Tensor) -> Tensor:
    """`scores.gather(-1, index)`, whose gradient is added up in a fixed order on GPUs too."""
    if scores.device.type != "cuda" or is_watched(scores) or is_transformed():
        return scores.gather(-1, index)
    picked: Tensor = _Pick.apply(scores, index)  # type: ignore[no-untyped-call]
    return picked


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = scores.shape[-1]
        return scores.gather(-1, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return _Spread.apply(grad, index, ctx.size), None  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        rows = grad.numel() // max(grad.shape[-1], 1)
        out = grad.new_zeros((*grad.shape[:-1], size))
        # sorts first, where `scatter_add` on a GPU would add in any order
        row = torch.arange(rows, device=grad.device)[:, None] * size
        place = (row + index.reshape(rows, -1)).flatten()
        out.view(-1).index_put_((place,), grad.reshape(-1), accumulate=True)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return _pick(grad, index), None, None


# --- which pairs ----------------------------------------------------------------------------------------------------


class _BestIds(torch.autograd.Function):
    """`best_ids` where `torch.func` transforms: batches of calls are one call."""

    @staticmethod
    def forward(scores_a: Tensor, scores_b: Tensor, k: int) -> Tensor:
        return best_ids(scores_a, scores_b, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        return None

    @staticmethod
    def vmap(info: Any, dims: Any, scores_a: Tensor, scores_b: Tensor, k: int) -> Any:
        both = [
            scores.expand(info.batch_size, *scores.shape) if dim is None else scores.movedim(dim, 0)
            for scores, dim in zip((scores_a, scores_b), dims, strict=False)
        ]
        return _BestIds.apply(*both, k), 0  # type: ignore[no-untyped-call]


def best_ids(scores_a: Tensor, scores_b: Tensor, k: int) -> Tensor:
    """The ids of the k best pairs, int64 `[..., k]`."""
    return best_pairs(scores_a, scores_b, k)[1]


def best_pairs(scores_a: Tensor, scores_b: Tensor, k: int) -> tuple[Tensor | None, Tensor]:
    """The k best pairs by the backend that serves the scores: their sums, if it makes them too, and their ids."""
    shape, n, m = scores_a.shape[:-1], scores_a.shape[-1], scores_b.shape[-1]
    flat_a = scores_a.detach().reshape(-1, n)
    flat_b = scores_b.detach().reshape(-1, m)
    if flat_a.shape[0] == 0:
        return None, torch.zeros((*shape, k), dtype=torch.int64, device=scores_a.device)
    name = select(scores_a.device, scores_a.dtype).name
    if name == "triton":
        # imported here, since Triton need not be installed
        from ..backends import triton_memory

        found = triton_memory.product_topk(flat_a, flat_b, k)
        if found is not None:
            return found[0].view(*shape, k), found[1].view(*shape, k)
    if name == "cpu" and _engine_has_it():
        from ... import cpu

        first, second = (
            # a single number of any stride counts as contiguous
            scores if scores.stride(1) == 1 else scores.clone(memory_format=torch.contiguous_format)
            for scores in (flat_a, flat_b)
        )
        ids = torch.empty((*shape, k), dtype=torch.int64, device=first.device)
        cpu.product_topk(first, second, ids.view(-1, k), threads=torch.get_num_threads())
        return None, ids
    return None, in_torch([flat_a, flat_b], k).view(*shape, k)


def _engine_has_it() -> bool:
    """Whether the installed engine was built from sources that have this op."""
    from ...cpu import _engine

    return hasattr(_engine, "product_topk")


_NAN = 1 << 20
"""How many infinities a NaN counts for."""


class _Sums(NamedTuple):
    """Sums in falling order, `[R, n]` each: `level` counts infinities, `value` and `error` are the rest, exactly."""

    level: Tensor  # int64: 1 for an infinity, -1 for a negative one, `_NAN` for NaN
    value: Tensor  # float64
    error: Tensor | None  # float64: what rounding took from `value`; None for nothing
    ids: Tensor  # int64


def in_torch(inputs: Sequence[Tensor], k: int) -> Tensor:
    """The ids of the k best sums in plain PyTorch, `[R, k]`; any device, any k, any number of inputs.

    Of three or more inputs, sums of the first ones are rounded to float64 before the next is added.
    """
    best = _sorted(inputs[0], k)
    for scores in inputs[1:]:
        best = _merged(best, _sorted(scores, k), scores.shape[-1], k)
    return best.ids


def _best_of_many(inputs: Sequence[Tensor], k: int) -> Tensor:
    with torch.no_grad():
        flat = [scores.detach().reshape(-1, scores.shape[-1]) for scores in inputs]
        return in_torch(flat, k).view(*inputs[0].shape[:-1], k)


def _level(scores: Tensor) -> Tensor:
    infinite = torch.isinf(scores).long() * torch.sign(scores).nan_to_num().long()
    return torch.where(torch.isnan(scores), _NAN, infinite)


def _sorted(scores: Tensor, k: int) -> _Sums:
    level = _level(scores)
    value = torch.where(level == 0, scores.double(), 0.0)
    ids = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    return _ordered(_Sums(level, value, None, ids), min(k, scores.shape[-1]))


def _ordered(sums: _Sums, k: int) -> _Sums:
    """The k best of each row, in order: sorts from the last criterion to the first keep what was before."""
    order = sums.ids.argsort(dim=-1, stable=True)
    for key in (sums.error, sums.value, sums.level):
        if key is not None:
            order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    level, value, error, ids = (None if part is None else part.gather(-1, order[..., :k]) for part in sums)
    assert level is not None and value is not None and ids is not None
    return _Sums(level, value, error, ids)


@cache
def staircase(n: int, m: int, k: int) -> tuple[list[int], list[int]]:
    """The ranks `(r, s)` with `(r + 1)(s + 1) <= k`, `r < n` and `s < m`, as two lists."""
    pairs = [(r, s) for r in range(min(n, k)) for s in range(min(m, k // (r + 1)))]
    return [r for r, _ in pairs], [s for _, s in pairs]


def _merged(left: _Sums, right: _Sums, size: int, k: int) -> _Sums:
    """The k best sums of one of `left` and one of `right`, the latter out of `size`."""
    device = left.ids.device
    r, s = (torch.tensor(ranks, device=device) for ranks in staircase(left.ids.shape[-1], right.ids.shape[-1], k))
    a, b = left.value[..., r], right.value[..., s]
    value = a + b
    # what the addition rounded away, exactly (Knuth's two-sum)
    part = value - a
    error = (a - (value - part)) + (b - part)
    # a sum of float64 may overflow
    error = torch.where(torch.isfinite(value), error, 0.0)
    sums = _Sums(left.level[..., r] + right.level[..., s], value, error, left.ids[..., r] * size + right.ids[..., s])
    return _ordered(sums, k)


# --- the op, for graphs ---------------------------------------------------------------------------------------------


def _body(scores_a: Tensor, scores_b: Tensor, k: int) -> Tensor:
    return best_ids(scores_a, scores_b, k)


_lib.impl("product_topk_ids", _body, "CompositeExplicitAutograd")


@torch.library.register_fake("embedfuse::product_topk_ids", lib=_lib)  # type: ignore[untyped-decorator]
def _(scores_a: Tensor, scores_b: Tensor, k: int) -> Tensor:
    return scores_a.new_empty((*scores_a.shape[:-1], k), dtype=torch.int64)
