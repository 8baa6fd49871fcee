"""Which tables a fused optimizer steps, by which rules, and what it calls them."""

from collections.abc import Iterable

from torch import nn

from ..optim import Optimizer, resolve
from .collection import EmbeddingCollection


def collections_of(modules: Iterable[nn.Module]) -> list[EmbeddingCollection]:
    """The collections in modules, each once, and none that is a shallow copy of another.

    Raises:
        TypeError: something that is no module.
        ValueError: none, or one in "autograd" mode.
    """
    found: dict[EmbeddingCollection, str] = {}
    for place, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"`modules` must be modules, got {type(module).__name__}: give the model itself, FusedOptimizer(model)"
            )
        for path, child in module.named_modules():
            # a copy has the tables of its original, and the gradients that wait
            if isinstance(child, EmbeddingCollection) and all(child._ledger is not one._ledger for one in found):
                found[child] = path or f"modules[{place}]"
    if not found:
        raise ValueError("`modules` must contain at least one EmbeddingCollection, got none")
    ordinary = [path for collection, path in found.items() if collection.update == "autograd"]
    if not ordinary:
        return list(found)
    if len(ordinary) == len(found):
        raise ValueError(
            'a collection with update="autograd" gives its tables ordinary gradients: use a torch optimizer over '
            'its parameters, or update="step"'
        )
    raise ValueError(
        f'`modules` must hold no collection with update="autograd", got one at {", ".join(ordinary)}, whose table has '
        "ordinary gradients: give FusedOptimizer only the other modules, as FusedOptimizer(model.embeddings), or "
        'create that one with update="step" (of a memory layer: its ValueTable)'
    )


def seed_of(collection: EmbeddingCollection, number: int, name: str, seed: int) -> int:
    """A seed of its own for each table that rounds stochastically, 0 for the others; exact in float64."""
    if not collection.table_configs[name].stochastic_rounding:
        return 0
    return 1 + (seed * 1_000_003 + number * 1009 + list(collection.tables).index(name)) % 2**52


def optimizer_of(collection: EmbeddingCollection, name: str, default: Optimizer | None) -> Optimizer:
    """The optimizer of a table: its own, or its collection's, or the default.

    Raises:
        ValueError: it has none.
    """
    optimizer = collection.table_configs[name].optimizer or collection.optimizer or default
    if optimizer is None:
        raise ValueError(
            f"table {name!r} has no optimizer: give one to its TableConfig, to the collection, or as `default`, "
            "such as embedfuse.Adagrad()"
        )
    return resolve(optimizer)


def names_of(modules: Iterable[nn.Module], collections: list[EmbeddingCollection]) -> dict[tuple[int, str], str]:
    """The tables' names, no two the same.

    Where two have one in common, with the path of the collection in front; where that is not enough, also with the
    number of the module.
    """
    own = [(number, name) for number, collection in enumerate(collections) for name in collection.tables]
    places: dict[EmbeddingCollection, tuple[int, str]] = {}
    for place, module in enumerate(modules):
        for path, child in module.named_modules():
            if isinstance(child, EmbeddingCollection):
                places.setdefault(child, (place, path))
    short, long = [], []
    for number, name in own:
        place, path = places[collections[number]]
        short.append(f"{path or number}.{name}")
        long.append(".".join([str(place), *([path] if path else []), name]))
    for names in ([name for _, name in own], short, long):
        if len(set(names)) == len(own):
            break
    return dict(zip(own, names, strict=True))
