"""Gradients and updates by the Triton backend against plain float64 loops.

On a GPU where there is one, else in Triton's interpreter, which needs TRITON_INTERPRET=1 in the environment before
anything imports embedfuse.
"""

import numpy as np
import pytest
import torch
from triton_cases import (
    DEFAULT,
    DEVICE,
    ONE_WINDOW,
    SINGLE,
    SMALL,
    check_update,
    close,
    each_id,
    get,
    gradient,
    judge_gradient,
    judge_moments,
    judge_scale,
    judge_sums,
    make,
    needs_kernels,
    put,
    row_of,
    state_of,
)

from embedfuse.optim import FTRL, SGD, Adagrad, Adam, AdamW, Optimizer, RowWiseAdagrad
from embedfuse.plan import (
    COLUMN,
    DIM,
    DROP_NONPOSITIVE_WEIGHTS,
    MOMENT,
    OFFSET,
    POWER,
    ROW_BASE,
    T_ROW_BASE,
)
from embedfuse.torch.backends.triton import TritonBackend

pytestmark = needs_kernels


OPTIMIZERS: list[Optimizer] = [
    SGD(0.1), SGD(0.1, momentum=0.9), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), AdamW(0.1), FTRL(0.1),
    Adagrad(0.1, clipvalue=0.5, weight_decay_factor=0.1, clip_weight_min=-0.5, clip_weight_max=0.4),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_row_update(optimizer: Optimizer) -> None:
    check_update(SMALL, make(), [optimizer] * 5)


def test_row_update_with_several_rules_and_frozen_tables() -> None:
    own = [Adagrad(0.1), RowWiseAdagrad(0.2), None, SGD(0.3), Adagrad(0.4, epsilon=0.1)]
    check_update(SMALL, make(seed=2), own)
    check_update(SMALL, make(seed=3), [None, None, SGD(0.1), None, None])
    check_update(SMALL, make(seed=3), [None] * 5)


@pytest.mark.parametrize("layout", ["transposed", "one row", "one number", "sliced"])
def test_row_update_takes_any_strides(layout: str) -> None:
    check_update(SMALL, make(seed=4, longest=3), [RowWiseAdagrad(0.1)] * 5, layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_row_update_of_16_bit_tables(dtype: torch.dtype) -> None:
    case = make(shapes=[(9, 8), (5, 16)], features=[(0, "mean"), (1, "sum")], dtype=dtype, kind=np.int32)
    check_update(SMALL, case, [Adagrad(0.1), RowWiseAdagrad(0.1)])
    check_update(SMALL, case, [Adagrad(0.1), RowWiseAdagrad(0.1)], grad_dtype=torch.float32)


def test_row_update_joins_records() -> None:
    check_update(SMALL, make(records=2, bags=2, longest=3), [Adagrad(0.1)] * 5)


def test_row_update_without_weights_or_scale() -> None:
    check_update(SMALL, make(weighted=False), [SGD(0.1)] * 5)
    check_update(SMALL, make(weighted=False, features=[(0, "sum"), (3, "sum")]), [SGD(0.1)] * 5, scaled=False)
    check_update(SMALL, make(features=[(0, "sum"), (3, "sum")]), [SGD(0.1)] * 5, scaled=False)


@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_row_update_with_a_scale_for_the_gradient(skip: float | None) -> None:
    check_update(SMALL, make(longest=3), [RowWiseAdagrad(0.1)] * 5, grad_scale=0.125, skip=skip)


@pytest.mark.parametrize("backend", [SMALL, SINGLE, ONE_WINDOW], ids=["many", "one", "one window"])
@pytest.mark.parametrize("rows", [1, 2, 3, 12])
def test_row_update_of_rows_that_hold_the_batch(rows: int, backend: TritonBackend) -> None:
    # runs of many chunks: whole folds of them, the windows around, and cut runs side by side
    case = make(shapes=[(rows, 5)], features=[(0, "sum")], bags=30, longest=6, seed=rows)
    check_update(backend, case, [RowWiseAdagrad(0.01)])


def test_row_update_of_wide_rows_with_the_default_tiles() -> None:
    # pieces of up to 1023 ids, two and more of them to a run
    case = make(shapes=[(3, 2049)], features=[(0, "sum")], bags=1100, longest=3)
    check_update(DEFAULT, case, [RowWiseAdagrad(0.01)])


def test_row_update_one_segment_at_a_time() -> None:
    check_update(SINGLE, make(seed=5), [Adagrad(0.1), None, FTRL(0.1), SGD(0.1), RowWiseAdagrad(0.1)])


def test_tables_come_in_any_order() -> None:
    # without ids for the second and with the rows of the first two swapped, as a shard may have them
    case = make(shapes=[(4, 3), (5, 2), (6, 4)], features=[(0, "sum"), (2, "mean")], bags=6)
    case.tables[:2, T_ROW_BASE] = 5, 0
    case.features[0, ROW_BASE] = 5
    check_update(SMALL, case, [Adagrad(0.1)] * 3)


def test_row_update_with_the_default_tiles() -> None:
    case = make(shapes=[(3, 33), (40, 4)], features=[(0, "mean"), (1, "sum")], bags=40, longest=4)
    check_update(DEFAULT, case, [RowWiseAdagrad(0.1), Adagrad(0.1)])


def test_row_update_leaves_bad_ids_alone() -> None:
    case = make(flags=DROP_NONPOSITIVE_WEIGHTS)
    assert case.weights is not None
    case.ids[::3], case.ids[1::5] = -1, 50
    case.weights[::4] = 0
    check_update(SMALL, case, [Adagrad(0.1)] * 5)


def test_row_grad() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = make(dtype=dtype, bags=3)
        scale = judge_scale(case).astype(np.float32)
        grad = gradient(case)
        out = torch.zeros(len(case.table), dtype=dtype, device=DEVICE)
        SMALL.row_grad(out, put(case.features), case.csr(), put(scale), grad)
        close(out, judge_gradient(case, scale, get(grad)), 16.0, dtype)


def test_row_square_sum() -> None:
    case = make(shapes=[(2, 3), (9, 5)], features=[(0, "mean"), (1, "sum")], bags=12, longest=4)
    for optimizers in ([SGD(), SGD()], [None, SGD()], [None, None]):
        update, _ = state_of(case, optimizers)
        # neither plays a part
        update.grad_scale, update.skip = torch.tensor(0.5, device=DEVICE), torch.tensor(1.0, device=DEVICE)
        scale = judge_scale(case).astype(np.float32)
        grad = gradient(case)
        total = SMALL.row_square_sum(update, case.csr(), put(scale), grad)
        learns = np.array([o is not None for o in optimizers])
        expected = sum((float((g * g).sum()) for g in judge_sums(case, scale, get(grad), learns).values()), 0.0)
        assert total.shape == () and total.dtype == torch.float32
        assert float(total) == pytest.approx(expected, rel=1e-5)


# --- gradients of coefficients and of maxima -----------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("layout", ["plain", "transposed", "one number"])
def test_coefficient_grad(weighted: bool, layout: str) -> None:
    case = make(weighted=weighted, longest=10, bags=2)
    case.ids[::6] = -1
    scale, moments = judge_scale(case).astype(np.float32), judge_moments(case)
    grad = gradient(case, layout)
    actual = DEFAULT.coefficient_grad(case.on_device(), put(case.features), case.csr(), put(scale), grad)
    expected, products = np.zeros(len(case.ids)), {}
    shared = np.zeros(len(moments))
    for position, bag, feature, row, number, weight in each_id(case):
        columns = slice(feature[COLUMN], feature[COLUMN] + feature[DIM])
        products[position] = row_of(case, feature, number) @ get(grad)[row, columns]
        shared[bag] += weight * products[position]
    for position, bag, feature, _, _, weight in each_id(case):
        p, q = int(feature[MOMENT]), int(feature[POWER])
        expected[position] = scale[bag] * products[position]
        if p and q and moments[bag]:
            slope = q / 2 * p * weight ** (p - 1) / moments[bag]
            expected[position] -= slope * scale[bag] * shared[bag]
    close(actual, expected, 64.0)


def test_max_lookup_and_its_gradient() -> None:
    case = make(shapes=[(6, 7), (4, 33)], features=[(0, "sum"), (1, "sum"), (1, "sum")], bags=4, longest=5)
    # few values, so that rows tie, and a NaN
    case.table = np.round(case.table)
    case.table[case.ids[2] * 7 + 1] = np.nan
    assert case.weights is not None
    case.weights = np.exp2(np.round(case.weights))
    case.ids[::7] = -1
    out, winners = SMALL.max_lookup(case.on_device(), put(case.features), case.csr(), case.width, "drop")
    expected, winner = np.zeros((case.bags, case.width)), np.full((case.bags, case.width), -1)
    for position, _, feature, row, number, weight in each_id(case):
        for place in range(feature[DIM]):
            value, column = weight * row_of(case, feature, number)[place], feature[COLUMN] + place
            best = expected[row, column]
            if winner[row, column] < 0 or value > best or (np.isnan(value) and not np.isnan(best)):
                expected[row, column], winner[row, column] = value, position
    assert np.isnan(expected).any() and np.array_equal(get(out), expected, equal_nan=True)
    assert (get(winners) == winner).all()

    for layout in ("plain", "transposed"):
        grad = gradient(case, layout)
        flat = torch.zeros(len(case.table), device=DEVICE)
        SMALL.max_grad(flat, put(case.features), case.csr(), winners, grad)
        sums = np.zeros(len(case.table))
        for position, _, feature, row, number, weight in each_id(case):
            for place in range(feature[DIM]):
                if winner[row, feature[COLUMN] + place] == position:
                    start = feature[OFFSET] + number * feature[DIM]
                    sums[start + place] += weight * get(grad)[row, feature[COLUMN] + place]
        close(flat, sums, 8.0)
