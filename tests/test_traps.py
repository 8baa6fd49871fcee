"""Mistakes that other engines have made, each with its right answer worked out by hand."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, Case, Workload, bits, build, each, numbers, one, update_of
from checks import check_coefficient_grad, check_lookup, check_max, check_row_grad, check_update, scale_of
from tolerance import assert_close, assert_same_bits
from torch import Tensor

from embedfuse.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from embedfuse.plan import DROP_NEGATIVE_IDS, OFFSET, ROW_BASE, STRIDE, T_OFFSET, T_ROW_BASE, TABLE
from embedfuse.torch.backends import Backend, BadId, Csr

NOTHING = torch.zeros(0)


def _work(
    tables: tuple[tuple[int, int], ...], features: tuple[Any, ...], ids: list[int], offsets: list[int], bags: int,
    device: str, weights: list[float] | None = None,
) -> Workload:  # fmt: skip
    """Tables of zeros, the ids as given, an upstream gradient of ones."""
    work = build(Case("by hand", tables, features, bags, (0, 0)), device)
    work.table.nan_to_num_(7.0).mul_(0)
    given = None if weights is None else torch.tensor(weights, device=device)
    csr = Csr(torch.tensor(ids, device=device), torch.tensor(offsets, device=device), given, bags)
    return replace(work, csr=csr, grad=torch.ones_like(work.grad), longest=max(len(ids), 1))


def test_duplicates_of_one_bag_are_one_step(backend: Backend, device: str) -> None:
    work = _work(((5, 1),), each(1), [3, 3, 3], [0, 3], 1, device)
    update = update_of(work, [SGD(0.1)])
    backend.row_update(update, work.csr, NOTHING.to(device), work.grad)
    assert_close(numbers(update.table)[:5], [0, 0, 0, -0.3, 0], 1e-7)
    work.table.zero_()
    update = update_of(work, [Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-8)])
    backend.row_update(update, work.csr, NOTHING.to(device), work.grad)
    # three separate steps would leave 3
    assert_close(numbers(update.slots)[:5], [0, 0, 0, 9, 0], 0)
    assert_close(numbers(update.table)[:5], [0, 0, 0, -0.1, 0], 1e-8)


def test_features_that_share_a_table_make_one_step(backend: Backend, device: str) -> None:
    work = _work(((9, 2),), (one(), one()), [7, 7], [0, 1, 2], 1, device)
    update = update_of(work, [Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-8)])
    backend.row_update(update, work.csr, NOTHING.to(device), work.grad)
    assert_close(numbers(update.slots)[14:16], [4, 4], 0)


def test_mean_and_sum_on_one_table(backend: Backend, device: str) -> None:
    work = _work(((4, 1),), (one(0, "mean"), one(0, "sum")), [1, 2, 1, 3], [0, 2, 4], 1, device)
    out = torch.zeros_like(work.table)
    backend.row_grad(out, work.features, work.csr, torch.tensor([0.5, 1.0], device=device), work.grad)
    assert_close(numbers(out)[:4], [0, 1.5, 0.5, 1], 0)


def test_adam_moves_by_the_learning_rate_in_its_first_step(backend: Backend, device: str) -> None:
    work = _work(((2, 3),), each(1), [1], [0, 1], 1, device)
    update = update_of(work, [Adam(0.1, epsilon=1e-12, bias_correction=True)])
    backend.row_update(update, work.csr, NOTHING.to(device), work.grad)
    assert_close(numbers(update.table)[:6], [0, 0, 0, -0.1, -0.1, -0.1], 1e-6)


def test_each_weight_has_its_own_gradient(backend: Backend, device: str) -> None:
    work = _work(((4, 2),), each(1), [2, 2], [0, 2], 1, device, [1.0, 10.0])
    work.table[4:6] = torch.tensor([3.0, 5.0], device=device)
    check_lookup(work, backend)
    assert_close(numbers(check_coefficient_grad(work, backend)), [8, 8], 0)
    assert_close(numbers(check_row_grad(work, backend))[:8], [0, 0, 0, 0, 11, 11, 0, 0], 0)


def test_empty_bags_are_exact_zeros_and_touch_nothing(backend: Backend, device: str) -> None:
    work = _work(((3, 2), (4, 3)), (one(0, "mean"), one(1, "sqrtn")), [1, 2], [0, 0, 1, 1, 1, 1, 2, 2, 2], 4, device)
    work.table[:6] = torch.inf
    work.table[2:4] = 1.0
    out = check_lookup(work, backend)
    assert_same_bits(bits(out[[0, 2, 3], :2]), np.zeros((3, 2), np.int32))
    check_max(work, backend)


def test_weights_that_cancel_give_zeros(backend: Backend, device: str) -> None:
    work = _work(((3, 2),), (one(0, "mean"),), [1, 2, 0], [0, 2, 3], 2, device, [1.0, -1.0, 0.0])
    work.table[:6] = torch.arange(6.0, device=device)
    out, scale = backend.pooled_lookup(work.table, work.features, work.csr, 2, True, "drop")
    assert numbers(scale).tolist() == [0, 0] and numbers(out).tolist() == [[0, 0], [0, 0]]
    assert not numbers(backend.coefficient_grad(work.table, work.features, work.csr, scale, work.grad)).any()


def test_max_of_weighted_rows_ties_and_nan(backend: Any, device: str) -> None:
    # the first of equal values wins, and the first NaN over all numbers
    ids, weights = [1, 2, 3, 0, 4, 2, 4], [1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    work = _work(((5, 1),), each(1), ids, [0, 3, 7], 2, device, weights)
    work.table[:5] = torch.tensor([9.0, 4.0, 2.0, 4.0, torch.nan], device=device)
    out, winners = backend.max_lookup(work.table, work.features, work.csr, 1, "drop")
    assert numbers(winners).tolist() == [[0], [4]]
    assert_close(numbers(out), [[4], [np.nan]], 0)
    check_max(work, backend)
    flat = torch.zeros_like(work.table)
    weighted = work.csr._replace(weights=torch.full((7,), 3.0, device=device))
    backend.max_grad(flat, work.features, weighted, winners, work.grad)
    assert_close(numbers(flat)[:5], [0, 3, 0, 0, 3], 0)


# --- ids that are no rows ------------------------------------------------------------------------------------------


def test_an_id_past_the_end_never_reads_or_trains_another_row(backend: Backend, device: str) -> None:
    work = _work(((5, 2), (5, 2)), each(2), [5, 1, -1, 9], [0, 2, 4], 1, device)
    work.table[:10] = 1.0
    work.table[10:] = torch.nan
    work.table[32:42] = torch.nan
    out, _ = backend.pooled_lookup(work.table, work.features, work.csr, 4, False, "drop")
    assert numbers(out).tolist() == [[1, 1, 0, 0]]
    update = update_of(work, [SGD(1.0), SGD(1.0)])
    backend.row_update(update, work.csr, NOTHING.to(device), work.grad)
    assert numbers(update.table)[:10].tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 1, 1]
    assert np.isnan(numbers(update.table)[10:42]).all()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_extreme_ids(kind: torch.dtype, backend: Backend, device: str) -> None:
    limits = torch.iinfo(kind)
    work = _work(((4, 3),), (one(0, "mean"),), [0], [0, 5], 1, device)
    ids = torch.tensor([limits.min, 2, limits.max, limits.min + 1, 2**31 - 1], dtype=kind, device=device)
    work = replace(work, csr=work.csr._replace(ids=ids))
    work.table[:12] = torch.arange(12.0, device=device)
    check_lookup(work, backend)
    check_row_grad(work, backend)
    check_coefficient_grad(work, backend)
    check_max(work, backend)


@pytest.mark.parametrize(
    ("flags", "ids", "position"),
    [(0, [0, 3, -1, 4, 0], 2), (DROP_NEGATIVE_IDS, [0, 3, -1, 4, 9], 3), (DROP_NEGATIVE_IDS, [0, 3, -1, 2, -9], None)],
)
def test_raise_names_the_first_bad_id(
    flags: int, ids: list[int], position: int | None, placement: tuple[str, str], backend: Any, device: str
) -> None:
    # the second feature has the larger table, so its id 4 would do there
    work = _work(((4, 2), (5, 2)), (one(0, "sum", flags), one(1)), [*ids, 4], [0, 2, 5, 5, 6], 2, device)
    for look in (
        lambda: backend.pooled_lookup(work.table, work.features, work.csr, 4, False, "raise")[0],
        lambda: backend.max_lookup(work.table, work.features, work.csr, 4, "raise")[0],
    ):
        if position is None:
            assert not numbers(look()).any()
        elif placement[0] != "triton":
            with pytest.raises(BadId) as caught:
                look()
            assert caught.value.position == position
            assert isinstance(caught.value, IndexError)


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1028, 1280, 1536, 2048])
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_wide_rows_in_many_bags(dim: int, kind: str, backend: Backend, device: str, interpreted: bool) -> None:
    case = Case("wide", ((50, dim),), each(1), 8 if interpreted else 4096, (1, 1), dtype=kind)
    work = build(case, device)
    out, _ = backend.pooled_lookup(work.table, work.features, work.csr, dim, False, "drop")
    assert torch.equal(out, work.table[: 50 * dim].view(50, dim)[work.csr.ids])


def test_tables_of_odd_widths_side_by_side(backend: Backend, device: str) -> None:
    case = Case("odd", tuple((6, dim) for dim in (1, 2, 3, 5, 7, 13, 65, 127)), each(8), 3)
    work = build(case, device)
    check_lookup(work, backend)
    check_update(work, backend, [RowWiseAdagrad(0.1)] * 8)


def test_row_numbers_past_32_bits(backend: Backend, device: str) -> None:
    work = build(CASES["shared_table"], device)
    for base, array in ((ROW_BASE, work.group.features), (T_ROW_BASE, work.group.tables)):
        array[:, base] += 2**32 - 10
    work = replace(
        work, features=torch.from_numpy(work.group.features).to(device),
        tables=torch.from_numpy(work.group.tables).to(device),
    )  # fmt: skip
    check_row_grad(work, backend)
    check_update(work, backend, [Adagrad(0.1), SGD(0.1)])


def test_elements_past_31_bits(backend: Backend, device: str, interpreted: bool) -> None:
    if interpreted:
        pytest.skip("too slow in the interpreter")
    rows, dim = 17_000_000, 128
    case = Case("huge", ((4, 2),), each(1), 1, (0, 0), dtype="float16")
    work = build(case, device)
    # memory is only taken where it is touched
    table = torch.from_numpy(np.zeros(rows * dim, np.float16)).to(device)
    work.group.features[0, 2:4] = work.group.tables[0, 1:3] = rows, dim
    work.group.features[0, STRIDE] = dim
    csr = Csr(torch.tensor([rows - 1], device=device), torch.tensor([0, 1], device=device), None, 1)
    work = replace(
        work, table=table, csr=csr, features=torch.from_numpy(work.group.features).to(device),
        tables=torch.from_numpy(work.group.tables).to(device), grad=torch.ones(1, dim, device=device),
    )  # fmt: skip
    update = update_of(work, [SGD(1.0)])
    backend.row_update(update, csr, NOTHING.to(device), work.grad)
    near = slice((rows - 1000) * dim, None)
    assert_same_bits(numbers(table[near])[:-dim], np.zeros(999 * dim))
    assert_same_bits(numbers(table[near])[-dim:], np.full(dim, -1.0))
    assert not table[: 1000 * dim].any() and not table[(rows * dim) % 2**31 :][: 1000 * dim].any()
    out, _ = backend.pooled_lookup(table, work.features, csr, dim, False, "drop")
    assert_same_bits(numbers(out), np.full((1, dim), -1.0))


def test_a_long_sum_keeps_its_small_terms(backend: Backend, device: str, interpreted: bool) -> None:
    count = 2**10 if interpreted else 2**17
    work = _work(((2, 1),), each(1), [1] * (count + 1), [0, count + 1], 1, device, [2.0**24] + [1.0] * count)
    out = torch.zeros_like(work.table)
    backend.row_grad(out, work.features, work.csr, NOTHING.to(device), work.grad)
    # added one after the other, none of the ones would change the sum
    assert abs(float(out[1]) - 2**24 - count) <= count / 32
    work.table[1] = 1.0
    pooled, _ = backend.pooled_lookup(work.table, work.features, work.csr, 1, False, "drop")
    assert pooled.isfinite().all()


def test_millions_of_copies_of_one_id(
    placement: tuple[str, str], backend: Backend, device: str, interpreted: bool
) -> None:
    if interpreted or placement == ("eager", "cpu"):
        pytest.skip("takes half a minute")
    count = 20_000_000
    work = _work(((2, 1),), each(1), [0], [0, count], 1, device)
    csr = work.csr._replace(ids=torch.zeros(count, dtype=torch.int32, device=device))
    update = update_of(work, [SGD(1e-6)])
    backend.row_update(update, csr, NOTHING.to(device), work.grad)
    # ones added one after the other in float32 stop at 2**24
    assert_close(numbers(update.table)[:2], [-20, 0], 1e-5)


# --- memory --------------------------------------------------------------------------------------------------------


def test_tables_in_separate_tensors(backend: Backend, device: str) -> None:
    """OFFSET counts from the data pointer given, and may point into other tensors, before it or after it."""
    features = tuple(one(i, combiner) for i, combiner in enumerate(("sum", "mean", "sqrtn", "mean_by_count")))
    work = build(Case("apart", ((7, 1), (5, 3), (20, 63), (6, 8)), features, 3, weights="positive"), device)
    shapes = work.group.tables[:, [1, 2]].tolist()
    separate = [torch.empty(rows * dim, device=device) for rows, dim in shapes]
    for tensor, (start, rows, dim, *_) in zip(separate, work.group.tables.tolist(), strict=True):
        tensor.copy_(work.table[start : start + rows * dim])
    base = separate[2]
    offsets = np.array([(tensor.data_ptr() - base.data_ptr()) // 4 for tensor in separate])
    moved_features = work.features.clone()
    moved_features[:, OFFSET] = torch.from_numpy(offsets).to(device)[work.features[:, TABLE]]
    moved = replace(work, table=base, features=moved_features)
    scale = scale_of(work)
    optimizers = [RowWiseAdagrad(0.1), Adagrad(0.1), SGD(0.1), None]
    updates = [update_of(work, optimizers), update_of(moved, optimizers)]
    updates[1].tables[:, T_OFFSET] = torch.from_numpy(offsets).to(device)
    arguments = work.csr, work.group.width
    pairs = [
        (backend.pooled_lookup(w.table, w.features, *arguments, True, "drop")[0],
         backend.coefficient_grad(w.table, w.features, work.csr, scale, work.grad))
        for w in (work, moved)
    ]  # fmt: skip
    for joined, apart in zip(*pairs, strict=True):
        assert_same_bits(bits(apart), bits(joined))
    for update in updates:
        backend.row_update(update, work.csr, scale, work.grad)
    for tensor, (start, rows, dim, *_) in zip(separate, work.group.tables.tolist(), strict=True):
        assert_same_bits(bits(tensor), bits(work.table[start : start + rows * dim]))


@pytest.mark.parametrize("name", ["weighted_means", "shared_table"])
def test_int32_and_int64_ids_give_the_same_bits(name: str, backend: Backend, device: str) -> None:
    work = build(CASES[name], device)
    narrow = replace(work, csr=work.csr._replace(ids=work.csr.ids.int()))
    for check in (check_lookup, check_row_grad, check_coefficient_grad):
        assert_same_bits(bits(check(narrow, backend)), bits(check(work, backend)))


# --- determinism ---------------------------------------------------------------------------------------------------


def _everything(work: Workload, backend: Backend) -> list[Tensor]:
    """All that the ops give, and tables and slots after an update."""
    scale = scale_of(work)
    flat = torch.zeros_like(work.table)
    backend.row_grad(flat, work.features, work.csr, scale, work.grad)
    update = update_of(replace(work, table=work.table.clone()), [RowWiseAdagrad(0.1)] * len(work.case.tables))
    results = [
        *backend.pooled_lookup(work.table, work.features, work.csr, work.group.width, work.group.normalised, "drop"),
        backend.coefficient_grad(work.table, work.features, work.csr, scale, work.grad),
        backend.row_square_sum(update, work.csr, scale, work.grad),
    ]
    backend.row_update(update, work.csr, scale, work.grad)
    return [*results, flat, update.table, update.slots]


def _assert_repeats(make: Callable[[], list[Tensor]], times: int, before: Callable[[int], None]) -> None:
    first = make()
    for number in range(1, times):
        before(number)
        for one_result, other in zip(first, make(), strict=True):
            assert_same_bits(bits(other), bits(one_result), f"run {number}")


@pytest.mark.parametrize("ids", ["same", "zipf"])
def test_every_run_gives_the_same_bits(ids: Any, backend: Backend, device: str, interpreted: bool) -> None:
    bags, length = (2, 36) if interpreted else (500, 200)
    case = Case("repeat", ((900, 5), (30, 16)), (one(0, "mean"), one(1)), bags, (length, length), ids, "positive")
    work = build(case, device)
    _assert_repeats(lambda: _everything(work, backend), 2 if interpreted else 4, lambda _: None)


def test_the_number_of_threads_changes_no_bit(backend: Backend, device: str, interpreted: bool) -> None:
    if interpreted or device != "cpu":
        pytest.skip("one thread drives a GPU, and the interpreter")
    case = Case("threads", ((900, 5), (30, 64)), (one(0, "mean"), one(1)), 300, (0, 90), "zipf", "positive")
    work = build(case, device)
    _assert_repeats(lambda: _everything(work, backend), 4, lambda number: torch.set_num_threads(number + 1))


def test_two_threads_at_once(backend: Backend, device: str, interpreted: bool) -> None:
    if interpreted:
        pytest.skip("the interpreter has global state")
    works = [build(CASES[name], device) for name in ("zipf", "mixed_dims")]
    alone = [_everything(work, backend) for work in works]
    together: list[list[Tensor]] = [[], []]

    def repeat(number: int) -> None:
        for _ in range(5):
            together[number] = _everything(works[number], backend)

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, expected in zip(together, alone, strict=True):
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(bits(result), bits(right))
