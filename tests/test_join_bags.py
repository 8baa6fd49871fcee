"""Bags of several features put together by one kernel, on the CPU: `tests/cuda_on_cpu` gives it what a GPU would."""

import ctypes
import random
from typing import Any

import pytest
import torch
from cuda_library import library
from launch_driver import Asked, LaunchDriver

pytest.importorskip("triton")

from embedfuse.kernels import _launch
from embedfuse.torch.backends import join_bags as module
from embedfuse.torch.backends.join_bags import MOST, join_bags

STREAM, THREADS, ITEMS = 1234, 32, 3
NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or module.EXCHANGE is None, reason="needs a GPU, and DLPack's exchange"
)


class _Driver(LaunchDriver):
    """Launches the kernel of ids of each number of bytes, and counts."""

    def __init__(self, libraries: dict[int, ctypes.CDLL]) -> None:
        super().__init__(self._run)
        self.libraries, self.launches, self.says = libraries, 0, 0

    def _run(self, asked: Asked) -> int:
        blocks, height, depth, threads, *rest = asked.words
        assert (height, depth, threads, *rest, asked.stream) == (1, 1, THREADS, 1, 1, 0, STREAM)
        self.launches += 1
        if not self.says:
            self.libraries[asked.function].launch(blocks, threads, ctypes.c_void_p(asked.places))
        return self.says


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    folder, constants = tmp_path_factory.mktemp("join_bags"), {"MOST": MOST, "THREADS": THREADS, "ITEMS": ITEMS}
    return {size: library(folder, "join_bags", BYTES=size, **constants) for size in (4, 8)}


@pytest.fixture
def driver(libraries: dict[int, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> _Driver:
    made = _Driver(libraries)
    for name, value in (
        ("device_of", lambda tensor: (0, None)), ("current_device", lambda: 0), ("raw_stream", lambda index: STREAM),
        ("driver_address", lambda: made.address), ("THREADS", THREADS), ("ITEMS", ITEMS),
        ("_functions", {(0, 4): 4, (0, 8): 8}), ("EXCHANGE", True),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return made


def _features(rng: random.Random, count: int, bags: int, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    ids: list[Any] = []
    offsets: list[Any] = []
    for _ in range(count):
        lengths = torch.tensor([rng.choice([0, 0, 1, 2, 9]) for _ in range(bags)], dtype=torch.int64)
        single = rng.random() < 0.3
        number = bags if single else int(lengths.sum())
        ids.append(torch.randint(-5, 1 << 30, (number,), dtype=dtype))
        offsets.append(None if single else torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    return ids, offsets


def _expected(ids: list[Any], offsets: list[Any], bags: int) -> tuple[Any, Any]:
    ends, before = [], 0
    for one, own in zip(ids, offsets, strict=True):
        ends.append(before + (torch.arange(bags) if own is None else own[:-1]))
        before += len(one)
    return torch.cat(ids), torch.cat([*ends, torch.tensor([before])])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_features(driver: _Driver, dtype: torch.dtype) -> None:
    rng = random.Random(3)
    for turn in range(60):
        count, bags = rng.choice([1, 2, 5, 26, MOST]), rng.choice([0, 1, 3, 40, 300])
        ids, offsets = _features(rng, count, bags, dtype)
        found = join_bags(ids, offsets, bags)
        assert found is not None and driver.launches == turn + 1
        for one, other in zip(found, _expected(ids, offsets, bags), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


def test_what_the_kernel_cannot_read_is_left_alone(driver: _Driver) -> None:
    class Own(torch.Tensor):
        pass

    ids, offsets = _features(random.Random(4), 3, 4, torch.int64)
    ids[1], offsets[1] = torch.arange(6), torch.tensor([0, 1, 2, 3, 6])
    strange: list[tuple[list[Any], list[Any]]] = []
    for other in (
        torch.arange(6).int(), torch.arange(12)[::2], torch.arange(6).view(2, 3), torch.arange(6).as_subclass(Own),
        torch.arange(6, device="meta"), torch.nn.Parameter(torch.arange(6), requires_grad=False),
    ):  # fmt: skip
        strange.append(([ids[0], other, ids[2]], offsets))
    for other in (
        offsets[1].int(), offsets[1].repeat_interleave(2)[::2], offsets[1][:4], None, offsets[1].as_subclass(Own),
    ):  # fmt: skip
        strange.append((ids, [offsets[0], other, offsets[2]]))
    for given in strange:
        assert join_bags(*given, 4) is None
    assert driver.launches == 0 and join_bags(ids, offsets, 4) is not None
    many, ends = _features(random.Random(5), MOST + 1, 2, torch.int64)
    assert join_bags(many, ends, 2) is None


def test_what_the_driver_says(driver: _Driver) -> None:
    ids, offsets = _features(random.Random(4), 3, 4, torch.int64)
    # a thread that has done nothing on the device yet
    driver.says = 201
    assert join_bags(ids, offsets, 4) is None
    driver.says = 700
    with pytest.raises(RuntimeError, match="error 700"):
        join_bags(ids, offsets, 4)


def test_numbers_are_compared_before_anything_is_read() -> None:
    ids, offsets = [torch.arange(3), torch.arange(2)], [None, torch.tensor([0, 1, 1, 2])]
    right = [torch.empty(5, dtype=torch.int64), torch.empty(7, dtype=torch.int64), 3]
    driver = LaunchDriver(lambda asked: 7)

    def joined(*given: Any) -> int:
        return _launch.join_bags(driver.address, 1, *given, 96, 32, STREAM)

    assert joined(ids, offsets, *right) == 7
    for place, wrong in ((0, torch.empty(4, dtype=torch.int64)), (1, torch.empty(8, dtype=torch.int64)), (2, 2)):
        assert joined(ids, offsets, *right[:place], wrong, *right[place + 1 :]) == -1
    assert joined(ids, offsets[:1], *right) == joined([], [], *right) == -1


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    rng = random.Random(6)
    for _ in range(20):
        count, bags = rng.choice([1, 2, 26, MOST]), rng.choice([0, 1, 3, 300, 3000])
        ids, offsets = _features(rng, count, bags, dtype)
        there = [one.cuda() for one in ids], [None if one is None else one.cuda() for one in offsets]
        found = join_bags(*there, bags)
        assert found is not None
        for one, other in zip(found, _expected(ids, offsets, bags), strict=True):
            assert one.dtype == other.dtype and torch.equal(one.cpu(), other)


@pytest.mark.gpu
@NEEDS_GPU
def test_in_a_graph_and_in_other_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    ids, offsets = _features(random.Random(7), 5, 100, torch.int64)
    there: Any = [one.cuda() for one in ids], [None if one is None else one.cuda() for one in offsets], 100
    expected = [one.cuda() for one in _expected(ids, offsets, 100)]
    assert join_bags(*there) is not None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = join_bags(*there)
    assert found is not None
    there[0][0].add_(1)
    expected[0][: len(ids[0])] += 1
    graph.replay()
    assert all(map(torch.equal, found, expected))
    with ThreadPoolExecutor(4) as threads:
        for made in threads.map(lambda _: join_bags(*there), range(16)):
            # a thread may have no context yet
            assert made is None or all(map(torch.equal, made, expected))
