"""The bags of all features of a batch in three tensors, as a data loader had best hand them over."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import FeatureConfig
from .bags import Bags, joined
from .layout import Assembled


class JoinedBags:
    """Bags of F features, B of each, feature after feature; given to a collection in place of the nest of `Bags`.

    Equivalent to `[Bags(…) for each feature]`, but a batch is two or three tensors, so that it is moved to a GPU in as
    many copies, and looked up without any work to put it together. This is the layout of a
    `torchrec.KeyedJaggedTensor`.

    Args:
        ids: int32 or int64 `[N]`: all ids of the first feature, then those of the second, and so on.
        offsets: int32 or int64 `[F * B + 1]`: bag `b` of feature `f` begins at `offsets[f * B + b]`.
        weights: any float type `[N]`, or None for ones. May require gradients.
        names: the features' names, which the collection then compares with its own; or their number.

    Raises:
        TypeError, ValueError: as `Bags`; and offsets that do not belong to so many features.

    Example:
        >>> joined = JoinedBags.join({"user": Bags.from_lists([[1], [2]]), "items": Bags.from_lists([[5, 6], []])})
        >>> joined.ids, joined.offsets
        (tensor([1, 2, 5, 6]), tensor([0, 1, 2, 4, 4]))
    """

    __slots__ = ("_bags", "names")

    def __init__(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None, *, names: Sequence[str] | int
    ) -> None:
        if isinstance(names, (str, bool)):
            raise TypeError(f"`names` must be a sequence of names, or how many features there are, got {names!r}")
        self._bags = Bags(ids, offsets, weights)
        self.names: tuple[str, ...] | int = names if isinstance(names, int) else tuple(names)
        if self.features < 1 or (self._bags.offsets.shape[0] - 1) % self.features:
            raise ValueError(
                f"`offsets` must be [F * B + 1] for {self.features} features, got {self._bags.offsets.shape[0]} of them"
            )

    # --- constructors ----------------------------------------------------------------------------------------------

    @classmethod
    def join(cls, bags: Mapping[str, Bags] | Sequence[Bags]) -> "JoinedBags":
        """Of one `Bags` for each feature, all of one number of bags, in the order of the collection's features."""
        parts = list(bags.values()) if isinstance(bags, Mapping) else list(bags)
        if not parts or any(len(part) != len(parts[0]) for part in parts):
            raise ValueError(f"`bags` must be of one batch size, got {[len(part) for part in parts]}")
        names = [str(name) for name in bags] if isinstance(bags, Mapping) else len(parts)
        return cls(*joined(parts), names=names)

    @classmethod
    def from_keyed_jagged(cls, features: Any) -> "JoinedBags":
        """Of a `torchrec.KeyedJaggedTensor`, or what has its `keys()`, `values()`, `offsets()`, `weights_or_none()`."""
        return cls(features.values(), features.offsets(), features.weights_or_none(), names=features.keys())

    # --- as a value ------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> Tensor:
        """All ids `[N]`."""
        return self._bags.ids

    @property
    def offsets(self) -> Tensor:
        """Where bags begin, int64 `[F * B + 1]`."""
        return self._bags.offsets

    @property
    def weights(self) -> Tensor | None:
        """Of the ids, `[N]`."""
        return self._bags.weights

    @property
    def features(self) -> int:
        """F, the number of features."""
        return self.names if isinstance(self.names, int) else len(self.names)

    @property
    def device(self) -> torch.device:
        """Where the ids are."""
        return self._bags.device

    def __len__(self) -> int:
        return len(self._bags) // self.features

    def split(self) -> list[Bags]:
        """One `Bags` for each feature; on a GPU this waits for the device."""
        bags = len(self)
        found = []
        for feature in range(self.features):
            offsets = self.offsets[feature * bags : (feature + 1) * bags + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            weights = None if self.weights is None else self.weights[first:last]
            found.append(Bags(self.ids[first:last], offsets - first, weights))
        return found

    def to(self, device: Any, non_blocking: bool = False) -> "JoinedBags":
        """The same on another device."""
        return _of(self._bags.to(device, non_blocking), self.names)

    def pin_memory(self) -> "JoinedBags":
        """The same in page-locked memory, for asynchronous copies to a GPU; also what a DataLoader calls."""
        return _of(self._bags.pin_memory(), self.names)

    def __repr__(self) -> str:
        weighted = "" if self.weights is None else ", weighted"
        return (
            f"JoinedBags({self.features} features, {len(self)} bags, {self.ids.shape[0]} ids{weighted}, "
            f"{self.ids.dtype}, {self.device})"
        )


def _of(bags: Bags, names: tuple[str, ...] | int) -> JoinedBags:
    made = object.__new__(JoinedBags)
    made._bags, made.names = bags, names
    return made


class Joinable(NamedTuple):
    """What a collection says of `JoinedBags`: its features, and why they cannot be joined, if they cannot."""

    names: tuple[str, ...]
    dims: list[int]
    reason: str | None


def joinable(leaves: Sequence[tuple[str, FeatureConfig]], groups: int) -> Joinable:
    """For features of tables of so many storage types."""
    reason = None if groups == 1 else "JoinedBags need tables of one storage type"
    for name, config in leaves:
        if config.max_sequence_length or config.output_shape is not None:
            reason = (
                "JoinedBags are for features with one output row a bag, and not with `max_sequence_length` or "
                f"`output_shape`, got {name!r}"
            )
    return Joinable(tuple(name for name, _ in leaves), [config.table.dim for _, config in leaves], reason)


def assemble_joined(joined: JoinedBags, own: Joinable) -> Assembled:
    """All features of the one launch that there is.

    Raises:
        ValueError: a collection whose features cannot be joined, or other features than the collection's.
    """
    ids, offsets, weights = joined._bags.ids, joined._bags.offsets, joined._bags.weights
    count = len(own.names)
    if joined.names != count and joined.names != own.names:
        raise ValueError(
            f"`inputs` must have the features of the collection in their order, {list(own.names)}, got "
            f"{joined.names if isinstance(joined.names, int) else list(joined.names)}"
        )
    if own.reason is not None:
        raise ValueError(f"{own.reason}: give one `Bags` for each feature, as `joined.split()` makes")
    # not len(): it would fix the batch size in a compiled graph
    return ids, offsets, weights, (offsets.shape[0] - 1) // count


torch.serialization.add_safe_globals([JoinedBags])
# lets torch.export, vmap and DataLoader workers see the tensors inside
torch.utils._pytree.register_pytree_node(
    JoinedBags,
    lambda joined: ([joined._bags], joined.names),
    lambda children, names: _of(next(iter(children)), names),
    flatten_with_keys_fn=lambda joined: ([(torch.utils._pytree.GetAttrKey("_bags"), joined._bags)], joined.names),
    serialized_type_name="embedfuse.torch.JoinedBags",
    to_dumpable_context=lambda names: names if isinstance(names, int) else list(names),
    from_dumpable_context=lambda names: names if isinstance(names, int) else tuple(names),
)
