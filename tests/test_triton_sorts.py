"""Updates of batches that are sorted by `RadixSort`: on a GPU by its kernels, else by PyTorch in their place."""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_cases import (
    DEVICE,
    SMALL,
    check_update,
    close,
    get,
    gradient,
    judge_gradient,
    make,
    needs_kernels,
    put,
    small_update,
)

from embedfuse.optim import SGD, RowWiseAdagrad
from embedfuse.torch.backends import Rows, radix_sort, sorted_runs
from embedfuse.torch.backends.cuda_source import NoCompiler
from embedfuse.torch.backends.descriptor_facts import table_facts
from embedfuse.torch.backends.issuing import Now
from embedfuse.torch.backends.triton import TritonBackend

pytestmark = needs_kernels
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")


class _Host:
    """A `RadixSort` of tensors, where there is no GPU."""

    def __init__(self, bits: int) -> None:
        self.bits, self.batches = bits, 0

    def words(self, number: int) -> int:
        return 0

    def __call__(
        self, number: int, keys: tuple[Tensor, Tensor], beside: tuple[Tensor, Tensor], scratch: Tensor,
        zero: Tensor, first: Tensor | int, to: object,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        source, target = keys
        assert 0 <= int(source[:number].min()) and int(source[:number].max()) < 1 << self.bits
        target[:number], order = torch.sort(source[:number], stable=True)
        beside[1][:number] = order if isinstance(first, int) else first[:number][order]
        self.batches += 1
        return target, beside[1]


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Those that were made; never those of other tests."""
    made: list[object] = []

    @functools.cache
    def make_one(bits: int, device: int) -> object:
        sort = radix_sort.RadixSort(bits, device) if DEVICE.type == "cuda" else _Host(bits)
        made.append(sort)
        return sort

    monkeypatch.setattr(sorted_runs, "radix_sort", make_one)
    return made


SHAPES = [(40, 3), (300, 8), (5, 1)]
CARRIED = [(0, "sum"), (1, "sum"), (2, "sum"), (1, "sum")]
MEANS = [(0, "mean"), (1, "sum"), (2, "sqrtn")]


@pytest.mark.parametrize("kind", ["carried", "weighted", "scaled"])
def test_row_updates(sorts: list[object], kind: str) -> None:
    features = MEANS if kind == "scaled" else CARRIED
    case = make(SHAPES, features, bags=20, longest=7, weighted=kind == "weighted", seed=3)
    assert len(case.ids) > SMALL._update_config(8).few
    check_update(SMALL, case, [RowWiseAdagrad(0.1), SGD(0.1, momentum=0.9), None], scaled=kind == "scaled")
    assert len(sorts) == 1


@pytest.mark.parametrize("kind", ["carried", "weighted"])
def test_gradients_of_rows(sorts: list[object], kind: str) -> None:
    case = make(SHAPES, CARRIED, bags=20, longest=7, weighted=kind == "weighted", seed=4)
    out, grad = put(case.table * 0).float(), gradient(case)
    scale = torch.empty(0, device=DEVICE)
    SMALL.row_grad(out, put(case.features), case.csr(), scale, grad)
    close(out, judge_gradient(case, np.ones(len(case.offsets) - 1), get(grad)), 8.0)
    assert len(sorts) == 1


def test_few_and_many_in_turn(sorts: list[object]) -> None:
    """By one sorter, which keeps layouts for numbers that are rounded up."""
    cases = [make(SHAPES, CARRIED, bags=bags, longest=7, weighted=False, seed=bags) for bags in (3, 6, 3, 7)]
    numbers = [len(case.ids) for case in cases]
    # one configuration, by which sorters are known
    backend = TritonBackend(update=functools.cache(small_update))
    config = backend._update_config(8)
    assert max(numbers[0], numbers[2]) <= config.some < config.few < min(numbers[1], numbers[3])
    assert max(numbers) <= sorted_runs.ALIGNMENT
    tables, scale = put(cases[0].tables), torch.empty(0, device=DEVICE)
    for case in cases:
        np.testing.assert_array_equal(case.tables, cases[0].tables)
        source, grad = put(case.table).float(), gradient(case)
        out = torch.zeros_like(source)
        backend.row_grad(out, put(case.features), case.csr(), scale, grad, Rows(source, tables))
        close(out, judge_gradient(case, np.ones(len(case.offsets) - 1), get(grad)), 8.0)
    assert len(sorts) == 1
    assert len({id(found) for found in table_facts(tables).passes.values()}) == 1


def test_without_a_compiler_pytorch_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise NoCompiler("NVRTC was not found: gone")

    monkeypatch.setattr(radix_sort, "functions_of", refuse)
    radix_sort.radix_sort.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"sorted by torch.sort, which is slower: NVRTC was not found: gone"):
        assert radix_sort.radix_sort(20, 0) is None
    assert radix_sort.why_not(0) == "NVRTC was not found: gone"
    # told once
    assert radix_sort.radix_sort(20, 0) is None
    monkeypatch.setattr(sorted_runs, "radix_sort", lambda bits, device: None)
    case = make(SHAPES, CARRIED, bags=20, longest=7, weighted=False, seed=6)
    check_update(SMALL, case, [SGD(0.1)] * 3, scaled=False)
    radix_sort.radix_sort.cache_clear()


def _sorted(sort: radix_sort.RadixSort, keys: Tensor, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
    number = keys.shape[0]
    pairs = [keys.clone(), torch.empty_like(keys)], [torch.empty_like(keys), torch.empty_like(keys)]
    scratch = torch.empty(sort.words(number), dtype=torch.int32, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = sort(
        number, (pairs[0][0].data_ptr(), pairs[0][1].data_ptr()), (pairs[1][0].data_ptr(), pairs[1][1].data_ptr()),
        scratch.data_ptr(), zero.data_ptr(), 0 if beside is None else beside.data_ptr(), Now(keys),
    )  # fmt: skip
    rows, values = (
        next(t for t in pair if t.data_ptr() == address) for pair, address in zip(pairs, found, strict=True)
    )
    return rows, values


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bits", [3, 8, 13, 16, 20, 24, 31])
@pytest.mark.parametrize("number", [1, 4095, 4097, 1_000_003, 6_000_000])
def test_as_pytorch_sorts(bits: int, number: int) -> None:
    assert radix_sort.why_not(0) is None
    sort = radix_sort.RadixSort(bits, 0)
    generator = torch.Generator(DEVICE).manual_seed(number)
    keys = torch.randint(0, 1 << bits, (number,), dtype=torch.int32, device=DEVICE, generator=generator)
    keys[::2] = 1 << bits - 1
    expected = torch.sort(keys, stable=True)
    rows, order = _sorted(sort, keys)
    assert torch.equal(rows, expected.values)
    assert torch.equal(order.long(), expected.indices)
    beside = torch.arange(number, 0, -1, dtype=torch.int32, device=DEVICE)
    assert torch.equal(_sorted(sort, keys, beside)[1], beside[expected.indices])


@pytest.mark.gpu
@needs_gpu
def test_on_another_stream_and_in_a_graph() -> None:
    sort = radix_sort.RadixSort(20, 0)
    keys = torch.randint(0, 1 << 20, (300_000,), dtype=torch.int32, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = keys.flip(0)
        rows, _ = _sorted(sort, late)
    side.synchronize()
    assert torch.equal(rows, torch.sort(keys).values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, order = _sorted(sort, keys)
    for seed in range(3):
        keys.copy_(torch.randint(0, 1 << 20, (300_000,), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        expected = torch.sort(keys, stable=True)
        assert torch.equal(rows, expected.values)
        assert torch.equal(order.long(), expected.indices)
