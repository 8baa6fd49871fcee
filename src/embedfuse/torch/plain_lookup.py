"""A lookup that no gradient can be asked for, by the backend at once."""

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from . import ops
from .backends import Policy
from .functions import is_transformed
from .layout import Launch


def is_plain(weights: Tensor | None) -> bool:
    """Whether no gradient can be asked for of a lookup whose tables learn nothing."""
    return not (is_transformed() or (weights is not None and weights.requires_grad and torch.is_grad_enabled()))


def plain_lookup(
    buffer: Tensor, launch: Launch, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int, policy: Policy,
    owner: int,
) -> Tensor:  # fmt: skip
    """`PooledLookup` of a whole buffer, without its `Layout` and its look at every table."""
    ids, offsets, weights = unwrap_dead_wrappers((ids, offsets, weights))
    return ops.look_up(
        buffer, launch.features, ids, offsets, weights, bags, launch.width, launch.normalised, policy, owner
    )[0]
