"""Many strings as bytes in one array, and TensorFlow's hashes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data.farmhash import fingerprint64

U64 = NDArray[np.uint64]
_MULTIPLIER = np.uint64(0xC6A4A7935BD1E995)
_POWERS_OF_TEN = np.array([10**n for n in range(1, 20)], np.uint64)


@dataclass(frozen=True)
class Strings:
    """String `i` is `data[starts[i]:starts[i] + lengths[i]]`, in UTF-8 where it came as text.

    `words` holds distinct strings, if these are known to be `words[places]`.
    """

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    words: "Strings | None" = None
    places: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, chosen: Any) -> "Strings":
        places = None if self.places is None else self.places[chosen]
        return Strings(self.data, self.starts[chosen], self.lengths[chosen], self.words, places)

    def fingerprints(self) -> U64:
        """Farmhash's `Fingerprint64` of each."""
        if self.words is not None:
            known: U64 = self.words.fingerprints()[self.places]
            return known
        return fingerprint64(self.data, self.starts, self.lengths)

    def to_list(self) -> list[bytes]:
        """As Python's byte strings."""
        whole = self.data.tobytes()
        return [whole[a : a + n] for a, n in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)]


def of_sequence(strings: Sequence[str | bytes]) -> Strings:
    """Strings of a Python sequence, all `str` or all `bytes`.

    Raises:
        TypeError: something else among them.
    """
    if not strings:
        return Strings(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))
    if isinstance(strings[0], bytes):
        joined = b"".join(strings)  # type: ignore[arg-type]
    else:
        text = "".join(strings)  # type: ignore[arg-type]
        if not text.isascii():
            # characters are not bytes then
            return of_sequence([string.encode() for string in strings])  # type: ignore[union-attr]
        joined = text.encode()
    lengths = np.fromiter(map(len, strings), np.int64, len(strings))
    return Strings(np.frombuffer(joined, np.uint8), np.cumsum(lengths) - lengths, lengths)


def of_array(array: NDArray[Any]) -> Strings:
    """Strings of a one-dimensional NumPy array of kind U, S or O."""
    width = array.dtype.itemsize // (4 if array.dtype.kind == "U" else 1)
    if array.dtype.kind == "O" or width == 0 or len(array) == 0:
        return of_sequence(array.tolist())
    characters = np.ascontiguousarray(array).view(np.uint32 if array.dtype.kind == "U" else np.uint8)
    if array.dtype.kind == "U" and characters.max() > 127:
        # characters are not bytes then
        return of_sequence(array.tolist())
    matrix = characters.astype(np.uint8, copy=False).reshape(-1, width)
    # NumPy fills up with zeros
    backwards = matrix[:, ::-1] != 0
    lengths = np.where(backwards.any(1), width - backwards.argmax(1), 0)
    return Strings(matrix.reshape(-1), np.arange(len(array), dtype=np.int64) * width, lengths)


def of_integers(numbers: NDArray[np.int64]) -> Strings:
    """Integers in decimal, as `tf.strings.as_string` writes them."""
    negative = numbers < 0
    rest = np.where(negative, -numbers, numbers).view(np.uint64)  # also of -2**63
    digits = np.searchsorted(_POWERS_OF_TEN, rest, side="right") + 1
    width = int(digits.max(initial=1)) + 1
    text = np.empty((len(numbers), width), np.uint8)
    for place in range(1, width):
        tens = rest // np.uint64(10)
        text[:, -place] = rest - tens * np.uint64(10) + np.uint64(ord("0"))
        rest = tens
    # noughts in front of a number are no part of its string, but for the place of the sign
    text[negative, width - 1 - digits[negative]] = ord("-")
    lengths = digits + negative
    return Strings(text.reshape(-1), np.arange(1, len(numbers) + 1, dtype=np.int64) * width - lengths, lengths)


def of_arrow(column: Any) -> Strings:
    """Strings of a pyarrow array of strings or bytes, dictionaries too; nulls become empty strings."""
    import pyarrow as pa  # type: ignore[import-untyped]

    if pa.types.is_dictionary(column.type):
        words = of_arrow(column.dictionary)
        # an empty word for nulls
        words = Strings(words.data, np.append(words.starts, 0), np.append(words.lengths, 0))
        places = np.asarray(column.indices.cast(pa.int64()).fill_null(len(words) - 1))
        return Strings(words.data, words.starts[places], words.lengths[places], words, places)
    column = column.cast(pa.large_binary()).fill_null(b"")
    _, offsets_buffer, data = column.buffers()
    if len(column) == 0 or data is None:
        zeros = np.zeros(len(column), np.int64)
        return Strings(np.empty(0, np.uint8), zeros, zeros)
    offsets = np.frombuffer(offsets_buffer, np.int64)[column.offset : column.offset + len(column) + 1]
    return Strings(np.frombuffer(data, np.uint8), offsets[:-1], np.diff(offsets))


def combined(first: U64, second: U64) -> U64:
    """TensorFlow's `FingerprintCat64`: one fingerprint of two, in this order."""
    second = second * _MULTIPLIER
    result = first ^ _MULTIPLIER ^ (_shift_mix(second) * _MULTIPLIER)
    return _shift_mix(_shift_mix(result * _MULTIPLIER) * _MULTIPLIER)


def _shift_mix(value: U64) -> U64:
    return value ^ (value >> np.uint64(47))
