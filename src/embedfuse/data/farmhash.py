"""FarmHash's `Fingerprint64` of many byte strings at once, in NumPy: the hash of TensorFlow's `to_hash_bucket_fast`.

Written from the published algorithm (Google, MIT licence); tested against published values and the C++ library's.
All arithmetic is modulo 2⁶⁴, as NumPy's uint64 has it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

K0, K1, K2 = (np.uint64(k) for k in (0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F))
PADDING = 8
"""Bytes that must follow the last string, since words of 8 bytes are read at any place."""


def fingerprint64(data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> U64:
    """The fingerprints of the strings `data[start:start + length]`.

    Args:
        data: bytes of all strings, in any order.
        starts: where each string begins, `[N]`.
        lengths: bytes of each string, `[N]`.
    """
    words = _Words(data)
    out = np.empty(len(starts), np.uint64)
    classes = np.searchsorted([1, 4, 8, 17, 33, 65], lengths, side="right")
    for number in np.unique(classes):
        chosen = np.flatnonzero(classes == number)
        if number < len(_BY_LENGTH):
            out[chosen] = _BY_LENGTH[number](words, starts[chosen], lengths[chosen].astype(np.uint64))
        else:
            # long strings take one round for each 64 bytes, so those of one length go together
            for length in np.unique(lengths[chosen]):
                same = chosen[lengths[chosen] == length]
                out[same] = _over_64(words, starts[same], int(length))
    return out


def fingerprints(strings: list[bytes]) -> U64:
    """The same for a list of byte strings."""
    lengths = np.array([len(string) for string in strings], np.int64)
    return fingerprint64(np.frombuffer(b"".join(strings), np.uint8), np.cumsum(lengths) - lengths, lengths)


class _Words:
    """Little-endian words of 1, 4 or 8 bytes at any place."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        padded = np.concatenate([data, np.zeros(PADDING, np.uint8)])
        self.byte = padded
        self.four = np.ndarray(len(data) + 4, "<u4", padded, strides=(1,))
        self.eight = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))

    def one_at(self, places: Any) -> U64:
        return np.asarray(self.byte[places], np.uint64)

    def four_at(self, places: Any) -> U64:
        return np.asarray(self.four[places], np.uint64)

    def eight_at(self, places: Any) -> U64:
        return np.asarray(self.eight[places], np.uint64)


def _rotate(value: U64, by: int) -> U64:
    return (value >> np.uint64(by)) | (value << np.uint64(64 - by))


def _shift_mix(value: U64) -> U64:
    return value ^ (value >> np.uint64(47))


def _mix(u: U64, v: U64, multiplier: Any) -> U64:
    mixed: U64 = _shift_mix((v ^ _shift_mix((u ^ v) * multiplier)) * multiplier) * multiplier
    return mixed


def _empty(words: _Words, at: NDArray[np.int64], length: U64) -> U64:
    return np.full(len(at), K2)


def _up_to_3(words: _Words, at: NDArray[np.int64], length: U64) -> U64:
    size = length.astype(np.int64)
    first, middle, last = words.one_at(at), words.one_at(at + size // 2), words.one_at(at + size - 1)
    y = first + (middle << np.uint64(8))
    z = length + (last << np.uint64(2))
    return _shift_mix(y * K2 ^ z * K0) * K2


def _up_to_7(words: _Words, at: NDArray[np.int64], length: U64) -> U64:
    multiplier = K2 + length * np.uint64(2)
    first, last = words.four_at(at), words.four_at(at + length.astype(np.int64) - 4)
    return _mix(length + (first << np.uint64(3)), last, multiplier)


def _up_to_16(words: _Words, at: NDArray[np.int64], length: U64) -> U64:
    multiplier = K2 + length * np.uint64(2)
    a = words.eight_at(at) + K2
    b = words.eight_at(at + length.astype(np.int64) - 8)
    return _mix(_rotate(b, 37) * multiplier + a, (_rotate(a, 25) + b) * multiplier, multiplier)


def _up_to_32(words: _Words, at: NDArray[np.int64], length: U64) -> U64:
    multiplier = K2 + length * np.uint64(2)
    end = at + length.astype(np.int64)
    a, b = words.eight_at(at) * K1, words.eight_at(at + 8)
    c, d = words.eight_at(end - 8) * multiplier, words.eight_at(end - 16) * K2
    return _mix(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + K2, 18) + c, multiplier)


def _up_to_64(words: _Words, at: NDArray[np.int64], length: U64) -> U64:
    multiplier = K2 + length * np.uint64(2)
    end = at + length.astype(np.int64)
    a, b = words.eight_at(at) * K2, words.eight_at(at + 8)
    c, d = words.eight_at(end - 8) * multiplier, words.eight_at(end - 16) * K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _mix(y, a + _rotate(b + K2, 18) + c, multiplier)
    e, f = words.eight_at(at + 16) * multiplier, words.eight_at(at + 24)
    g = (y + words.eight_at(end - 32)) * multiplier
    h = (z + words.eight_at(end - 24)) * multiplier
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, multiplier)


def _over_64(words: _Words, at: NDArray[np.int64], length: int) -> U64:
    def state(value: int) -> U64:
        return np.full(len(at), value % 2**64, np.uint64)

    seed = 81
    x = state(seed) * K2 + words.eight_at(at)
    y = state(seed * int(K1) + 113)
    z = _shift_mix(y * K2 + np.uint64(113)) * K2
    v, w = (state(0), state(0)), (state(0), state(0))
    last = at + length - 64
    for _ in range((length - 1) // 64):
        x, y, z, v, w = _round(words, at, (x, y, z, v, w), K1, np.uint64(1))
        at = at + 64
    multiplier = K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w = (w[0] + np.uint64((length - 1) & 63), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    x, y, z, v, w = _round(words, last, (x, y, z, v, w), multiplier, np.uint64(9))
    return _mix(_mix(v[0], w[0], multiplier) + _shift_mix(y) * K0 + z, _mix(v[1], w[1], multiplier) + x, multiplier)


def _round(words: _Words, at: NDArray[np.int64], state: Any, multiplier: Any, weight: np.uint64) -> Any:
    """Takes 64 bytes into the state."""
    x, y, z, v, w = state
    x = _rotate(x + y + v[0] + words.eight_at(at + 8), 37) * multiplier
    y = _rotate(y + v[1] + words.eight_at(at + 48), 42) * multiplier
    x = x ^ w[1] * weight
    y = y + v[0] * weight + words.eight_at(at + 40)
    z = _rotate(z + w[0], 33) * multiplier
    v = _weak(words, at, v[1] * multiplier, x + w[0])
    w = _weak(words, at + 32, z + w[1], y + words.eight_at(at + 16))
    return z, y, x, v, w


def _weak(words: _Words, at: NDArray[np.int64], a: U64, b: U64) -> tuple[U64, U64]:
    first, second, third, fourth = (words.eight_at(at + 8 * k) for k in range(4))
    a = a + first
    b = _rotate(b + a + fourth, 21)
    before = a
    a = a + second + third
    b = b + _rotate(a, 44)
    return a + fourth, b + before


_BY_LENGTH = (_empty, _up_to_3, _up_to_7, _up_to_16, _up_to_32, _up_to_64)
