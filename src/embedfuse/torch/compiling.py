"""Small helpers around torch.compile that do not import the compiler."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

# what torch's `maybe_mark_dynamic` leaves on a tensor, what its other functions do, and what we do
_MARK, _ANY_MARK = "_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"
_OTHER_MARKS = {"_dynamo_dynamic_indices", "_dynamo_static_indices", "_dynamo_unbacked_indices"}
_OURS = "_embedfuse_marked"
Function = TypeVar("Function", bound=Callable[..., Any])
EVERY_TIME = [torch.Tag.cudagraph_unsafe]
"""Tags of all ops here: inductor's own CUDA graphs leave them out. A replay would skip what bodies do besides launching
kernels, note lookups and see where tables lie, and what they keep of a first call would lie in the graph's memory."""


def constant_in_graphs(function: Function) -> Function:
    """Marks a function whose result a compiled graph takes for a constant, made anew for each graph.

    What `torch.compiler.assume_constant_result` does, which imports the whole compiler, for seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`, which the Dynamo of torch 2.11 takes for true whenever it compiles."""
    return torch.compiler.is_exporting()


def mark_static(*tensors: Tensor | None) -> None:
    """Takes back what `mark_dynamic` did: to torch.export sizes are what its caller says, or nothing loads again."""
    for tensor in tensors:
        if hasattr(tensor, _OURS):
            others = vars(tensor).keys() & _OTHER_MARKS
            for name in (_OURS, _MARK, *([] if others else [_ANY_MARK])):
                if hasattr(tensor, name):
                    delattr(tensor, name)


def mark_dynamic(*tensors: Tensor | None) -> None:
    """Tells torch.compile, if it is in use, that first sizes change from batch to batch: saves a recompilation."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        for tensor in tensors:
            # a tree may hold anything in their places
            if isinstance(tensor, Tensor):
                dynamo.maybe_mark_dynamic(tensor, 0)
                setattr(tensor, _OURS, True)
