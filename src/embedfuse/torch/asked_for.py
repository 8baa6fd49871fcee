"""What a backward is asked for: not all that its graph could give."""

from typing import Any

import torch

_keeps_graph: Any = torch._C._autograd._get_current_graph_task_keep_graph


def is_asked_for(ctx: Any) -> bool:
    """Whether the first input is to get a gradient, asked in the backward of a Function.

    `torch.autograd.grad(loss, weights)` and `backward(inputs=weights)` go on to the weights alone, and yet
    `needs_input_grad` is true of the table.
    """
    # transforms have contexts of their own
    inputs = None if torch.compiler.is_compiling() else getattr(ctx, "next_functions", None)
    node = inputs[0][0] if inputs else None
    if node is None:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # it refuses leaves that were asked for by name
        return True


def may_come_again() -> bool:
    """Whether the graph of the backward that runs is kept for another."""
    return bool(_keeps_graph())
