"""Launches by `kernels/launch.cpp`, with a driver that writes down what it was told."""

import contextlib
import ctypes
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from launch_driver import LaunchDriver

pytest.importorskip("triton")

from embedfuse.kernels import _launch
from embedfuse.torch.backends import launching

STREAM, FUNCTION = 77, 4321


class Driver(LaunchDriver):
    """`launches` is what it was asked for, with arguments of these sizes; `answer` what it says."""

    def __init__(self, sizes=()):
        super().__init__(self._note)
        self.launches, self.answer, self.sizes = [], 0, sizes

    def _note(self, asked):
        arguments = []
        for place, size in enumerate(self.sizes):
            address = ctypes.c_uint64.from_address(asked.places + 8 * place).value
            kind = ctypes.c_int32 if size == 4 else ctypes.c_int64
            arguments.append(kind.from_address(address).value)
        self.launches.append((asked.words, asked.stream, asked.function, arguments, asked.marks))
        return self.answer


def test_a_known_kind_of_call_is_launched():
    driver = Driver([8, 8, 4, 8, 8])
    known = _launch.Kernels(driver.address, 3, [True, False])
    # the second pointer is None, the first number compiled in
    pointers, numbers = (1 << 40, None, 32), (1, 9)
    assert not known(0, STREAM, (5,), pointers, numbers)
    known.add(0, pointers, numbers, FUNCTION, 128, 1000, [0, 2, 4])
    assert known(0, STREAM, (5, 6), (1 << 44, None, 48), (1, -3))
    assert known(0, STREAM, (2, 3, 4), (16, None, 0), (1, 2**31 - 1))
    assert driver.launches == [
        ([5, 6, 1, 128, 1, 1, 1000], STREAM, FUNCTION, [1 << 44, 48, -3, 0, 0], None),
        ([2, 3, 4, 128, 1, 1, 1000], STREAM, FUNCTION, [16, 0, 2**31 - 1, 0, 0], None),
    ]


@pytest.mark.parametrize(
    ("device", "pointers", "numbers"),
    [
        (1, (16, 32), (5, 5)),  # another device
        (0, (16, 40), (5, 5)),  # an address that is no multiple of 16
        (0, (16, 32), (1, 5)),  # 1, where the compiler looks
        (0, (16, 32), (48, 5)),  # a multiple of 16 there
        (0, (16, 32), (2**31, 5)),  # numbers of 64 bits
        (0, (16, 32), (5, 2**31)),
        (0, (16, 32), (5, -(2**31) - 1)),
    ],
)
def test_calls_of_other_kinds_are_not(device, pointers, numbers):
    driver = Driver()
    known = _launch.Kernels(driver.address, 2, [True, False])
    known.add(0, (16, 32), (5, 5), FUNCTION, 32, 0, [0, 1, 2, 3])
    assert not known(device, STREAM, (1,), pointers, numbers)
    assert driver.launches == []
    assert known(0, STREAM, (1,), (160, 0), (7, 1)) and known(0, STREAM, (1,), (160, 0), (7, 64))
    known.add(device, pointers, numbers, FUNCTION + 1, 32, 0, [])
    assert known(device, STREAM, (1,), pointers, numbers)
    assert [function for _, _, function, *_ in driver.launches] == [FUNCTION, FUNCTION, FUNCTION + 1]


def test_what_cannot_be_launched_is_an_error():
    driver = Driver()
    known = _launch.Kernels(driver.address, 1, [False])
    known.add(0, (16,), (5,), FUNCTION, 32, 0, [0, 1])
    driver.answer = 701
    with pytest.raises(RuntimeError, match="error 701"):
        known(0, STREAM, (1,), (16,), (5,))
    for pointers, numbers in (((), (5,)), ((16, 16), (5,)), ((16,), ())):
        with pytest.raises(ValueError, match="as many pointers and numbers"):
            known(0, STREAM, (1,), pointers, numbers)
    with pytest.raises(TypeError):
        known(0, STREAM, (1,), ("16",), (5,))
    with pytest.raises(OverflowError):
        known(0, STREAM, (1,), (1 << 70,), (5,))
    for pointers, numbers in ((60, 3), (2**64 - 2, 0)):
        with pytest.raises(ValueError, match="62"):
            _launch.Kernels(driver.address, pointers, [False] * numbers)
    with pytest.raises(ValueError, match="62"):
        known.add(0, (16,), (1,), FUNCTION, 32, 0, [0] * 63)
    with pytest.raises(IndexError, match="not there"):
        known.add(0, (16,), (1,), FUNCTION, 32, 0, [2])
    for programs in (0, -1, 2**31, 2**32 + 1):
        with pytest.raises(IndexError, match=f"a grid of {programs} programs"):
            known(0, STREAM, (1, programs), (16,), (5,))
    with pytest.raises(ValueError, match="64"):
        _launch.launch(driver.address, FUNCTION, 1, 32, STREAM, (0,) * 65, False)
    assert len(driver.launches) == 1


def test_a_thread_without_a_context_is_left_to_triton():
    driver = Driver()
    known = _launch.Kernels(driver.address, 1, [False])
    known.add(0, (16,), (5,), FUNCTION, 32, 0, [0, 1])
    driver.answer = 201
    assert not known(0, STREAM, (1,), (16,), (5,))
    driver.answer = 0
    assert known(0, STREAM, (1,), (16,), (5,))


def test_a_launch_of_blocks_that_wait_for_each_other():
    driver = Driver([8, 4])
    assert _launch.launch(driver.address, FUNCTION, 9, 256, STREAM, (1 << 50, -1), True) == 0
    driver.answer = 720
    assert _launch.launch(driver.address, FUNCTION, 9, 256, STREAM, (16, 5), False) == 720
    assert driver.launches == [
        ([9, 1, 1, 256, 1, 1, 0], STREAM, FUNCTION, [1 << 50, -1], [2, 0, 1]),
        ([9, 1, 1, 256, 1, 1, 0], STREAM, FUNCTION, [16, 5], None),
    ]


# --- `Launcher`, with a Triton that compiles nothing -----------------------------------------------------------------


def _parameter(name):
    return SimpleNamespace(name=name, do_not_specialize=name == "n")


class Compiled(SimpleNamespace):
    """What Triton's call returns."""


class Kernel:
    """A `triton.jit` function `(a, b, n, m, TILE)`, as far as launchers look at it."""

    arg_names = ("a", "b", "n", "m", "TILE")
    params = tuple(map(_parameter, arg_names))

    def __init__(self, signature, **metadata):
        self.calls = []
        self.compiled = Compiled(
            function=FUNCTION, src=SimpleNamespace(signature=signature),
            metadata=SimpleNamespace(num_warps=2, shared=64, **metadata),
        )  # fmt: skip

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.calls.append((grid, [getattr(one, "address", one) for one in arguments], options))
            return self.compiled

        return call


SIGNATURE = {"a": "*fp32", "b": "constexpr", "n": "i32", "m": "i64", "TILE": "constexpr"}


@pytest.fixture
def driver(monkeypatch):
    made = Driver([8, 4, 8, 8, 8])
    monkeypatch.setattr(launching, "driver_address", lambda: made.address)
    monkeypatch.setattr(launching, "parameter_sizes", lambda function: made.sizes)
    monkeypatch.setattr(launching, "raw_stream", lambda device: STREAM)
    # PyTorch may know no GPU
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return made


def launch_twice(kernel):
    launcher = launching.Launcher(kernel, 2, {"TILE": 8}, (torch.float32, None))
    launcher((3,), (1 << 40, None), (5, 2**33), 0)
    launcher((4, 2), (1 << 41, None), (6, 2**34 + 1), 0, SimpleNamespace(cuda_stream=88))


def test_the_second_call_goes_to_the_driver(driver, monkeypatch):
    kernel = Kernel(SIGNATURE)
    launcher = launching.Launcher(kernel, 2, {"TILE": 8}, (torch.float32, None))
    launcher((3,), (1 << 40, None), (5, 2**33 + 1), 0)
    options = {"TILE": 8, "num_warps": 2, **launching.OPTIONS}
    assert kernel.calls == [((3,), [1 << 40, None, 5, 2**33 + 1], options)] and driver.launches == []
    launcher((4, 2), (1 << 41, None), (6, 2**34 + 1), 0)
    launcher((4, 2), (1 << 41, None), (7, 2**34 + 1), 0, SimpleNamespace(cuda_stream=88))
    assert len(kernel.calls) == 1
    assert driver.launches == [
        ([4, 2, 1, 64, 1, 1, 64], STREAM, FUNCTION, [1 << 41, 6, 2**34 + 1, 0, 0], None),
        ([4, 2, 1, 64, 1, 1, 64], 88, FUNCTION, [1 << 41, 7, 2**34 + 1, 0, 0], None),
    ]
    # somebody watches
    with monkeypatch.context() as patch:
        patch.setattr(launching, "unwatched", lambda: False)
        launcher((4,), (1 << 41, None), (6, 2**34 + 1), 0)
    # a kind that Triton may have compiled another kernel for
    launcher((4,), (1 << 41, None), (6, 16), 0)
    assert len(kernel.calls) == 3 and len(driver.launches) == 2


@pytest.mark.parametrize(
    ("signature", "sizes", "metadata"),
    [
        (SIGNATURE, [8, 4, 8, 8], {}),
        (SIGNATURE, [8, 4, 8, 8, 8, 8], {}),
        (SIGNATURE, [8, 8, 8, 8, 8], {}),
        (SIGNATURE | {"m": "fp64"}, [8, 4, 8, 8, 8], {}),
        ({}, [8, 4, 8, 8, 8], {}),
        (SIGNATURE, [8, 4, 8, 8, 8], {"num_ctas": 2}),
        (SIGNATURE, [8, 4, 8, 8, 8], {"launch_pdl": True}),
        (SIGNATURE, [8, 4, 8, 8, 8], {"global_scratch_size": 128}),
    ],
)
def test_kernels_that_are_not_as_expected_stay_with_triton(driver, signature, sizes, metadata):
    driver.sizes = sizes
    kernel = Kernel(signature, **metadata)
    launch_twice(kernel)
    assert len(kernel.calls) == 2 and driver.launches == []


def test_kernels_that_are_launched_by_address_stay_loaded(driver):
    kernel = Kernel(SIGNATURE)
    launcher = launching.Launcher(kernel, 2, {"TILE": 8}, (torch.float32, None))
    launcher((3,), (1 << 40, None), (5, 2**33 + 1), 0)
    left = weakref.ref(kernel.compiled)
    del kernel.compiled
    gc.collect()
    assert left() is not None


def test_without_the_compiled_part_or_a_driver_all_calls_are_tritons(driver, monkeypatch):

    def no_driver(*_):
        raise launching.NoCompiler("none")

    for name, value in (("Kernels", None), ("parameter_sizes", no_driver)):
        with monkeypatch.context() as patch:
            patch.setattr(launching, name, value)
            kernel = Kernel(SIGNATURE)
            launch_twice(kernel)
            assert len(kernel.calls) == 2 and driver.launches == []
