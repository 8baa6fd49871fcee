"""Our optimizers as a PyTorch user has them without us: `torch.optim` where it has the rule, else table by table."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from ..optim.base import apply_rule


class TorchOptimizers(torch.optim.Optimizer):
    """One optimizer over tables of different rules, each rule handed to a torch optimizer of its own.

    Args:
        tables: each parameter, the optimizer whose steps it makes, and whether its gradients are sparse.
    """

    def __init__(self, tables: Sequence[tuple[nn.Parameter, Optimizer, bool]]) -> None:
        # sparse and dense gradients apart, since together they keep torch from its quicker path for dense ones
        kinds = list(dict.fromkeys((rule, sparse) for _, rule, sparse in tables))
        self.parts = [_torch_form([table for table, *own in tables if tuple(own) == kind], *kind) for kind in kinds]
        # the groups are shared, so a scheduler that changes a rate here changes it there
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of every part, in order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class RowRule(torch.optim.Optimizer):
    """Any of our optimizers in plain PyTorch, table after table: gather the rows, apply the rule, put them back.

    Takes sparse gradients, whose rows are the ones that move, and dense ones, which move the whole table.
    """

    def __init__(self, tables: Sequence[nn.Parameter], rule: Optimizer) -> None:
        self.rule = rule
        super().__init__(tables, {"lr": rule.current_learning_rate()})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps every table that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if callable(self.rule.learning_rate):
                group["lr"] = self.rule.current_learning_rate()
            hyper = self.rule.hyper(group["lr"])
            for table in group["params"]:
                if table.grad is not None:
                    self._step_table(table, table.grad, hyper)
        return loss

    def _step_table(self, table: Tensor, grad: Tensor, hyper: tuple[float, ...]) -> None:
        state = self.state[table]
        if not state:
            state["step"] = 0
            for slot in self.rule.slots():
                shape = table.shape if slot.per == "element" else (len(table), 1)
                state[slot.name] = torch.full(shape, slot.initial, dtype=table.dtype, device=table.device)
        state["step"] += 1
        rows: Any = slice(None)
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, grad = grad.indices()[0], grad.values()
        slots = tuple(state[slot.name][rows] for slot in self.rule.slots())
        new, slots = apply_rule(type(self.rule), table[rows], grad, slots, hyper, state["step"], torch)
        table[rows] = new
        for slot, value in zip(self.rule.slots(), slots, strict=True):
            state[slot.name][rows] = value


def moves_only_touched(rule: Optimizer) -> bool:
    """Whether a gradient of 0 leaves a row as it is, so that dense gradients make the same step as sparse ones."""
    still = type(rule) in (Adagrad, RowWiseAdagrad) or (type(rule) is SGD and not rule.momentum)
    return still and not rule.weight_decay_factor


def _torch_form(tables: list[nn.Parameter], rule: Optimizer, sparse: bool) -> torch.optim.Optimizer:
    """The torch optimizer that makes the steps of `rule`."""
    rate = rule.current_learning_rate()
    plain = (
        rule.clipvalue is None
        and not rule.weight_decay_factor
        and (rule.clip_weight_min, rule.clip_weight_max) == (None, None)
        and not callable(rule.learning_rate)
    )
    if plain and type(rule) is Adagrad:
        return torch.optim.Adagrad(
            tables, lr=rate, initial_accumulator_value=rule.initial_accumulator_value, eps=rule.epsilon
        )
    if plain and type(rule) is SGD and not rule.momentum:
        return torch.optim.SGD(tables, lr=rate)
    if plain and sparse and type(rule) is Adam and rule.bias_correction and rule.lazy_adam:
        return torch.optim.SparseAdam(tables, lr=rate, betas=(rule.beta_1, rule.beta_2), eps=rule.epsilon)
    return RowRule(tables, rule)
