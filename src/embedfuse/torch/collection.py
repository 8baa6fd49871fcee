"""`EmbeddingCollection`: all tables and features of a model, looked up in one launch per storage type."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..config import TableConfig
from ..optim import Optimizer, resolve
from ..plan import PlannedFeature
from . import ledger as ledgers
from .backends import Policy, accumulation_dtype
from .compiling import is_exporting
from .functions import Layout, PooledLookup, call, is_transformed, is_watched
from .initializers import initialize
from .joined_bags import JoinedBags, assemble_joined, joinable
from .layout import (
    Assembled,
    Forms,
    Part,
    as_kernels_want,
    assemble,
    assemble_plain,
    forms_of,
    part_of,
    plan_launch,
    planned_feature,
    planned_table,
    shaped,
    without_fillers,
)
from .ledger import Known
from .nest import flatten, leaves, rebuild, replace
from .plain_lookup import is_plain, plain_lookup
from .prepare import prepared
from .shelf import Shelf, put_on_shelf, register
from .sparse_grad import SparseGradLookup
from .tables import Arena, Tables, check_device, named_tables
from .training_lookup import training_lookup
from .usual_lookup import UsualLookup

UPDATES = ("step", "backward", "autograd")
POLICIES = ("raise", "drop", "ignore")
GRADS = ("dense", "sparse")
_LEARNS = operator.attrgetter("requires_grad")


@dataclasses.dataclass(frozen=True)
class _Group:
    """One storage type: its tables' buffer, and the features (positions in the collection) that read it."""

    arena: Arena
    members: list[int]
    planned: list[PlannedFeature]
    divides: bool  # whether any feature that is no sequence does: means of one id each are sums


class EmbeddingCollection(nn.Module):
    """All embedding tables of a model and the features that read them.

    Equivalent, feature by feature, to

        torch.nn.functional.embedding_bag(bags.ids, tables[name], bags.offsets, mode="sum",
                                          per_sample_weights=weights, include_last_offset=True)

    divided as the combiner says, but all features together are one launch, and all tables together one update pass,
    whatever their widths, sizes, combiners and optimizers. Tables are parameters `tables.<name>` of shape
    `[vocabulary_size, dim]`.

    Args:
        features: a dict (or list, tuple, or any nest of them) of `FeatureConfig`. Inputs and outputs have this nest.
        optimizer: for tables that have none of their own; an `Optimizer` or "sgd", "adagrad", "adam", "ftrl".
        update: when rows change. "step": in `FusedOptimizer.step()`, as with any torch optimizer. "backward": during
            `loss.backward()`, for the lowest peak memory. "autograd": never by us; the tables get ordinary gradients.
        device: where the tables live.
        out_of_range: ids outside a table "raise" an IndexError (on a GPU at a later call, since checking must not
            wait), "drop" out as if absent, or are ignored, i.e. dropped without being looked for ("ignore").
        grad: in "autograd" mode, "dense" gradients or "sparse" ones (coalesced rows).

    Raises:
        ValueError: no features, two tables of one name, an unknown mode.
        TypeError: features of another kind.
        RuntimeError: a GPU was asked for on a machine without one.
    """

    # follow the tables when they move; copies get their own
    _anchor: Tensor
    # by group and forms
    _launches: dict[tuple[int, tuple[int, ...], tuple[bool, ...], bool], Known]
    _usual: dict[tuple[int, tuple[int, ...], tuple[bool, ...], bool], UsualLookup | None]
    _ledger: ledgers.Ledger
    _shelf: Shelf
    _number: int

    def __init__(
        self,
        features: Any,
        optimizer: Optimizer | str | None = None,
        update: Literal["step", "backward", "autograd"] = "step",
        device: Any = None,
        out_of_range: Policy = "raise",
        grad: Literal["dense", "sparse"] = "dense",
    ) -> None:
        super().__init__()
        for name, value, choices in (
            ("update", update, UPDATES), ("out_of_range", out_of_range, POLICIES), ("grad", grad, GRADS),
        ):  # fmt: skip
            if value not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")
        found = leaves(features)
        if not found:
            raise ValueError("`features` must hold at least one FeatureConfig, got none")
        check_device(device)
        given = list(dict.fromkeys(config.table for _, config in found))
        names = named_tables(given)
        # own copies: the user's objects are never changed, and initializers need not outlive this call
        own = {
            config: dataclasses.replace(config, name=name, initializer=None)
            for config, name in zip(given, names, strict=True)
        }
        self.features = replace(features, lambda leaf: dataclasses.replace(leaf, table=own[leaf.table]))
        self.update, self.out_of_range, self.grad = update, out_of_range, grad
        self.optimizer = resolve(optimizer)
        self.table_configs: dict[str, TableConfig] = {config.name or "": config for config in own.values()}
        self.tables = Tables()
        # what is made in inference mode could never be trained
        with torch.inference_mode(False):
            self._start()
            for group in self._groups:
                group.arena.allocate(getattr(torch, self.table_configs[group.arena.names[0]].dtype), device)
            self._link()
            for config, name in zip(given, names, strict=True):
                initialize(self.tables[name], dataclasses.replace(config, name=name))

    # --- lookups ---------------------------------------------------------------------------------------------------

    def forward(self, inputs: Any) -> Any:
        """Looks up a batch.

        Args:
            inputs: the nest of the features; each a `Bags`, `SparseIds`, jagged nested tensor, or a dense integer
                tensor (one row for each id, never pooled). Or `JoinedBags` of all features: the quickest.

        Returns:
            The same nest: `[B, dim]` for bags, `[B, L, dim]` for sequences, `ids.shape + [dim]` for dense ids, of the
            table's dtype.

        Raises:
            ValueError, TypeError: inputs that do not fit the features.
            IndexError: an id outside its table (see `out_of_range`).
        """
        out, widths = self._lookup_whole(inputs), self._joinable.dims
        if out is not None:
            return rebuild(self.features, iter([out] if len(widths) == 1 else out.split(widths, 1)))
        parts = self._parts(inputs)
        pieces = [shaped(*one) for one in zip(parts, self._pieces(parts), widths, strict=True)]
        return rebuild(self.features, iter(pieces))

    def concatenated(self, inputs: Any) -> Tensor:
        """The same lookup as one tensor `[B, sum of dims]`, features in order: no split, and no copy in backward.

        Raises:
            ValueError: tables of several dtypes and features of several batch sizes cannot be put side by side.
        """
        found = self._lookup_whole(inputs)
        if found is not None:
            return found
        parts = self._parts(inputs)
        if any(part.bags != parts[0].bags for part in parts):
            raise ValueError(
                f"`concatenated` needs one batch size for all features, got {[part.bags for part in parts]}"
            )
        # one group's output is it already
        return self._lookup(0, parts) if len(self._groups) == 1 else torch.cat(self._pieces(parts), 1)

    def _pieces(self, parts: Sequence[Part]) -> list[Tensor]:
        """The columns of each feature, `[B, copies * dim]`."""
        pieces: list[Any] = [None] * len(parts)
        before: set[int] = set() if torch.compiler.is_compiling() else {*self._ledger.waiting}  # those fail elsewhere
        for number, group in enumerate(self._groups):
            try:
                out = self._lookup(number, [parts[member] for member in group.members])
            except BaseException:  # what was looked up is lost
                self._ledger.closed(*self._ledger.waiting - before)
                raise
            widths = [self._leaves[member][1].table.dim * parts[member].copies for member in group.members]
            split = [out] if len(widths) == 1 else out.split(widths, 1)
            for member, piece in zip(group.members, split, strict=True):
                pieces[member] = piece
        return pieces

    def _parts(self, inputs: Any) -> list[Part]:
        values = flatten(self.features, inputs)
        return [part_of(name, config, value) for (name, config), value in zip(self._leaves, values, strict=True)]

    def _lookup(self, number: int, parts: Sequence[Part], policy: Policy | None = None) -> Tensor:
        return self._look_up(number, assemble(parts), forms_of(parts), policy, parts)

    def _lookup_whole(self, inputs: Any) -> Tensor | None:
        """Of `JoinedBags`, or of a nest of features that are as easily joined; None if others are among them."""
        joinable, count, one_each = self._joinable, len(self._leaves), False
        batch: Assembled | None
        if isinstance(inputs, JoinedBags):
            batch = assemble_joined(inputs, joinable)
        elif joinable.reason is None and not is_watched() and not is_transformed():
            batch, one_each = assemble_plain(flatten(self.features, inputs))
        else:
            return None
        return None if batch is None else self._look_up(0, batch, ((1,) * count, (False,) * count, one_each))

    def _look_up(
        self, number: int, batch: Assembled, forms: Forms, policy: Policy | None = None, parts: Sequence[Part] = ()
    ) -> Tensor:
        """As the last lookup of these forms was made, if all is as it was then."""
        policy = self.out_of_range if policy is None else policy
        compiling, key = torch.compiler.is_compiling(), (number, *forms)
        usual = None if compiling else self._usual.get(key)
        found = None if usual is None else usual.again(batch, policy, self.update)
        if found is not None:
            return found
        own, known = self._settled(number), self._launch(*key)
        out = self._look_up_anew(number, own, batch, known, policy, parts)
        if own and not compiling and not is_watched(*batch[:3]) and not is_transformed():
            self._usual[key] = UsualLookup.of(self._groups[number].arena, known, self._anchor)
        return out

    def _settled(self, number: int) -> bool:
        """Follows tables that moved; says whether they are the collection's own, and not a functional call's."""
        arena = self._groups[number].arena
        if self.update == "autograd" and (is_transformed() or not arena.is_own()):
            return False
        # while compiling the ops see to it, in each call
        if not torch.compiler.is_compiling() and not arena.is_settled():
            self._link()
        return True

    def _look_up_anew(
        self, number: int, own: bool, batch: Assembled, known: Known, policy: Policy, parts: Sequence[Part]
    ) -> Tensor:
        arena = self._groups[number].arena
        buffer = arena.buffer
        ids, offsets, weights, bags = batch = as_kernels_want(batch, accumulation_dtype(buffer.dtype))
        if ids.device != buffer.device:
            raise ValueError(
                f"`inputs` must be on the device of the tables, {buffer.device}, got {ids.device}: use bags.to(device)"
            )
        launch = known.launch
        # an exported program outlives the collection
        exporting = torch.compiler.is_compiling() and is_exporting()
        slot_number = 0 if exporting else known.number
        if launch.has_defaults:
            ids, offsets, weights = prepared(launch.features, ids, offsets, weights, bags, policy, slot_number)
            policy = "drop"
            ids = without_fillers(ids, offsets, parts, bags)
            batch = ids, offsets, weights, bags
        watched = is_watched(ids, offsets, weights)
        learns = torch.is_grad_enabled() and (watched or arena.learns())
        if own and not exporting:
            if not learns and not watched and is_plain(weights):
                return plain_lookup(buffer, launch, ids, offsets, weights, bags, policy, slot_number)
            if learns and self.update != "autograd":
                return training_lookup(self._anchor, buffer, known, batch, policy, watched)
        tables: list[Tensor] = [buffer]
        starts = [0]
        if learns or not own or exporting:
            tables, starts = list(arena.parameters), arena.starts
        layout = Layout(starts, arena.size, bags, launch.width, launch.normalised, policy, slot_number, launch.cut)
        if learns and self.grad == "sparse":
            out = call(SparseGradLookup, weights, launch.features, ids, offsets, layout, *tables)
        elif watched:
            out, _ = torch.ops.embedfuse.pooled_lookup(
                tables, starts, arena.size, launch.features, ids, offsets, weights, bags, launch.width,
                launch.normalised, policy, slot_number, launch.cut,
            )  # fmt: skip
        else:
            out, _ = call(PooledLookup, weights, launch.features, ids, offsets, layout, *tables)
        return cast(Tensor, out)

    def discard(self) -> None:
        """Forgets gradients that wait for the optimizer, and lookups whose backward will never run."""
        self._ledger.discard()

    # --- plans and buffers -----------------------------------------------------------------------------------------

    def _plan(self) -> list[_Group]:
        configs = list(self.table_configs.values())
        groups = []
        for dtype in dict.fromkeys(config.dtype for config in configs):
            mine = [config for config in configs if config.dtype == dtype]
            arena = Arena(self.tables, [config.name or "" for config in mine], [planned_table(c) for c in mine])
            members = [number for number, (_, leaf) in enumerate(self._leaves) if leaf.table.dtype == dtype]
            planned = [
                planned_feature(self._leaves[number][1], mine.index(self._leaves[number][1].table))
                for number in members
            ]
            pooled = [leaf for _, leaf in self._leaves if leaf.table.dtype == dtype and not leaf.max_sequence_length]
            divides = any(leaf.effective_combiner != "sum" for leaf in pooled)
            groups.append(_Group(arena, members, planned, divides))
        return groups

    def _launch(
        self, number: int, copies: tuple[int, ...], sequences: tuple[bool, ...], one_each: bool = False
    ) -> Known:
        one_each = one_each and self._groups[number].divides
        if torch.compiler.is_dynamo_compiling():
            # imported here, since it takes a second and only a compiler needs it
            from torch.fx.experimental.symbolic_shapes import guard_scalar

            # a graph serves features of one form
            copies = tuple([int(guard_scalar(count)) for count in copies])
            known: Known | None = getattr(self._shelf, put_on_shelf(self._number, number, copies, sequences, one_each))
        else:
            known = self._launches.get((number, copies, sequences, one_each))
        if known is None:
            group, forms = self._groups[number], (sequences, one_each)
            launch = plan_launch(group.arena.planned, group.planned, copies, group.arena.buffer.device, *forms)
            leaf_names = [self._leaves[member][0] for member in group.members]
            table_names = [self._leaves[member][1].table.name or "" for member in group.members]
            slot = ledgers.Slot(
                self._ledger, number, launch,
                [name for name, count in zip(leaf_names, copies, strict=True) for _ in range(count)],
                [name for name, count in zip(table_names, copies, strict=True) for _ in range(count)],
                group.arena,
            )  # fmt: skip
            known = Known.of(slot)
            # one made inside of a transform is of no use after it
            if not is_transformed():
                self._launches[(number, copies, sequences, one_each)] = known
        return known

    def _start(self) -> None:
        """What the collection has once, for all its life: plans, and the ledger with all gradients that wait."""
        self._leaves = leaves(self.features)
        self._groups = self._plan()
        self._joinable = joinable(self._leaves, len(self._groups))
        self.__dict__["_launches"], self.__dict__["_usual"] = {}, {}
        self.__dict__["_shelf"] = Shelf()
        self.__dict__["_number"] = ledgers.call_number()
        register(self._number, self)
        self.__dict__["_ledger"] = ledgers.Ledger(lambda: self.update, self._learning)

    def _learning(self, group: int) -> tuple[bool, ...]:
        return tuple(map(_LEARNS, self._groups[group].arena.parameters))

    def _settle(self) -> None:
        """Follows tables that moved by themselves: an assignment to `.data`, or `load_state_dict(assign=True)`."""
        if not all(group.arena.is_settled() for group in self._groups):
            self._link()

    def _link(self) -> None:
        """Everything that follows the tables: their buffers, and descriptors on their device."""
        with torch.inference_mode(False):
            for group in self._groups:
                group.arena.settled()
            device = self._groups[0].arena.buffer.device
            if "_anchor" not in self.__dict__ or self._anchor.device != device:
                self.__dict__["_anchor"] = nn.Parameter(torch.zeros(1, device=device))
            self.__dict__["_usual"] = {}
            for known in self._launches.values():
                if known.launch.features.device != device:
                    known.launch.move(device)
            for number, group in enumerate(self._groups):
                configs = [self._leaves[member][1] for member in group.members]
                lengths = tuple(0 if config.output_shape else config.max_sequence_length for config in configs)
                self._launch(number, tuple(length or 1 for length in lengths), tuple(map(bool, lengths)))

    def _apply(self, fn: Any, recurse: bool = True) -> "EmbeddingCollection":
        with torch.inference_mode(False):
            for group in self._groups:
                group.arena.change(fn)
        self._link()
        return self

    def __copy__(self) -> "EmbeddingCollection":
        # the same tables, and so the same gradients that wait
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for derived in ("_anchor", "_launches", "_usual", "_ledger", "_groups", "_shelf", "_number"):
            del state[derived]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start()
        self._link()

    def reset_parameters(self) -> None:
        """Draws all tables anew from the default distribution (initializers given at construction are not kept)."""
        for name, config in self.table_configs.items():
            initialize(self.tables[name], config)

    def extra_repr(self) -> str:
        return f"{len(self._leaves)} features, {len(self.tables)} tables, update={self.update!r}"
