"""Rows cut to a length (MAX_NORM), shards and prepared ids by the Triton backend, against `embedfuse.reference`.

On a GPU where there is one, else in Triton's interpreter, which needs TRITON_INTERPRET=1 in the environment before
anything imports embedfuse.
"""

import numpy as np
import pytest
import torch
from triton_cases import (
    DEFAULT,
    DEVICE,
    SINGLE,
    SMALL,
    Case,
    close,
    get,
    gradient,
    judge_scale,
    lookup_of,
    make,
    needs_kernels,
    put,
    state_of,
)

from embedfuse import reference
from embedfuse.kernels import configs
from embedfuse.optim import Adagrad, Optimizer, RowWiseAdagrad
from embedfuse.plan import (
    COLUMN,
    DEFAULT_ID,
    DIM,
    DROP_NONPOSITIVE_WEIGHTS,
    MAX_NORM,
    OFFSET,
    ROW_BASE,
    ROWS,
    STRIDE,
    T_DIM,
    T_MAX_NORM,
    T_OFFSET,
    T_ROW_BASE,
    T_ROWS,
    T_SOURCE,
    TABLE,
    TABLE_WIDTH,
    bits_of,
)
from embedfuse.torch.backends import Csr, Rows, Shards
from embedfuse.torch.backends.triton import TritonBackend

pytestmark = needs_kernels
SHAPES = [(7, 3), (5, 1), (6, 63), (3, 130)]
FEATURES = [(0, "mean"), (1, "sum"), (2, "sqrtn"), (3, "mean"), (0, "sum")]
NORMS = [1.5, 0.0, 7.0, np.inf]


def cut(norms: list[float] = NORMS, **options: object) -> Case:
    """A case with rows longer and shorter than what they are cut to, a row of zeros among them."""
    case = make(shapes=SHAPES, features=FEATURES, **options)  # type: ignore[arg-type]
    case.tables[:, T_MAX_NORM] = [bits_of(norm) for norm in norms]
    case.features[:, MAX_NORM] = case.tables[case.features[:, TABLE], T_MAX_NORM]
    case.table[:3] = 0
    return case


def judged(case: Case) -> reference.Csr:
    return reference.Csr(case.ids, case.offsets, case.weights, case.bags)


BACKENDS = [lookup_of(True, 4, 32), lookup_of(False, 4, 32), DEFAULT]


@pytest.mark.parametrize("backend", BACKENDS, ids=["short", "long", "default"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookups_cut_rows(backend: TritonBackend, dtype: torch.dtype) -> None:
    case = cut(dtype=dtype, kind=np.int32, weighted=dtype == torch.float32, longest=6)
    out, _ = backend.pooled_lookup(case.on_device(), put(case.features), case.csr(), case.width, True, "drop")
    expected, _ = reference.pooled_lookup(case.table, case.features, judged(case), case.width)
    close(out, expected, 32.0, dtype)


def test_the_largest_of_cut_rows() -> None:
    case = cut(longest=5)
    out, winners = DEFAULT.max_lookup(case.on_device(), put(case.features), case.csr(), case.width, "drop")
    expected, won = reference.max_lookup(case.table, case.features, judged(case), case.width)
    close(out, expected, 8.0)
    # rows cut to nothing tie
    columns = slice(case.features[2, COLUMN], None)
    assert (get(winners)[:, columns] == won[:, columns]).all()


@pytest.mark.parametrize("widest", [1, 63, 128, 1030, 4096])
def test_tiles_that_hold_whole_rows(widest: int) -> None:
    for short in (True, False):
        tiles = configs.whole_rows(configs.lookup_config(widest, short), widest)
        assert tiles.block_d >= widest and tiles.lanes * tiles.block_d <= max(2048, 2 * widest)


def test_coefficient_grad_of_cut_rows() -> None:
    case = cut(longest=9, bags=2)
    scale, grad = judge_scale(case).astype(np.float32), gradient(case)
    actual = DEFAULT.coefficient_grad(case.on_device(), put(case.features), case.csr(), put(scale), grad)
    close(actual, reference.coefficient_grad(case.table, case.features, judged(case), scale, get(grad)), 64.0)


@pytest.mark.parametrize("backend", [SMALL, SINGLE], ids=["many", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_grad_of_cut_rows(backend: TritonBackend, dtype: torch.dtype) -> None:
    # runs in one piece, and in many
    case = cut(dtype=dtype, bags=12)
    scale, grad = judge_scale(case).astype(np.float32), gradient(case)
    out = torch.zeros(len(case.table) + 64, dtype=dtype, device=DEVICE)
    # sums go elsewhere than where rows are read
    tables = case.tables.copy()
    tables[:, T_OFFSET] += 64
    backend.row_grad(out, put(case.features), case.csr(), put(scale), grad, Rows(case.on_device(), put(tables)))
    expected = reference.row_grad(len(out), tables, case.features, judged(case), scale, get(grad), table=case.table)
    close(out, expected, 64.0, dtype)
    with pytest.raises(ValueError, match="`rows` must be given"):
        backend.row_grad(out, put(case.features), case.csr(), put(scale), grad)


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(0.1), Adagrad(0.1, clipvalue=0.5)], ids=["rowwise", "element"])
def test_update_of_cut_rows(optimizer: Optimizer) -> None:
    case = cut(bags=12)
    update, _ = state_of(case, [optimizer, optimizer, None, optimizer])
    update.grad_scale = torch.tensor(0.5, device=DEVICE)
    scale, grad = judge_scale(case).astype(np.float32), gradient(case)
    before = reference.Update(
        case.table, case.features, get(update.tables).astype(np.int64), update.rules, get(update.slots),
        get(update.hyper), get(update.steps), 0.5,
    )  # fmt: skip
    # float64 does not hold the bits of MAX_NORM
    before.tables[:, T_MAX_NORM] = case.tables[:, T_MAX_NORM]
    total = SMALL.row_square_sum(update, case.csr(), put(scale), grad)
    assert float(total) == pytest.approx(reference.row_square_sum(before, judged(case), scale, get(grad)), rel=1e-5)
    SMALL.row_update(update, case.csr(), put(scale), grad)
    table, slots = reference.row_update(before, judged(case), scale, get(grad))
    close(update.table, table, 16.0)
    close(update.slots, slots, np.abs(slots) + 32)


# --- shards --------------------------------------------------------------------------------------------------------


def shards_of(sizes: list[int], dim: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """`[P, 3]` of shards that lie in any order, with gaps; and the size of all."""
    described = np.zeros((len(sizes), 3), np.int64)
    described[:, 1] = sizes
    described[:, 0] = np.cumsum(sizes) - sizes
    start = 5
    for shard in np.random.default_rng(seed).permutation(len(sizes)):
        described[shard, 2] = start
        start += sizes[shard] * dim + 3
    return described, start


@pytest.mark.parametrize("modulo", [False, True])
@pytest.mark.parametrize("records", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_prepared_ids_of_one_table(modulo: bool, records: int, weighted: bool) -> None:
    sizes = [4, 4, 3] if modulo else [3, 0, 6, 2, 0]
    described, _ = shards_of(sizes, 5)
    case = make([(11, 5)], [(0, "sum")], bags=9, longest=3, weighted=weighted, records=records,
                flags=DROP_NONPOSITIVE_WEIGHTS)  # fmt: skip
    if case.weights is not None:
        case.weights[::3] = -1
    case.ids[::4], case.ids[1::5], case.ids[2::7] = -1, 11, 2**40
    case.features[0, DEFAULT_ID] = 10
    for shards in (None, Shards(put(described), modulo, 5)):
        made = DEFAULT.prepare_ids(put(case.features), case.csr(), shards, "drop")
        expected = reference.prepare_ids(case.features, judged(case), None if shards is None else described, modulo, 5)
        for name, value in made._asdict().items():
            wanted = getattr(expected, name)
            assert (value is None) == (wanted is None), name
            if value is not None:
                assert np.array_equal(get(value), wanted), name


def test_prepared_ids_of_many_features() -> None:
    for bags, longest in ((7, 3), (300, 2), (2, 300), (3, 0), (0, 0)):
        case = make(bags=bags, longest=longest)
        case.ids[::3] = -1
        case.features[:, DEFAULT_ID] = [0, -1, 2, -1, -1, 1, 3]
        made = DEFAULT.prepare_ids(put(case.features), case.csr(), None, "ignore")
        expected = reference.prepare_ids(case.features, judged(case))
        assert made.starts is None and made.weights is not None and expected.weights is not None
        assert torch.equal(made.rows.cpu(), torch.from_numpy(expected.rows))
        assert torch.equal(made.offsets.cpu(), torch.from_numpy(expected.offsets))
        assert torch.equal(made.places.cpu(), torch.from_numpy(expected.places))
        assert np.array_equal(get(made.weights), expected.weights)


def test_a_table_in_shards() -> None:
    # looked up by elements, trained by rows
    dim, sizes = 6, [3, 5, 2]
    described, size = shards_of(sizes, dim)
    case = make([(10, dim)], [(0, "mean")], bags=9, longest=4)
    whole = case.table[: 10 * dim].reshape(10, dim)
    flat = np.full(size, np.nan)
    tables = np.zeros((3, TABLE_WIDTH), np.int64)
    for shard, (before, rows, start) in enumerate(described):
        flat[start : start + rows * dim] = whole[before : before + rows].reshape(-1)
        tables[shard, [T_OFFSET, T_ROWS, T_DIM, T_ROW_BASE, T_SOURCE]] = start, rows, dim, before, start
    case.features[0, MAX_NORM] = tables[:, T_MAX_NORM] = bits_of(2.0)
    made = DEFAULT.prepare_ids(put(case.features), case.csr(), Shards(put(described), False, dim), "drop")
    assert made.starts is not None
    reading = case.features.copy()
    reading[0, [OFFSET, ROWS, STRIDE]] = 0, size, 1
    out, scale = DEFAULT.pooled_lookup(
        put(flat, torch.float32), put(reading), Csr(made.starts, made.offsets, made.weights, case.bags), dim, True,
        "drop",
    )  # fmt: skip
    expected, scales = reference.pooled_lookup(case.table, case.features, judged(case), dim)
    close(out, expected, 16.0)
    close(scale, scales, 4.0)

    grad = gradient(case)
    sums = torch.zeros(size, device=DEVICE)
    csr = Csr(made.rows, made.offsets, made.weights, case.bags)
    SMALL.row_grad(sums, put(case.features), csr, scale, grad, Rows(put(flat, torch.float32), put(tables)))
    case.tables[0, T_MAX_NORM] = bits_of(2.0)
    whole_sums = reference.row_grad(
        len(case.table), case.tables, case.features, judged(case), get(scale), get(grad), table=case.table
    )
    for before, rows, start in described:
        part = slice(before * dim, (before + rows) * dim)
        close(sums[start : start + rows * dim], whole_sums[part], 16.0)
    assert case.features[0, ROW_BASE] == 0 and case.features[0, DIM] == dim
