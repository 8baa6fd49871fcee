"""Where a compiler finds what is planned for a launch."""

import weakref
from typing import Any

from .compiling import constant_in_graphs


class Shelf:
    """Launches or descriptors as attributes, where a compiler finds new ones; in a dict it does not."""


_living: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def register(number: int, collection: Any) -> None:
    """Lets `put_on_shelf` find a collection, as long as it lives."""
    _living[number] = collection


@constant_in_graphs
def put_on_shelf(
    collection: int, group: int, copies: tuple[int, ...], sequences: tuple[bool, ...], one_each: bool
) -> str:
    """The name on its collection's shelf of the launch of features of this form."""
    owner = _living[collection]
    owner._launch(group, copies, sequences, one_each)
    key = group, copies, sequences, one_each
    name = f"launch_{list(owner._launches).index(key)}"
    setattr(owner._shelf, name, owner._launches[key])
    return name
