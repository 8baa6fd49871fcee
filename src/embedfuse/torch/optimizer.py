"""`FusedOptimizer`: a `torch.optim.Optimizer` over the tables of embedding collections."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import Optimizer, from_description, resolve
from . import update
from .collection import EmbeddingCollection
from .ledger import Record
from .state import GroupState


class _PendingGradient(nn.Parameter):
    """Stands for all gradients that wait in the ledgers, where something asks a parameter for its `.grad`.

    Its gradient is `[1, 0]`, or `[1, inf]` if a waiting gradient is not finite. Whatever scales it, as
    `GradScaler.unscale_` does, scales the waiting gradients by the same factor: the first number is read back in
    `step()`.
    """

    source: "FusedOptimizer"
    _version: int
    _marker: Tensor | None

    @property
    def grad(self) -> Tensor | None:
        return self.source._proxy_gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.source.zero_grad()


class FusedOptimizer(torch.optim.Optimizer):
    """Steps the tables of one or more collections, each table by its own rule, all in one pass per storage type.

    Behaves as any torch optimizer: gradients of several backwards add up until `step()`, `zero_grad()` drops them,
    learning-rate schedulers and `GradScaler` work through `param_groups` and `.grad`. Two differences: `step()` uses
    the gradients up, so that stepping twice after one backward steps once; and `model.zero_grad()` does not reach them,
    only this optimizer's `zero_grad()` does.

    There is one entry in `param_groups` for each distinct optimizer, with its learning rate under `"lr"`. State is
    `state[table][slot]`, sharing memory with what the kernels use.

    Args:
        modules: collections, or modules that contain them.
        default: optimizer of tables that have none from their `TableConfig` or their collection.
        seed: of the stochastic rounding of tables that ask for it.

    Raises:
        ValueError: no collection found, a table without an optimizer, or a collection in `"autograd"` mode.
    """

    def __init__(self, *modules: nn.Module, default: Optimizer | str | None = None, seed: int = 0) -> None:
        self._collections = _collections_of(modules)
        default = resolve(default)
        chosen = {
            (number, name): _optimizer_of(collection, name, default)
            for number, collection in enumerate(self._collections)
            for name in collection.tables
        }
        self._states: list[list[GroupState]] = [
            [
                GroupState(
                    group.arena,
                    [chosen[number, name] for name in group.arena.names],
                    [_seed(collection, number, name, seed) for name in group.arena.names],
                )
                for group in collection._groups
            ]
            for number, collection in enumerate(self._collections)
        ]
        self._optimizers = list(dict.fromkeys(chosen.values()))
        self._names = _names(modules, self._collections)
        groups: list[dict[str, Any]] = [
            {
                "params": [self._collections[n].tables[name] for (n, name), own in chosen.items() if own == optimizer],
                "lr": optimizer.current_learning_rate(),
                "optimizer": optimizer.describe()["name"],
            }
            for optimizer in self._optimizers
        ]
        self._group_of = {key: self._optimizers.index(optimizer) for key, optimizer in chosen.items()}
        self._pending = _PendingGradient(torch.zeros(2))
        self._pending.source = self
        self._marker: Tensor | None = None
        self._marker_of: tuple[int, ...] = ()
        super().__init__(groups, {})
        self.param_groups[0]["params"].append(self._pending)
        # tells GradScaler to hand over scale and inf flag as tensors, instead of waiting for the device
        self._step_supports_amp_scaling = True
        self._fill_state()
        for number, collection in enumerate(self._collections):
            if collection.update == "backward":
                collection._ledger.on_backward = self._on_backward(number)

    # --- stepping --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every table that was looked up since the last step, by the sum of its gradients.

        Args:
            closure: computes the loss again and returns it, as for any torch optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = self._learning_rates()
        grad_scale, skip = self._scaling()
        for number, collection in enumerate(self._collections):
            records, collection_states = collection._ledger.records, self._states[number]
            for group, state in enumerate(collection_states):
                mine = [record for record in records if record.group == group]
                self._step_group(number, state, mine, rates, grad_scale, skip)
            collection._ledger.clear()
        self._marker = None
        return loss

    def _step_group(
        self, number: int, state: GroupState, records: list[Record], rates: list[float], grad_scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:  # fmt: skip
        learns = [table.requires_grad for table in state.arena.parameters]
        if not records or not any(learns):
            return
        state.follow()
        state.set_hyper([rates[self._group_of[number, name]] for name in state.arena.names])
        update.step(state, records, learns, grad_scale, skip)

    def _on_backward(self, number: int) -> Callable[[Record], None]:
        def apply(record: Record) -> None:
            with torch.no_grad():
                rates = self._learning_rates()
                self._step_group(number, self._states[number][record.group], [record], rates, None, None)

        return apply

    def _learning_rates(self) -> list[float]:
        for optimizer, group in zip(self._optimizers, self.param_groups, strict=True):
            if callable(optimizer.learning_rate):
                group["lr"] = optimizer.current_learning_rate()
        return [float(group["lr"]) for group in self.param_groups]

    def _scaling(self) -> tuple[Tensor | None, Tensor | None]:
        scale = self._marker[0] if self._marker is not None and self._marker_of == self._versions() else None
        # GradScaler sets these two for the time of the step
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if isinstance(grad_scale, Tensor):
            factor = 1 / grad_scale
            scale = factor if scale is None else scale * factor
        return scale, found_inf if isinstance(found_inf, Tensor) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients that wait for `step()`."""
        for collection in self._collections:
            collection._ledger.clear()
        self._marker = None

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
        marker = self._proxy_gradient()
        total: Tensor | None = None
        with torch.no_grad():
            for number, collection in enumerate(self._collections):
                for group, state in enumerate(self._states[number]):
                    mine = [record for record in collection._ledger.records if record.group == group]
                    learns = [table.requires_grad for table in state.arena.parameters]
                    if mine and any(learns):
                        state.follow()
                        part = update.square_sum(state, mine, learns).double()
                        total = part if total is None else total + part
            if marker is not None and total is not None:
                total = total * marker[0].double() ** 2
            others = [p.grad for p in parameters if p.grad is not None]
            for grad in others:
                part = grad.detach().double().square().sum()
                total = part if total is None else total + part.to(total.device)
            if total is None:
                return torch.zeros(())
            norm = total.sqrt()
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            if marker is not None:
                marker[0] *= factor.to(marker.dtype)
            for grad in others:
                grad.mul_(factor.to(grad.device, grad.dtype))
            return norm.float()

    def _versions(self) -> tuple[int, ...]:
        return tuple(collection._ledger.version for collection in self._collections)

    def _proxy_gradient(self) -> Tensor | None:
        records = [record for collection in self._collections for record in collection._ledger.records]
        if not records:
            return None
        if self._marker is None or self._marker_of != self._versions():
            with torch.no_grad():
                device = records[0].grad.device
                finite = [torch.isfinite(record.grad).all().to(device) for record in records]
                flag = torch.where(torch.stack(finite).all(), 0.0, float("inf"))
                self._marker = torch.stack([torch.ones_like(flag), flag])
            self._marker_of = self._versions()
        return self._marker

    # --- state -----------------------------------------------------------------------------------------------------

    def _tables(self) -> Iterator[tuple[str, nn.Parameter, GroupState, int]]:
        for number, states in enumerate(self._states):
            for state in states:
                for index, name in enumerate(state.arena.names):
                    yield self._names[number, name], self._collections[number].tables[name], state, index

    def _fill_state(self) -> None:
        for _, table, state, index in self._tables():
            self.state[table] = {slot: state.view(index, slot) for slot in state.names(index)}
            self.state[table]["step"] = state.steps[index]

    def state_dict(self) -> dict[str, Any]:
        """State by table name and slot name, and the groups' learning rates and optimizers; plain data and tensors."""
        return {
            "state": {
                name: {**{slot: state.view(index, slot) for slot in state.names(index)}, "step": state.steps[index]}
                for name, _, state, index in self._tables()
            },
            "param_groups": [
                {**{k: v for k, v in group.items() if k != "params"}, "description": optimizer.describe()}
                for group, optimizer in zip(self.param_groups, self._optimizers, strict=True)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` gave, so that the next step is bit-identical.

        Raises:
            ValueError: tables, slots or shapes that differ; nothing is changed then.
        """
        given, groups = state_dict["state"], state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"`state_dict` must have {len(self.param_groups)} param_groups, got {len(groups)}")
        for group, mine in zip(groups, self._optimizers, strict=True):
            theirs = from_description(group["description"])
            if type(theirs) is not type(mine):
                raise ValueError(
                    f"`state_dict` must be of the same optimizers, got {type(theirs).__name__} where this one has "
                    f"{type(mine).__name__}"
                )
        copies: list[tuple[Tensor, Tensor]] = []
        names = [name for name, *_ in self._tables()]
        if sorted(given) != sorted(names):
            raise ValueError(f"`state_dict` must hold the tables {sorted(names)}, got {sorted(given)}")
        for name, _, state, index in self._tables():
            state.follow()
            targets = {slot: state.view(index, slot) for slot in state.names(index)} | {"step": state.steps[index]}
            if given[name].keys() != targets.keys():
                raise ValueError(f"table {name!r} must have the slots {sorted(targets)}, got {sorted(given[name])}")
            for slot, target in targets.items():
                value = torch.as_tensor(given[name][slot])
                if value.shape != target.shape:
                    raise ValueError(
                        f"slot {slot!r} of table {name!r} must have shape {list(target.shape)}, got {list(value.shape)}"
                    )
                copies.append((target, value))
        for target, value in copies:
            target.copy_(value)
        for group, theirs in zip(self.param_groups, groups, strict=True):
            group.update({k: v for k, v in theirs.items() if k != "description"})
        self._fill_state()


def _collections_of(modules: Iterable[nn.Module]) -> list[EmbeddingCollection]:
    found: dict[EmbeddingCollection, None] = {}
    for module in modules:
        for child in module.modules():
            if isinstance(child, EmbeddingCollection):
                found[child] = None
    if not found:
        raise ValueError("`modules` must contain at least one EmbeddingCollection, got none")
    for collection in found:
        if collection.update == "autograd":
            raise ValueError(
                'a collection with update="autograd" gives its tables ordinary gradients: use a torch optimizer over '
                'its parameters, or update="step"'
            )
    return list(found)


def _seed(collection: EmbeddingCollection, number: int, name: str, seed: int) -> int:
    """A seed of its own for each table that rounds stochastically, 0 for the others; exact in float64."""
    if not collection.table_configs[name].stochastic_rounding:
        return 0
    return 1 + (seed * 1_000_003 + number * 1009 + list(collection.tables).index(name)) % 2**52


def _optimizer_of(collection: EmbeddingCollection, name: str, default: Optimizer | None) -> Optimizer:
    optimizer = collection.table_configs[name].optimizer or collection.optimizer or default
    if optimizer is None:
        raise ValueError(
            f"table {name!r} has no optimizer: give one to its TableConfig, to the collection, or as `default`, "
            "such as embedfuse.Adagrad()"
        )
    return resolve(optimizer)


def _names(modules: Iterable[nn.Module], collections: list[EmbeddingCollection]) -> dict[tuple[int, str], str]:
    """The tables' names; where two collections have one in common, with the path of the collection in front."""
    own = [(number, name) for number, collection in enumerate(collections) for name in collection.tables]
    if len({name for _, name in own}) == len(own):
        return {key: key[1] for key in own}
    paths = {child: path for module in modules for path, child in module.named_modules()}
    return {(number, name): f"{paths[collections[number]] or number}.{name}" for number, name in own}
