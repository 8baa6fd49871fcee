"""Lookups by the Triton backend against plain float64 loops, and what holds for all its kernels.

On a GPU where there is one, else in Triton's interpreter, which needs TRITON_INTERPRET=1 in the environment before
anything imports embedfuse.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_cases import (
    DEFAULT,
    DEVICE,
    FEATURES,
    SMALL,
    close,
    get,
    gradient,
    judge_lookup,
    judge_scale,
    lookup_of,
    make,
    needs_kernels,
    put,
    state_of,
)

from embedfuse.kernels.configs import dots_config, lookup_config, power_of_two, update_config
from embedfuse.optim import Adagrad, RowWiseAdagrad
from embedfuse.plan import DROP_NEGATIVE_IDS, DROP_NONPOSITIVE_WEIGHTS, OFFSET, T_OFFSET
from embedfuse.torch.backends import BadId, device_errors
from embedfuse.torch.backends.few_sort import FewSort
from embedfuse.torch.backends.issuing import Now
from embedfuse.torch.backends.launching import device_of
from embedfuse.torch.backends.triton import TritonBackend

pytestmark = needs_kernels


@pytest.mark.parametrize("backend", [
    lookup_of(True, 4, 32), lookup_of(False, 4, 128), lookup_of(False, 2, 32), DEFAULT,
], ids=["short", "long", "narrow", "default"])  # fmt: skip
@pytest.mark.parametrize("weighted", [True, False])
def test_pooled_lookup(backend: TritonBackend, weighted: bool) -> None:
    case = make(weighted=weighted)
    out, scale = backend.pooled_lookup(case.on_device(), put(case.features), case.csr(), case.width, True, "raise")
    expected, size = judge_lookup(case)
    close(out, expected, size)
    close(scale, judge_scale(case), judge_scale(case))


@pytest.mark.parametrize(("turns", "group", "narrow"), [
    (1, 1, 1), (1, 1, 4), (2, 4, 1), (2, 4, 4), (4, 8, 2), (2, 2, 4), (8, 8, 1),
])  # fmt: skip
@pytest.mark.parametrize("bags", [1, 2, 7, 16, 19])
@pytest.mark.parametrize("weighted", [True, False])
def test_long_bags_beside_short_ones(turns: int, group: int, narrow: int, bags: int, weighted: bool) -> None:
    """Groups of up to four ids a bag are looked up side by side, those on either side bag by bag."""
    case = make([(30, 6), (9, 40)], [(0, "mean"), (1, "sum"), (1, "sqrtn")], bags, 3, weighted)
    rng = np.random.default_rng(bags)
    lengths = np.diff(case.offsets)
    # a few long bags, which make the groups around them long; and the bag at the end of one feature
    lengths[rng.integers(0, len(lengths), len(lengths) // 8 + 1)] = rng.integers(13, 40)
    lengths[[bags - 1, -1]] = 21
    case.offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    case.ids = rng.integers(0, 9, case.offsets[-1])
    if weighted:
        case.weights = rng.uniform(0.25, 2, len(case.ids)).astype(np.float32)
    out, scale = lookup_of(False, 4, 32, turns, group, narrow).pooled_lookup(
        case.on_device(), put(case.features), case.csr(), case.width, True, "raise"
    )
    close(out, *judge_lookup(case))
    close(scale, judge_scale(case), judge_scale(case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("short", [True, False])
def test_pooled_lookup_of_16_bit_tables(dtype: torch.dtype, short: bool) -> None:
    case = make(shapes=[(9, 8), (5, 16)], features=[(0, "mean"), (1, "sum")], dtype=dtype, kind=np.int32)
    out, scale = lookup_of(short, 4, 16).pooled_lookup(
        case.on_device(), put(case.features), case.csr(), case.width, True, "raise"
    )
    assert out.dtype == dtype and scale.dtype == torch.float32
    expected, size = judge_lookup(case)
    close(out, expected, size, dtype)


@pytest.mark.parametrize("short", [True, False])
def test_without_a_combiner_there_is_no_scale(short: bool) -> None:
    case = make(features=[(1, "sum"), (3, "sum")], weighted=False)
    out, scale = lookup_of(short, 4, 128).pooled_lookup(
        case.on_device(), put(case.features), case.csr(), case.width, False, "raise"
    )
    assert scale.shape == (0,)
    expected, size = judge_lookup(case)
    close(out, expected, size)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("flags", [0, DROP_NEGATIVE_IDS, DROP_NEGATIVE_IDS | DROP_NONPOSITIVE_WEIGHTS])
def test_absent_ids_add_nothing(short: bool, flags: int) -> None:
    case = make(flags=flags)
    assert case.weights is not None
    case.ids[::3] = [-1, -7, 9, 1000][flags] if flags < 3 else -3
    case.ids[1::7] = 2**40
    case.weights[::4] = 0
    case.weights[1::4] *= -1
    out, scale = lookup_of(short, 4, 128).pooled_lookup(
        case.on_device(), put(case.features), case.csr(), case.width, True, "drop"
    )
    # weights of both signs can cancel under a root of a negative number, which is no number for the judge either
    scale_expected = judge_scale(case)
    expected, size = judge_lookup(case)
    known = ~np.isnan(expected)
    assert (np.isnan(get(out)) == ~known).all() and (np.isnan(get(scale)) == np.isnan(scale_expected)).all()
    close(out[torch.from_numpy(known).to(DEVICE)], expected[known], size[known])


@pytest.mark.parametrize("backend", [
    lookup_of(True, 2, 128), lookup_of(False, 2, 128), lookup_of(False, 2, 128, 2, 4), lookup_of(False, 2, 128, 2, 2),
], ids=["short", "long", "together", "in turn"])  # fmt: skip
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU reports later")
def test_bad_ids_are_named(backend: TritonBackend) -> None:
    case = make(flags=DROP_NEGATIVE_IDS, longest=3)
    case.ids[5] = -1
    arguments = (case.on_device(), put(case.features), case.csr(), case.width, True, "raise")
    backend.pooled_lookup(*arguments)  # type: ignore[arg-type]
    case.ids[-1], case.ids[12], case.ids[20] = 99, 99, 99
    arguments = (case.on_device(), put(case.features), case.csr(), case.width, True, "raise")
    with pytest.raises(BadId) as caught:
        backend.pooled_lookup(*arguments)  # type: ignore[arg-type]
    assert caught.value.position == 12


def test_a_bad_id_is_encoded_with_its_feature() -> None:
    assert device_errors.decode(0) is None
    assert device_errors.decode(((2**40 - 1 - 12) << 20) | 3) == (12, 3)


def test_empty_batches() -> None:
    none = make(bags=0, longest=0)
    out, scale = DEFAULT.pooled_lookup(none.on_device(), put(none.features), none.csr(), none.width, True, "raise")
    assert out.shape == (0, none.width) and scale.shape == (0,)
    case = make(longest=0)
    out, scale = DEFAULT.pooled_lookup(case.on_device(), put(case.features), case.csr(), case.width, True, "raise")
    assert not out.any() and scale.shape == (len(FEATURES) * case.bags,)
    flat = torch.zeros(len(case.table), device=DEVICE)
    for empty in (none, case):
        DEFAULT.row_grad(flat, put(empty.features), empty.csr(), scale[:0], gradient(empty))
        assert DEFAULT.coefficient_grad(
            empty.on_device(), put(empty.features), empty.csr(), scale[:0], gradient(empty)
        ).shape == (0,)
    assert not flat.any()


def test_tables_need_not_lie_in_one_tensor() -> None:
    case = make(features=[(0, "sum"), (3, "sum")])
    first = case.table[: 7 * 3]
    last = case.table[case.tables[3, T_OFFSET] :][: 6 * 64]
    parts = [put(first, torch.float32), put(last, torch.float32)]
    features = case.features.copy()
    features[0, OFFSET] = (parts[0].data_ptr() - parts[1].data_ptr()) // 4
    features[1, OFFSET] = 0
    out, _ = DEFAULT.pooled_lookup(parts[1], put(features), case.csr(), case.width, False, "raise")
    close(out, *judge_lookup(case))


# --- what holds for all --------------------------------------------------------------------------------------------


def test_results_repeat_bit_for_bit() -> None:
    case = make(shapes=[(2, 9), (30, 6)], features=[(0, "mean"), (1, "sum")], bags=5)
    grad, results = gradient(case), []
    for _ in range(2):
        update, _ = state_of(case, [Adagrad(0.1), RowWiseAdagrad(0.1)])
        out, scale = SMALL.pooled_lookup(update.table, update.features, case.csr(), case.width, True, "raise")
        SMALL.row_update(update, case.csr(), scale, grad)
        results.append((out, scale, update.table, update.slots))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_is_served() -> None:
    assert DEFAULT.supports(DEVICE, torch.bfloat16) is None
    assert "float64" in str(DEFAULT.supports(DEVICE, torch.float64))
    assert DEFAULT.supports(torch.device("meta"), torch.float32)


@pytest.mark.parametrize("widest", [1, 2, 3, 16, 63, 64, 128, 144, 288, 512, 1000, 4096, 8192, 40000])
def test_tile_sizes_fit_together(widest: int) -> None:
    lookups = [lookup_config(widest, short) for short in (True, False)]
    assert [lookup.short for lookup in lookups] == [True, False]
    update = update_config(widest)
    for sizes in (update, dots_config(update)):
        assert sizes.block_d >= widest and sizes.block % sizes.chunk == 0 and sizes.long < sizes.chunk // 2
        # a piece has less than two chunks, and no lane adds more than 256 of its gradients
        assert 2 * sizes.chunk <= 256 * sizes.terms
        # two partial sums for each chunk: no memory to speak of beside the rows that were gathered
        assert widest < 288 or sizes.chunk >= 128
        for size in dataclasses.astuple(sizes):
            assert size == power_of_two(size)
    for lookup in lookups:
        for size in (lookup.lanes, lookup.block_d, lookup.warps):
            assert size == power_of_two(size)


def ranked(keys: torch.Tensor, whole: int, window: int, position: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted keys, and their positions."""
    _, pointer = device_of(keys)
    memory = [keys.clone(), torch.empty_like(keys)]
    order, beside = (torch.empty(len(keys), dtype=dtype, device=keys.device) for dtype in (position, torch.int32))
    pointers = [pointer(tensor) for tensor in memory]
    found = FewSort(keys.dtype, position, whole, window)(
        len(keys), (pointers[0], pointers[1]), pointer(order), pointer(beside), Now(keys)
    )
    return next(tensor for tensor, one in zip(memory, pointers, strict=True) if one is found), order


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("number", [1, 15, 16, 17, 256, 300])
def test_keys_are_sorted_by_counting(number: int, dtype: torch.dtype) -> None:
    keys = torch.randint(-3, 60, (number,), dtype=dtype, device=DEVICE)
    keys[::7] = torch.iinfo(dtype).max
    expected = torch.sort(keys, stable=True)
    found, order = ranked(keys, 300, 16, torch.int64)
    assert torch.equal(found, expected.values) and torch.equal(order, expected.indices)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("number", "window"), [(33, 32), (64, 32), (65, 64), (300, 16), (1100, 32)])
def test_keys_are_sorted_in_windows(number: int, window: int, dtype: torch.dtype) -> None:
    keys = torch.randint(-3, 60, (number,), dtype=dtype, device=DEVICE)
    keys[::7] = torch.iinfo(dtype).max
    expected = torch.sort(keys, stable=True)
    found, order = ranked(keys, 32, window, torch.int32)
    assert torch.equal(found, expected.values) and torch.equal(order, expected.indices)


@pytest.mark.parametrize("ids", [8, 16, 20])
def test_windows_of_tables_one_after_the_other_are_sorted(ids: int) -> None:
    # those of some tables are a window or two, of others share one; the last table is read twice
    tables = torch.arange(30, device=DEVICE).repeat_interleave(ids)
    keys = (tables.clamp(max=28) * 100 + torch.randint(0, 9, tables.shape, device=DEVICE)).int()
    keys[::11] = 10_000
    expected = torch.sort(keys, stable=True)
    found, order = ranked(keys, 32, 16, torch.int32)
    assert torch.equal(found, expected.values) and torch.equal(order, expected.indices)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("most", [3, 1000, 2**31 - 1])
@pytest.mark.parametrize("number", [4097, 8193, 13_312, 32_767, 32_768, 50_001])
def test_many_keys_are_sorted_in_windows(number: int, most: int) -> None:
    keys = torch.randint(0, most, (number,), dtype=torch.int32, device=DEVICE)
    expected = torch.sort(keys, stable=True)
    found, order = ranked(keys, 4096, 512, torch.int64)
    assert torch.equal(found, expected.values) and torch.equal(order, expected.indices)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_gpu_reports_bad_ids_at_a_later_call() -> None:
    case = make(longest=3)
    arguments = (case.on_device(), put(case.features))
    DEFAULT.pooled_lookup(*arguments, case.csr(), case.width, True, "raise")
    device_errors.report(DEVICE, wait=True)
    case.ids[9] = 1000
    DEFAULT.pooled_lookup(*arguments, case.csr(), case.width, True, "raise")
    with pytest.raises(device_errors.LateBadId) as caught:
        device_errors.report(DEVICE, wait=True)
    assert caught.value.position == 9
    device_errors.report(DEVICE, wait=True)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_nothing_is_compiled_anew_when_the_batch_changes() -> None:
    from embedfuse.kernels.cut_runs import join_kernel
    from embedfuse.kernels.long_segments import long_kernel
    from embedfuse.kernels.pooled_lookup import pooled_long_kernel, pooled_short_kernel
    from embedfuse.kernels.row_update import segments_kernel
    from embedfuse.kernels.runs import key_kernel, segment_kernel

    kernels = (
        pooled_long_kernel, pooled_short_kernel, segments_kernel, long_kernel, join_kernel, key_kernel, segment_kernel,
    )  # fmt: skip
    counts = []
    for bags in (160, 161, 112, 1, 333):
        case = make(features=[(3, "mean"), (1, "sum")], bags=bags, longest=3)
        update, _ = state_of(case, [Adagrad(0.1)] * 5)
        _, scale = DEFAULT.pooled_lookup(update.table, update.features, case.csr(), case.width, True, "raise")
        DEFAULT.row_update(update, case.csr(), scale, gradient(case))
        counts.append(sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()))
    assert counts[-1] == counts[1]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_direct_launches_take_the_kernel_that_fits() -> None:
    # twice each, so that the second is direct; what Triton specialises on changes in between
    for shift in (0, 1, 4, 0):
        for kind in (np.int64, np.int32):
            for bags in (16, 17, 1):
                case = make(shapes=[(9, 64)], features=[(0, "mean")], bags=bags, longest=9, kind=kind)
                table = torch.zeros(len(case.table) + shift, device=DEVICE)[shift:]
                table.copy_(case.on_device())
                expected, size = judge_lookup(case)
                for _ in range(2):
                    out, _scale = DEFAULT.pooled_lookup(
                        table, put(case.features), case.csr(), case.width, True, "ignore"
                    )
                    close(out, expected, size)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_hooks_see_every_launch() -> None:
    from triton import knobs

    case, seen = make(), []
    arguments = (case.on_device(), put(case.features), case.csr(), case.width, True, "ignore")
    DEFAULT.pooled_lookup(*arguments)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        DEFAULT.pooled_lookup(*arguments)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_graph_can_be_captured() -> None:
    case = make(bags=64, longest=5)
    update, _ = state_of(case, [Adagrad(0.1)] * 5)
    csr, grad, start = case.csr(), gradient(case), update.table.clone()
    slots = update.slots.clone()

    def work() -> Tensor:
        out, scale = DEFAULT.pooled_lookup(update.table, update.features, csr, case.width, True, "raise")
        DEFAULT.row_update(update, csr, scale, grad)
        return out

    work()
    expected = update.table.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    update.table.copy_(start)
    update.slots.copy_(slots)
    graph.replay()
    assert torch.equal(update.table, expected) and out.shape == (64, case.width)
