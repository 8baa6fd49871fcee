"""Hooks around `Optimizer.step`, called only where there are any.

Torch wraps the `step` of every optimizer in a name for its profiler and two loops over hooks, which cost the host as
much as the launch of a kernel.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def with_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Makes of a `step` one that torch leaves alone, and that does all that torch's wrapper does."""
    hooked = Optimizer.profile_hook_step(step)

    def chosen(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # as they were given: hooks see them, and may change them
        return (hooked if _is_watched(self) else step)(self, *args, **kwargs)

    @wraps(step)
    def either(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return chosen(self, *args, **kwargs)
        # hooks may come after the function that calls this was compiled, so they are looked for outside of its graph
        return _outside_of_graphs(chosen)(self, *args, **kwargs)

    either.hooked = True  # type: ignore[attr-defined]
    return either


_outside: dict[Callable[..., Any], Callable[..., Any]] = {}


def _outside_of_graphs(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that breaks the graph of a compiled function which calls it: no graph can hold what it does."""
    if step not in _outside:
        # imported, since something compiles
        _outside[step] = torch._dynamo.disable(step)
    return _outside[step]


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether anybody watches the steps of an optimizer, or of all."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )
