"""A safe sparse lookup in plain PyTorch operations: what `do_fusion=False` runs, and the fused one is compared with."""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ..bags import Bags


def plain_lookup(table: Tensor, bags: Bags, combiner: str, max_norm: float | None, sparse: bool) -> Tensor:
    """One feature: mask, gather, cut, weigh, sum over segments, divide.

    Ids that do not count get row 0 and weight 0, so that no size depends on the data.

    Args:
        table: `[V, D]`.
        bags: the ids; a negative one counts as absent, and so does, unless they are summed, one of a weight
            that is not above 0.
        combiner: "mean", "sum" or "sqrtn".
        max_norm: rows longer than this are cut to it.
        sparse: give the table a sparse gradient.
    """
    ids = bags.ids.long()
    count = bags.offsets.shape[0] - 1
    kind = torch.promote_types(table.dtype, torch.float32)
    here = ids >= 0
    weights = torch.ones_like(ids, dtype=kind) if bags.weights is None else bags.weights.to(kind)
    if bags.weights is not None and combiner != "sum":
        here = here & (bags.weights > 0)
    weights = weights.masked_fill(~here, 0)
    rows = embedding(ids.masked_fill(~here, 0), table, sparse=sparse).to(kind)
    if max_norm is not None:
        rows = cut(rows, max_norm)
    bag = torch.repeat_interleave(torch.arange(count, device=ids.device), bags.offsets.diff(), output_size=ids.shape[0])
    sums = rows.new_zeros(count, table.shape[1]).index_add(0, bag, rows * weights[:, None])
    if combiner != "sum":
        moment = weights.new_zeros(count).index_add(0, bag, weights if combiner == "mean" else weights * weights)
        empty = moment == 0
        divisor = moment.masked_fill(empty, 1)
        sums = sums / (divisor if combiner == "mean" else divisor.sqrt())[:, None]
    return sums.to(table.dtype)


def cut(rows: Tensor, max_norm: float) -> Tensor:
    """Rows longer than `max_norm` scaled to that length; differentiable, at zero too."""
    square = rows.square().sum(1, keepdim=True)
    long = square > max_norm * max_norm
    length = torch.where(long, square, 1).sqrt()
    return torch.where(long, rows * (max_norm / length), rows)
