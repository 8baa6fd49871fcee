"""Categorical columns whose ids are places in a list of words or numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..bags import Bags
from .categorical import text_of
from .column import CategoricalColumn, Features, Kind, categories_of, check_key, check_size, kind_of, to_ids
from .strings import Strings, of_sequence
from .values import MISSING_ID, Values


class Vocabulary:
    """Finds places of strings or integers in a list of distinct ones.

    Strings are compared by their 64-bit fingerprint and their length. Fingerprints of the vocabulary's own words are
    checked to differ; a word outside of it is taken for one of its V words with probability V / 2⁶⁴.
    """

    def __init__(self, name: str, words: Strings | NDArray[np.int64]) -> None:
        keys: NDArray[Any] = words.fingerprints() if isinstance(words, Strings) else words
        self.kind: Kind = "string" if isinstance(words, Strings) else "integer"
        self.size = len(keys)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        self._lengths = words.lengths[self._order] if isinstance(words, Strings) else None
        twice = np.flatnonzero(self._keys[1:] == self._keys[:-1])
        if len(twice):
            place = int(self._order[twice[0] + 1])
            word = words.to_list()[place].decode(errors="replace") if isinstance(words, Strings) else words[place]
            raise ValueError(f"`{name}` must not hold an entry twice, got {word!r} again at place {place}")
        self._keys_on, self._order_on = torch.empty(0, device="cpu"), torch.empty(0, device="cpu")

    def places(self, items: Strings | Tensor) -> Tensor:
        """The place of each item, -1 where it is not in the list."""
        if isinstance(items, Tensor):
            return self._places_of_integers(items)
        keys = items.fingerprints()
        at = np.minimum(np.searchsorted(self._keys, keys), self.size - 1)
        assert self._lengths is not None
        found = (self._keys[at] == keys) & (self._lengths[at] == items.lengths)
        return torch.from_numpy(np.where(found, self._order[at], -1))

    def _places_of_integers(self, items: Tensor) -> Tensor:
        if not self._keys_on.shape[0] or self._keys_on.device != items.device:
            self._keys_on = torch.from_numpy(self._keys).to(items.device)
            self._order_on = torch.from_numpy(self._order).to(items.device)
        keys, order, items = self._keys_on, self._order_on, items.long()
        at = torch.searchsorted(keys, items).clamp(max=self.size - 1)
        return torch.where(keys[at] == items, order[at], -1)


def categorical_column_with_vocabulary_list(
    key: str, vocabulary_list: Sequence[Any], dtype: Any = None, default_value: int = -1, num_oov_buckets: int = 0
) -> "VocabularyColumn":
    """The place of a value in a list.

    Args:
        key: the feature.
        vocabulary_list: distinct strings or integers.
        dtype: "string" or an integer type; None takes that of the list.
        default_value: the id of values that are not in the list; -1 leaves them out.
        num_oov_buckets: instead of a default, spread such values by hash over this many ids after the list's.
    """
    words = list(vocabulary_list)
    if not words:
        raise ValueError("`vocabulary_list` must not be empty")
    text = all(isinstance(word, (str, bytes)) for word in words)
    if not text and not all(isinstance(word, (int, np.integer)) and not isinstance(word, bool) for word in words):
        raise TypeError(f"`vocabulary_list` must hold strings alone or integers alone, got {words[:5]!r}")
    if dtype is not None and kind_of(dtype) != ("string" if text else "integer"):
        raise ValueError(f"`dtype` must be that of `vocabulary_list`, got {dtype!r} for {words[0]!r}: leave it out")
    known = of_sequence([word.encode() if isinstance(word, str) else word for word in words]) if text else None
    vocabulary = Vocabulary("vocabulary_list", known if known is not None else np.array(words, np.int64))
    return VocabularyColumn(key, vocabulary, default_value, num_oov_buckets)


def categorical_column_with_vocabulary_file(
    key: str, vocabulary_file: str | Path, vocabulary_size: int | None = None, num_oov_buckets: int = 0,
    default_value: int | None = None, dtype: Any = "string",
) -> "VocabularyColumn":  # fmt: skip
    """The line of a file that holds a value, counted from 0.

    Args:
        key: the feature.
        vocabulary_file: a text file with one entry a line, read now.
        vocabulary_size: use the first so many lines; None uses all.
        num_oov_buckets: spread values that are not in the file by hash over this many ids after the file's.
        default_value: or give them this id; None or -1 leaves them out.
        dtype: "string" or an integer type.

    Raises:
        FileNotFoundError: no such file.
        ValueError: fewer lines than `vocabulary_size`, or one that is no integer.
    """
    path = Path(vocabulary_file)
    if not path.is_file():
        raise FileNotFoundError(f"`vocabulary_file` must be a text file with one entry a line, got {str(path)!r}")
    lines = path.read_bytes().replace(b"\r", b"").split(b"\n")
    if not lines[-1]:
        lines.pop()
    if vocabulary_size is not None:
        check_size("vocabulary_size", vocabulary_size)
        if vocabulary_size > len(lines):
            raise ValueError(
                f"`vocabulary_size` must be at most the number of lines of {path.name!r}, {len(lines)}, got "
                f"{vocabulary_size}"
            )
        lines = lines[:vocabulary_size]
    if not lines:
        raise ValueError(f"`vocabulary_file` must hold at least one line, got an empty file {path.name!r}")
    if kind_of(dtype) == "string":
        vocabulary = Vocabulary("vocabulary_file", of_sequence(lines))
    else:
        try:
            vocabulary = Vocabulary("vocabulary_file", np.array([int(line) for line in lines], np.int64))
        except ValueError as error:
            raise ValueError(f"`vocabulary_file` must hold distinct integers, as `dtype` says: {error}") from error
    return VocabularyColumn(key, vocabulary, -1 if default_value is None else default_value, num_oov_buckets)


@dataclass(frozen=True)
class VocabularyColumn(CategoricalColumn):
    """See `categorical_column_with_vocabulary_list` and `categorical_column_with_vocabulary_file`."""

    key: str
    vocabulary: Vocabulary = field(repr=False)
    default_value: int = -1
    num_oov_buckets: int = 0

    def __post_init__(self) -> None:
        check_key(self.key)
        size, default, buckets = self.vocabulary.size, self.default_value, self.num_oov_buckets
        if isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < 0:
            raise ValueError(f"`num_oov_buckets` must be an int of at least 0, got {buckets!r}")
        if isinstance(default, bool) or not isinstance(default, int) or not -1 <= default < size:
            raise ValueError(
                f"`default_value` must be the id of an entry, 0 to {size - 1}, or -1 for none, got {default!r}"
            )
        if buckets and default != -1:
            raise ValueError(
                f"`default_value` must be -1 with `num_oov_buckets`, got {default} and {buckets}: values outside of "
                "the vocabulary go to one or to the other"
            )

    @property
    def name(self) -> str:
        return self.key

    @property
    def num_buckets(self) -> int:
        return self.vocabulary.size + self.num_oov_buckets

    def ids(self, features: Features) -> Bags:
        values = categories_of(features, self.key, self.vocabulary.kind, self.name)
        values = values.only(values.present())
        ids = self.vocabulary.places(values.items)
        unknown = ids < 0
        if self.num_oov_buckets:
            ids = torch.where(unknown, self._hashed(values).to(ids.device), ids)
        elif self.default_value != -1:
            ids = ids.masked_fill(unknown, self.default_value)
        if values.padded and isinstance(values.items, Tensor):
            # padding that is still in, on a GPU
            ids = ids.masked_fill(values.items == MISSING_ID, MISSING_ID)
        return Bags(ids, values.offsets, values.weights)

    def _hashed(self, values: Values) -> Tensor:
        fingerprints = text_of(values.on_host()).fingerprints()
        return to_ids(fingerprints % np.uint64(self.num_oov_buckets)) + self.vocabulary.size
