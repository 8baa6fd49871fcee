"""Backwards that cannot be differentiated themselves: an error that says so, and the way out."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class _Refusal(torch.autograd.Function):
    """`(gradient, message, *sources) → gradient`, whose own gradient is refused."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, message: str, *_sources: Tensor) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        raise NotImplementedError(ctx.message)


def differentiable_once(message: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a `backward` raise NotImplementedError with that message when its results are differentiated.

    As `torch.autograd.function.once_differentiable`, which has a message of its own.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def wrapper(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                made = backward(ctx, *grads)
            sources = [x for x in (*grads, *ctx.saved_tensors) if isinstance(x, Tensor) and x.requires_grad]
            if not sources:
                return made
            refused: Any = _Refusal.apply
            return tuple(refused(x, message, *sources) if isinstance(x, Tensor) else x for x in made)

        return wrapper

    return decorate
