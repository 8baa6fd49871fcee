"""Optimizers by name: as words, and as descriptions out of a checkpoint."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, overload

from .adagrad import Adagrad
from .adagrad_momentum import AdagradMomentum
from .adam import Adam
from .adamw import AdamW
from .base import Optimizer
from .ftrl import FTRL
from .rowwise_adagrad import RowWiseAdagrad
from .sgd import SGD

OPTIMIZERS: dict[str, type[Optimizer]] = {
    optimizer.__name__: optimizer for optimizer in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, FTRL, AdagradMomentum)
}
"""Every optimizer by class name; add your own to have `from_description` know it."""

WORDS: dict[str, type[Optimizer]] = {"sgd": SGD, "adagrad": Adagrad, "adam": Adam, "ftrl": FTRL}
"""The words that `resolve` takes, TensorFlow's."""


@overload
def resolve(optimizer: None) -> None: ...
@overload
def resolve(optimizer: Optimizer | str) -> Optimizer: ...
def resolve(optimizer: Optimizer | str | None) -> Optimizer | None:
    """The optimizer meant: itself, or the one of that name with its defaults, or None for a table without one.

    Raises:
        ValueError: an unknown word.
        TypeError: not an optimizer of this package, such as one of `torch.optim`.
    """
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        if optimizer not in WORDS:
            raise ValueError(
                f"`optimizer` must be one of {', '.join(map(repr, WORDS))}, got {optimizer!r}: "
                f"use one of these, or an object such as {_suggestion(optimizer)}"
            )
        return WORDS[optimizer]()
    name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        raise TypeError(f"`optimizer` must be an object, got the class {name}: write {name}()")
    owner = optimizer if isinstance(optimizer, type) else type(optimizer)
    shown = f"torch.optim.{name}" if owner.__module__.startswith("torch.optim") else name
    raise TypeError(
        f"`optimizer` must be an embedfuse optimizer, a string or None, got {shown}: "
        f"use an object such as {_suggestion(name)}"
    )


def _suggestion(name: str) -> str:
    plain = name.lower().replace("_", "").replace("-", "")
    for known in OPTIMIZERS:
        if known.lower() == plain:
            return f"embedfuse.{known}()"
    return "embedfuse.Adagrad()"


def from_description(description: Mapping[str, Any]) -> Optimizer:
    """The optimizer that `describe()` told of. Arguments that the description lacks take their defaults.

    Raises:
        ValueError: unknown name or argument.
    """
    name = description.get("name")
    optimizer = OPTIMIZERS.get(name) if isinstance(name, str) else None
    if optimizer is None:
        raise ValueError(
            f"`name` must be one of {', '.join(OPTIMIZERS)}, got {name!r}: add your own optimizers to OPTIMIZERS"
        )
    # a pair comes back from JSON as a list
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in description.items() if key != "name"
    }
    unknown = sorted(values.keys() - {field.name for field in fields(optimizer)})
    if unknown:
        raise ValueError(
            f"`description` must hold arguments of {name} only, got {', '.join(unknown)}: "
            "was it written by a newer version?"
        )
    return optimizer(**values)
