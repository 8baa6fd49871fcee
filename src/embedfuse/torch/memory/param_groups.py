"""Parameter groups for torch optimizers: the rows of memories learn faster than the rest."""

from typing import Any

from torch import nn

from .value_table import ValueTable


def param_groups(model: nn.Module, lr: float, value_lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Two groups for a torch optimizer: the rows of all value tables, which do not decay, and everything else.

    A row is read by few tokens of a batch, so it wants a higher rate: 1e-3 where the rest has 2.5e-4 is what the first
    product-key memories used. Tables with `update="step"` or `"backward"` are left out: a `FusedOptimizer` steps those.
    A torch optimizer's own `weight_decay=` does not reach these groups, which carry theirs: give it here.

    Args:
        model: with or without memories; a shared table counts once.
        lr: of everything else.
        value_lr: of the rows.
        weight_decay: of everything else.

    Raises:
        ValueError: a rate that is not above 0.
    """
    for name, rate in (("lr", lr), ("value_lr", value_lr)):
        if not rate > 0:
            raise ValueError(f"`{name}` must be above 0, got {rate!r}")
    tables = [module for module in model.modules() if isinstance(module, ValueTable)]
    rows = {id(table.weight) for table in tables}
    values = [table.weight for table in tables if table.update == "autograd"]
    rest = [parameter for parameter in model.parameters() if id(parameter) not in rows]
    groups = [
        {"params": rest, "lr": lr, "weight_decay": weight_decay},
        {"params": values, "lr": value_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
