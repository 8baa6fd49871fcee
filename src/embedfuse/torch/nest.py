"""Features come as a nest of dicts, lists and tuples; inputs and outputs have the same nest."""

from collections.abc import Iterable, Iterator
from typing import Any

from ..config import FeatureConfig

Leaf = tuple[str, FeatureConfig]


def leaves(nest: Any, path: str = "") -> list[Leaf]:
    """All features of a nest with their names, in order.

    Raises:
        TypeError: something that is neither a nest nor a `FeatureConfig`.
    """
    if isinstance(nest, FeatureConfig):
        return [(nest.name or path or "feature", nest)]
    if isinstance(nest, dict):
        return [leaf for key, value in nest.items() for leaf in leaves(value, _join(path, key))]
    if isinstance(nest, (list, tuple)):
        return [leaf for number, value in enumerate(nest) for leaf in leaves(value, _join(path, number))]
    raise TypeError(
        f"`features` must be a FeatureConfig or dicts, lists and tuples of them, got {type(nest).__name__} at {path!r}"
    )


def flatten(nest: Any, inputs: Any, path: str = "") -> list[Any]:
    """The inputs of a nest in the order of `leaves`.

    Raises:
        ValueError: features missing or unknown.
        TypeError: another kind of container.
    """
    if isinstance(nest, FeatureConfig):
        return [inputs]
    where = f" under {path!r}" if path else ""
    if isinstance(nest, dict):
        if not isinstance(inputs, dict):
            raise TypeError(f"`inputs`{where} must be a dict like the features, got {type(inputs).__name__}")
        if inputs.keys() != nest.keys():
            missing = [key for key in nest if key not in inputs]
            unknown = [key for key in inputs if key not in nest]
            raise ValueError(
                f"`inputs`{where} must hold the collection's features; missing: {missing}, unknown: {unknown}"
            )
        return _each(((value, inputs[key], key) for key, value in nest.items()), path)
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"`inputs`{where} must be a list or tuple like the features, got {type(inputs).__name__}")
    if len(inputs) != len(nest):
        raise ValueError(f"`inputs`{where} must have {len(nest)} entries, got {len(inputs)}")
    return _each(((value, inputs[number], number) for number, value in enumerate(nest)), path)


def _each(entries: Iterable[tuple[Any, Any, Any]], path: str) -> list[Any]:
    found = []
    for value, given, key in entries:
        # most are features themselves, and batches come often
        if isinstance(value, FeatureConfig):
            found.append(given)
        else:
            found += flatten(value, given, _join(path, key))
    return found


def rebuild(nest: Any, values: Iterator[Any]) -> Any:
    """The nest with each feature replaced by the next of `values`."""
    if isinstance(nest, FeatureConfig):
        return next(values)
    if isinstance(nest, dict):
        return {key: rebuild(value, values) for key, value in nest.items()}
    made = [rebuild(value, values) for value in nest]
    if isinstance(nest, tuple):
        return type(nest)(*made) if hasattr(nest, "_fields") else tuple(made)
    return made


def replace(nest: Any, change: Any) -> Any:
    """The nest with `change(feature)` in place of each feature."""
    return rebuild(nest, iter([change(feature) for _, feature in leaves(nest)]))


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
