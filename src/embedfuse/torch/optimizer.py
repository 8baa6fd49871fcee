"""`FusedOptimizer`: a `torch.optim.Optimizer` over the tables of embedding collections."""

import copy
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import Optimizer, resolve
from . import update
from .initializers import tensor_of
from .learning_rates import LearningRates, rates_of_tables
from .ledger import Record, learning
from .pending import PendingGradient
from .saved_settings import settings_in
from .state import GroupState, ordinary_tensors
from .step_hooks import with_hooks
from .stepped_tables import collections_of, names_of, optimizer_of, seed_of
from .update import Work
from .usual_step import UsualStep, Waiting, step_again, usual_steps

_GRAD = operator.attrgetter("grad")


class FusedOptimizer(torch.optim.Optimizer):
    """Steps the tables of one or more collections, each table by its own rule, all in one pass per storage type.

    Behaves as any torch optimizer: gradients of several backwards add up until `step()`, `zero_grad()` drops them,
    learning-rate schedulers and `GradScaler` work through `param_groups` and `.grad`. Two differences: `step()` uses
    the gradients up, so that stepping twice after one backward steps once; and `model.zero_grad()` does not reach them,
    only this optimizer's `zero_grad()` does.

    There is one entry in `param_groups` for each distinct optimizer, with its learning rate under `"lr"`; one that is a
    function is called at each step, whatever a scheduler wrote there. State is `state[table][slot]`, sharing memory
    with what the kernels use.

    Args:
        modules: collections, or modules that contain them.
        default: optimizer of tables that have none from their `TableConfig` or their collection.
        seed: of the stochastic rounding of tables that ask for it.

    Raises:
        ValueError: no collection found, a table without an optimizer, or a collection in `"autograd"` mode.
    """

    def __init__(self, *modules: nn.Module, default: Optimizer | str | None = None, seed: int = 0) -> None:
        self._collections = collections_of(modules)
        default = resolve(default)
        self._given = modules, default, seed
        chosen = {
            (number, name): optimizer_of(collection, name, default)
            for number, collection in enumerate(self._collections)
            for name in collection.tables
        }
        with ordinary_tensors():
            self._states: list[list[GroupState]] = [
                [
                    GroupState(
                        group.arena,
                        [chosen[number, name] for name in group.arena.names],
                        [seed_of(collection, number, name, seed) for name in group.arena.names],
                    )
                    for group in collection._groups
                ]
                for number, collection in enumerate(self._collections)
            ]
        self._optimizers = list(dict.fromkeys(chosen.values()))
        self._names = names_of(modules, self._collections)
        groups: list[dict[str, Any]] = [
            {
                "params": [self._collections[n].tables[name] for (n, name), own in chosen.items() if own == optimizer],
                "lr": optimizer.current_learning_rate(),
                "optimizer": optimizer.describe()["name"],
            }
            for optimizer in self._optimizers
        ]
        self._group_of = {key: self._optimizers.index(optimizer) for key, optimizer in chosen.items()}
        # for each table of each state, its entry in `param_groups`
        self._groups = {
            state: [self._group_of[number, name] for name in state.arena.names]
            for number, states in enumerate(self._states)
            for state in states
        }
        self._pending = PendingGradient.of(self._waiting, self._drop)
        self._usual: dict[GroupState, UsualStep | None] = {}
        self._seen: list[nn.Parameter] = []
        self._changes: list[int] = []
        super().__init__(groups, {})
        self._complete = True
        self._rates = LearningRates(self._optimizers, self.param_groups)
        # tells GradScaler to hand over scale and inf flag as tensors, instead of waiting for the device
        self._step_supports_amp_scaling = True
        self._fill_state()
        for number, collection in enumerate(self._collections):
            collection._ledger.optimizer = weakref.ref(self)
            if collection.update == "backward":
                collection._ledger.on_backward = self._on_backward(number)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: groups follow from the tables' optimizers."""
        if getattr(self, "_complete", False):
            raise NotImplementedError(
                "a FusedOptimizer steps the tables of its modules only: give other parameters to a torch optimizer"
            )
        super().add_param_group(param_group)

    # --- stepping --------------------------------------------------------------------------------------------------

    @with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every table that was looked up since the last step, by the sum of its gradients.

        Args:
            closure: computes the loss again and returns it, as for any torch optimizer.

        Raises:
            RuntimeError: a gradient was changed in place after backward, or a table has a `.grad`; nothing is changed.
            ValueError: a learning rate that cannot be; nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        alone, rates = self._alone(), None
        usual = usual_steps(self._usual, alone, self._groups)
        if usual is not None:
            self._check([record for _, record, _ in alone])
            rates = self._rates.now(self.param_groups)
            if self._rates.functions:
                # which may have done anything
                alone = self._alone()
                usual = usual_steps(self._usual, alone, self._groups)
                self._check(self._waiting())
            if usual is not None:
                alone = step_again(usual, alone, rates)
                if not alone:
                    self._drop()
                    return loss
        with ordinary_tensors():
            self._step(alone, rates)
        return loss

    def _step(self, alone: Waiting, rates: list[float] | None) -> None:
        self._settle()
        waiting = self._waiting()
        if rates is None:  # else they were, and rows may have changed since
            self._check(waiting)
        # once for a step, since they may be functions that count
        rates = self._rates.now(self.param_groups) if rates is None else rates
        grad_scale, skip = self._scaling(waiting)
        every = [self._work(*one, rates) for one in self._by_group()]
        # up to here nothing has changed, should anything have been refused
        for work in every:
            if work is not None:
                update.run(work, grad_scale, skip)
        stepped = {work.state for work in every if work is not None}
        for state, record, _ in alone:
            if state in stepped:
                self._usual[state] = UsualStep.of(state, record, rates, self._groups[state])
        self._drop()

    def _alone(self) -> Waiting:
        """What waits, if it is one lookup of each of some groups, and nothing scales their gradients; else nothing."""
        mine = self.__dict__
        if self._pending.marker is not None or mine.get("grad_scale") is not None or mine.get("found_inf") is not None:
            return []
        found: Waiting = []
        for number, collection in enumerate(self._collections):
            records = collection._ledger.records
            if len(records) > 1 and len({record.group for record in records}) < len(records):
                return []
            for record in records:
                found.append((self._states[number][record.group], record, collection._ledger))
        return found

    def _work(self, number: int, group: int, records: list[Record], rates: list[float]) -> Work | None:
        learns = learning(records)
        if not any(learns):
            return None
        state = self._states[number][group]
        mine = rates_of_tables(rates, self._groups[state])
        return Work(state, update.ready(records, state.arena.buffer, learns), learns, mine, state.hyper_of(mine))

    def _on_backward(self, number: int) -> Callable[[Record], None]:
        # the optimizer lives as long as the tables: nobody else can give them their gradient
        def apply(record: Record) -> None:
            with ordinary_tensors():
                state, rates = self._states[number][record.group], None
                usual = self._usual.get(state)
                if usual is not None and usual.fits(record):
                    rates = self._rates.now(self.param_groups)
                    # a rate may be a function, which may do anything
                    if usual.fits(record) and usual.again(record, usual.change_of(rates)):
                        return
                self._settle()
                rates = self._rates.now(self.param_groups) if rates is None else rates
                work = self._work(number, record.group, [record], rates)
                if work is not None:
                    update.run(work, None, None)
                    self._usual[work.state] = UsualStep.of(state, record, rates, self._groups[state])

        return apply

    def _waiting(self) -> list[Record]:
        return [record for collection in self._collections for record in collection._ledger.records]

    def _by_group(self) -> Iterator[tuple[int, int, list[Record]]]:
        for number, collection in enumerate(self._collections):
            records = collection._ledger.records
            for group in range(len(self._states[number])):
                mine = [record for record in records if record.group == group]
                if mine:
                    yield number, group, mine

    def _settle(self) -> None:
        """Follows tables that were moved, converted or replaced."""
        # all before any is followed, since one may be refused
        for collection in self._collections:
            collection._settle()
        moved = False
        for collection, states, changes in zip(self._collections, self._states, self._changes, strict=True):
            for state in states:
                moved |= state.follow()
            moved |= changes != collection.tables._changes
        if moved:
            self._fill_state()

    def _check(self, waiting: list[Record]) -> None:
        for record in waiting:
            record.check()
        # a loop over hundreds of tables takes longer than a launch
        if [None] * len(self._seen) != list(map(_GRAD, self._seen)):
            table = next(table for table in self._seen if table.grad is not None)
            name = next(name for name, own, *_ in self._tables() if own is table)
            raise RuntimeError(
                f"table {name!r} has a `.grad`, which FusedOptimizer does not use: it came from the table itself, "
                'as a penalty on its values gives, and not from a lookup. Use update="autograd" with a torch '
                "optimizer, or `weight_decay_factor` of the optimizer, and set `.grad` to None"
            )

    def _scaling(self, waiting: list[Record]) -> tuple[Tensor | None, Tensor | None]:
        self._pending.keep_factors(waiting)
        scale = None if self._pending.marker is None else self._pending.marker[0]
        # GradScaler sets these two for the time of the step
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if isinstance(grad_scale, Tensor):
            factor = 1 / grad_scale
            scale = factor if scale is None else scale * factor
        return scale, found_inf if isinstance(found_inf, Tensor) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients that wait for `step()`."""
        self._drop()

    def _drop(self) -> None:
        for collection in self._collections:
            collection._ledger.clear()
        self._pending.forget()

    def clip_grad_norm_(self, max_norm: float, parameters: Iterable[Tensor] = ()) -> Tensor:
        """Scales waiting gradients so that their total 2-norm is at most `max_norm`; returns the norm before.

        Equivalent to `torch.nn.utils.clip_grad_norm_([*tables, *parameters], max_norm)` with dense gradients of the
        tables: a row's contributions are added before they are squared. Costs a sort and a pass over the gradients.

        Args:
            max_norm: the largest norm allowed, ≥ 0.
            parameters: others, such as those of the dense part, to be clipped together with the tables.
        """
        if not max_norm >= 0:
            raise ValueError(f"`max_norm` must be a number of at least 0, got {max_norm!r}")
        total: Tensor | None = None
        with ordinary_tensors():
            self._settle()
            waiting = self._waiting()
            self._check(waiting)
            marker = self._pending.mark(waiting)
            for number, group, records in self._by_group():
                learns = learning(records)
                if any(learns):
                    state = self._states[number][group]
                    records = update.ready(records, state.arena.buffer, learns)
                    part = update.square_sum(state, records, learns).double()
                    total = part if total is None else total + part.to(total.device)
            if marker is not None and total is not None:
                total = total * marker[0].double() ** 2
            others = [p.grad for p in parameters if p.grad is not None]
            for grad in others:
                part = grad.detach().double().square().sum()
                total = part if total is None else total + part.to(total.device)
            if total is None:
                return torch.zeros((), device="cpu")
            norm = total.sqrt()
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            if marker is not None:
                marker[0] *= factor.to(marker.dtype)
            for grad in others:
                grad.mul_(factor.to(grad.device, grad.dtype))
            return norm.float()

    # --- state -----------------------------------------------------------------------------------------------------

    def _tables(self) -> Iterator[tuple[str, nn.Parameter, GroupState, int]]:
        for number, states in enumerate(self._states):
            for state in states:
                for index, name in enumerate(state.arena.names):
                    yield self._names[number, name], self._collections[number].tables[name], state, index

    def _fill_state(self) -> None:
        self._seen = [table for collection in self._collections for table in collection.tables.values()]
        self._changes = [collection.tables._changes for collection in self._collections]
        self.state.clear()
        for _, table, state, index in self._tables():
            self.state[table] = {slot: state.view(index, slot) for slot in state.names(index)}
            self.state[table]["step"] = state.steps[index]
        for number, group in enumerate(self.param_groups):
            keys = [key for key, mine in self._group_of.items() if mine == number]
            group["params"] = [self._collections[n].tables[name] for n, name in keys]
        self.param_groups[0]["params"].append(self._pending)

    def state_dict(self) -> dict[str, Any]:
        """State by table name and slot name, and the groups' learning rates and optimizers; plain data and tensors."""
        with ordinary_tensors():
            self._settle()
        return {
            "state": {
                name: {**{slot: state.view(index, slot) for slot in state.names(index)}, "step": state.steps[index]}
                for name, _, state, index in self._tables()
            },
            "param_groups": [
                {
                    **{k: v for k, v in group.items() if k != "params"},
                    "description": optimizer.describe(),
                    "tables": self._names_in(number),
                }
                for number, (group, optimizer) in enumerate(zip(self.param_groups, self._optimizers, strict=True))
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` gave, so that the next step is bit-identical.

        Learning rates, and all else that `param_groups` hold, are loaded for the tables they were saved of. Other
        hyper-parameters stay those of this optimizer.

        Raises:
            ValueError: tables, slots, shapes or kinds of optimizers that differ, or learning rates that differ within
                one of our groups; nothing is changed then.
        """
        copies, settings = self.checked(state_dict)
        with torch.no_grad():
            for target, value in copies:
                target.copy_(value)
        for group, theirs in zip(self.param_groups, settings, strict=True):
            group.update(theirs)
        self._rates.accept(self.param_groups)

    def checked(self, state_dict: dict[str, Any]) -> tuple[list[tuple[Tensor, Tensor]], list[dict[str, Any]]]:
        """What to copy where, and what each of our groups is to be; raises as `load_state_dict` does."""
        with ordinary_tensors():
            self._settle()
        given = state_dict["state"]
        copies: list[tuple[Tensor, Tensor]] = []
        names = [name for name, *_ in self._tables()]
        if sorted(given) != sorted(names):
            raise ValueError(f"`state_dict` must hold the tables {sorted(names)}, got {sorted(given)}")
        names_in = [self._names_in(number) for number in range(len(self._optimizers))]
        settings = settings_in(state_dict["param_groups"], self._optimizers, names_in)
        for name, _, state, index in self._tables():
            targets = {slot: state.view(index, slot) for slot in state.names(index)} | {"step": state.steps[index]}
            if given[name].keys() != targets.keys():
                raise ValueError(f"table {name!r} must have the slots {sorted(targets)}, got {sorted(given[name])}")
            for slot, target in targets.items():
                value = tensor_of(given[name][slot], target)
                if value.shape != target.shape:
                    raise ValueError(
                        f"slot {slot!r} of table {name!r} must have shape {list(target.shape)}, got {list(value.shape)}"
                    )
                copies.append((target, value))
        return copies, settings

    def _names_in(self, number: int) -> list[str]:
        return [self._names[key] for key, group in self._group_of.items() if group == number]

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedOptimizer":
        """An optimizer over copies of the modules, the same ones if they are copied along; no gradients wait for it."""
        modules, default, seed = self._given
        made = type(self)(*copy.deepcopy(modules, memo), default=default, seed=seed)
        memo[id(self)] = made
        made.load_state_dict(self.state_dict())
        return made

    def __getstate__(self) -> Any:
        raise TypeError(
            "a FusedOptimizer cannot be pickled, as its state belongs to tables elsewhere: save its `state_dict()`, or "
            "use embedfuse.torch.save"
        )
