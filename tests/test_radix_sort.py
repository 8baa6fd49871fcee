"""The sort of row numbers in CUDA, on the CPU: `tests/cuda_on_cpu` gives its source what a GPU would."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_library import library
from launch_driver import Asked, LaunchDriver

pytest.importorskip("triton")

from embedfuse.kernels import configs
from embedfuse.torch.backends import issuing, radix_sort

STREAM, BLOCKS = 1234, 3
COOPERATIVE = 2
"""CUDA's number for launches whose blocks wait for each other."""


@cache
def _library(folder: Path, digit: int, threads: int) -> ctypes.CDLL:
    return library(folder, "radix_sort", BITS=digit, THREADS=threads)


class _Driver(LaunchDriver):
    """Launches what the sort needs of a library."""

    def __init__(self, library: ctypes.CDLL, alone: bool) -> None:
        super().__init__(self._run)
        self.library, self.launched, self.alone = library, [], alone

    def _run(self, asked: Asked) -> int:
        blocks, height, depth, threads, *rest = asked.words
        # its block is as high and deep, nothing in shared memory
        assert (height, depth, *rest, asked.stream) == (1, 1, 1, 1, 0, STREAM)
        assert asked.marks == ([COOPERATIVE, 0, 1] if asked.function < 2 else None)
        if asked.marks:
            assert blocks <= 2 * BLOCKS
        self.launched.append(asked.function)
        if self.alone and asked.marks:
            return 720
        self.library.launch(asked.function, blocks, threads, ctypes.c_void_p(asked.places))
        return 0


@pytest.fixture
def sort(tmp_path_factory, monkeypatch):
    """`sort(keys, bits, …)` → sorted keys and what lay beside them. `alone`: blocks may not wait for each other."""
    # so few blocks at once that a few thousand keys are many
    monkeypatch.setattr(radix_sort, "blocks_at_once", lambda *args: 2)
    monkeypatch.setattr(radix_sort, "multiprocessors", lambda device: BLOCKS)
    folder = tmp_path_factory.getbasetemp()

    def sorted_by(keys, bits, digit=8, threads=64, beside=None, alone=False):
        monkeypatch.setattr(radix_sort, "RADIX_DIGIT", digit)
        monkeypatch.setattr(radix_sort, "RADIX_THREADS", threads)
        for module in (radix_sort, issuing):
            monkeypatch.setattr(module, "raw_stream", lambda device: STREAM)
            monkeypatch.setattr(module, "driver_address", lambda: driver.address)
        monkeypatch.setattr(radix_sort, "functions_of", lambda name, functions, *rest: range(len(functions)))
        passes = max(configs.ceil_div(bits, digit), 1)
        driver = _Driver(_library(folder, max(configs.ceil_div(bits, passes), 4), threads), alone)
        sorter = radix_sort.RadixSort(bits, 0)
        # it has asked whether so many blocks run at once
        assert driver.launched == ([0] if alone else [0, 1])
        driver.launched.clear()
        number = len(keys)
        # what is behind the end must not be touched
        rows = [np.concatenate([keys, [-7]]).astype(np.int32), np.full(number + 1, -7, np.int32)]
        values = [np.full(number + 1, -7, np.int32) for _ in range(2)]
        scratch = np.full(sorter.words(number) + 1, -7, np.int32)
        zero = np.zeros(1, np.int32)
        first = 0 if beside is None else beside.ctypes.data
        found = sorter(
            number, (rows[0].ctypes.data, rows[1].ctypes.data), (values[0].ctypes.data, values[1].ctypes.data),
            scratch.ctypes.data, zero.ctypes.data, first, issuing.Now(torch.empty(0)),
        )  # fmt: skip
        expected = [0] if number <= BLOCKS * 4 * threads else [1] if number <= 2 * BLOCKS * 8 * threads else [2, 3, 4]
        expected *= 1 if len(expected) == 1 else sorter.passes
        assert driver.launched == ([2, 3, 4] * sorter.passes if alone else expected)
        assert all(memory[-1] == -7 for memory in (*rows, *values, scratch))
        return tuple(
            next(memory[:-1] for memory in pair if memory.ctypes.data == address)
            for pair, address in zip((rows, values), found, strict=True)
        )

    return sorted_by


def _expected(keys):
    order = np.argsort(keys, kind="stable")
    return keys[order], order


@pytest.mark.parametrize("number", [1, 255, 257, 1200, 4100])
@pytest.mark.parametrize(("bits", "digit"), [(1, 8), (8, 8), (9, 8), (20, 8), (31, 8)])
def test_keys_are_sorted_and_equal_ones_keep_their_order(sort, number, bits, digit):
    keys = np.random.default_rng(number).integers(0, 1 << bits, number).astype(np.int32)
    keys[number // 2 :] = keys[: number - number // 2]
    rows, order = sort(keys, bits, digit)
    expected, places = _expected(keys)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(order, places)


@pytest.mark.parametrize("threads", [32, 96, configs.RADIX_THREADS])
@pytest.mark.parametrize("kind", ["one row", "half one row", "descending", "largest"])
def test_any_block_and_any_keys(sort, threads, kind):
    generator, number = np.random.default_rng(5), 5000 if threads == 256 else 1000
    keys = {
        "one row": np.full(number, 77), "descending": np.arange(number)[::-1],
        "half one row": np.where(generator.random(number) < 0.5, 300, generator.integers(0, 1 << 13, number)),
        "largest": np.full(number, (1 << 13) - 1),
    }[kind].astype(np.int32)  # fmt: skip
    rows, order = sort(keys, 13, 8, threads)
    expected, places = _expected(keys)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(order, places)


def test_what_lies_beside_the_keys_is_sorted_with_them(sort):
    generator = np.random.default_rng(6)
    keys = generator.integers(0, 1 << 17, 1000).astype(np.int32)
    beside = generator.integers(-(2**31), 2**31, 1000).astype(np.int32)
    before = beside.copy()
    rows, found = sort(keys, 17, beside=beside)
    expected, places = _expected(keys)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(found, before[places])
    np.testing.assert_array_equal(beside, before)


def test_where_fewer_blocks_run_at_once_than_the_device_has_room_for(sort):
    keys = np.random.default_rng(7).integers(0, 1 << 12, 700).astype(np.int32)
    rows, order = sort(keys, 12, alone=True)
    expected, places = _expected(keys)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(order, places)
