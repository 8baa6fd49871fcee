"""`embedding_bag` where torch's own is wrong, crashes or says little: faults, issues its users filed, refusals."""

import pytest
import torch

from embedfuse.torch import use_backend
from embedfuse.torch.embedding_bag import embedding_bag

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["eager", "cpu"])
def engine(request):
    """Backends whose numbers may be compared to the last bit of float64."""
    with use_backend(request.param):
        yield request.param


def table_of(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype, requires_grad=True)


# --- torch's faults --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mode", "expected"), [("sum", [[6, 8], [14, 16]]), ("mean", [[3, 4], [7, 8]]), ("max", [[4, 5], [8, 9]])]
)
def test_ids_after_the_last_offset_do_not_count(engine, mode, expected, dtype):
    table = torch.arange(12).reshape(6, 2).to(dtype).requires_grad_()
    ids, offsets = torch.tensor([1, 2, 3, 4, 5, 0]), torch.tensor([0, 2, 4])
    out = embedding_bag(ids, table, offsets, mode=mode, include_last_offset=True)
    assert out.tolist() == expected
    out.sum().backward()
    assert not table.grad[[0, 5]].any()
    # also where they are rubbish
    ids[4:] = torch.tensor([-7, 99])
    assert embedding_bag(ids, table, offsets, mode=mode, include_last_offset=True).tolist() == expected
    # and one bag less ([issue 190060] of torch)
    table = torch.arange(16.0).reshape(4, 4)
    out = embedding_bag(torch.tensor([0, 1, 2]), table, torch.tensor([0, 2]), mode="sum", include_last_offset=True)
    assert out.tolist() == [[4, 6, 8, 10]]


def test_weights_after_the_last_offset_have_no_gradient(engine):
    weights = torch.ones(4, requires_grad=True)
    out = embedding_bag(
        torch.tensor([0, 1, 0, 1]), torch.ones(2, 3), torch.tensor([0, 1, 3]), mode="sum", per_sample_weights=weights,
        include_last_offset=True,
    )  # fmt: skip
    out.sum().backward()
    assert weights.grad.tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_by_frequency_divides_each_row_by_its_own_count(engine, sparse):
    def gradient(ids, offsets, **options):
        table = torch.zeros(5, 1, requires_grad=True)
        options |= {"mode": "sum", "scale_grad_by_freq": True, "sparse": sparse}
        embedding_bag(torch.tensor(ids), table, torch.tensor(offsets), **options).sum().backward()
        assert table.grad.is_sparse == sparse
        return table.grad.to_dense().flatten().tolist()

    assert gradient([1, 1, 3], [0]) == [0, 1, 0, 1, 0]
    assert gradient([0, 0, 0, 1, 3, 3, 4], [0, 3, 5]) == [1, 1, 0, 1, 1]
    assert gradient([0, 0, 0, 1, 3, 3, 4], [0, 3, 5], padding_idx=3) == [1, 1, 0, 0, 1]
    assert gradient([0, 0, 1, 0], [0, 3], include_last_offset=True) == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_hot_row_in_16_bits_sums_exactly(engine, dtype, sparse):
    table = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    ids = torch.zeros(4096, dtype=torch.int64)
    out = embedding_bag(ids, table, torch.tensor([0, 1000, 1000]), mode="sum", sparse=sparse)
    out.sum().backward()
    assert table.grad.to_dense()[0].tolist() == [4096] * 3
    assert embedding_bag(ids, table, torch.tensor([0]), mode="sum")[0].tolist() == [4096] * 3
    by_frequency = table.detach().clone().requires_grad_()
    embedding_bag(ids, by_frequency, torch.tensor([0]), scale_grad_by_freq=True, mode="sum").sum().backward()
    assert by_frequency.grad.tolist() == [[1] * 3, [0] * 3]


def test_half_precision_mean_does_not_overflow(engine):
    table = torch.full((1, 2), 100.0, dtype=torch.float16)
    ids = torch.zeros(4096, dtype=torch.int64)
    assert embedding_bag(ids, table, torch.tensor([0])).tolist() == [[100, 100]]


# --- worked examples -------------------------------------------------------------------------------------------------
def test_worked_example_with_weights(engine):
    table = table_of([1, 2], [3, 4], [5, 6], [7, 8])
    weights = torch.tensor([[0.5, 1, -1], [2, 0.25, 0.1]], dtype=torch.float64, requires_grad=True)
    out = embedding_bag(torch.tensor([[0, 2, 2], [3, 0, 2]]), table, mode="sum", per_sample_weights=weights)
    out.backward(torch.tensor([[1.0, -1], [2, 3]], dtype=torch.float64))
    exact = {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(out.detach(), torch.tensor([[0.5, 1.0], [14.75, 17.1]]).double(), rtol=0, atol=1e-6)
    expected = torch.tensor([[1, 0.25], [0, 0], [0.2, 0.3], [4, 6]], dtype=torch.float64)
    torch.testing.assert_close(table.grad, expected, **exact)
    assert weights.grad.tolist() == [[-1, -1, -1], [38, 8, 28]]


def test_worked_example_with_padding(engine):
    table = torch.arange(8.0, dtype=torch.float64).reshape(4, 2).requires_grad_()
    weights = torch.tensor([[1.0, 2, 3]], dtype=torch.float64, requires_grad=True)
    out = embedding_bag(torch.tensor([[0, 1, 2]]), table, mode="sum", per_sample_weights=weights, padding_idx=1)
    out.backward(torch.tensor([[1.0, 10]], dtype=torch.float64))
    assert out.tolist() == [[12, 16]]
    assert table.grad.tolist() == [[1, 10], [0, 0], [3, 30], [0, 0]]
    assert weights.grad.tolist() == [[10, 0, 54]]


@pytest.mark.parametrize(
    ("mode", "out", "gradient"),
    [
        ("mean", [[7 / 3, 17 / 3], [0, 0], [7, 2]], [[1 / 3, 10 / 3], [2 / 3, 20 / 3], [0, 0], [2, 3]]),
        ("max", [[3, 9], [0, 0], [7, 2]], [[0, 10], [1, 0], [0, 0], [2, 3]]),
    ],
)
def test_worked_example_of_mean_and_max(engine, mode, out, gradient):
    table = table_of([1, 9], [3, 4], [5, 6], [7, 2])
    ids, offsets = torch.tensor([0, 1, 1, 2, 3]), torch.tensor([0, 3, 3])
    made = embedding_bag(ids, table, offsets, mode=mode, padding_idx=2)
    made.backward(torch.tensor([[1.0, 10], [100, 1000], [2, 3]], dtype=torch.float64))
    for actual, expected in ((made.detach(), out), (table.grad, gradient)):
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)


# --- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_ids_outside_of_the_table_are_named(engine, mode, padding):
    table = torch.randn(4, 2)
    for bad in (-1, 4, -4, 2**40):
        for ids, offsets, place in (
            (torch.tensor([0, 1, bad, 2]), torch.tensor([0, 1]), r"input\[2\], in bag 1"),
            (torch.tensor([[0, 1], [bad, 2]]), None, r"input\[1, 0\], in bag 1"),
        ):
            for max_norm in (None, 1.0):
                with pytest.raises(IndexError, match=rf"\[0, 4\).*got {bad} at {place}"):
                    embedding_bag(ids, table, offsets, max_norm, mode=mode, padding_idx=padding)
    with pytest.raises(IndexError, match=r"got -1 at input\[0\]"):
        embedding_bag(torch.tensor([-1], dtype=torch.int32), table, torch.tensor([0]), mode=mode, padding_idx=padding)


@pytest.mark.parametrize(
    ("ids", "offsets", "includes_end", "message"),
    [
        ([], [0, 2, 0], False, "must not decrease, got 2 before 0"),
        ([1, 2], [0, 2, 1], False, "must not decrease"),
        ([1, 2], [0, 2, 1], True, "must not decrease"),
        ([1, 2], [1, 2], False, "start at 0, got 1"),
        ([1, 2], [-1, 2], False, "start at 0, got -1"),
        ([1, 2], [0, 3], False, "exceed the number of ids, 2, got 3|must not decrease, got 3 before 2"),
        ([1, 2], [0, 3], True, "exceed the number of ids, 2, got 3"),
        ([1, 2], [], False, "`offsets` must not be empty"),
        ([1, 2], [], True, "at least one entry"),
        ([], [], True, "at least one entry"),
    ],
)
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_offsets_that_break_a_rule(ids, offsets, includes_end, message, mode):
    ids, offsets = torch.tensor(ids, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        embedding_bag(ids, torch.randn(4, 2), offsets, mode=mode, include_last_offset=includes_end)


def test_an_only_offset_that_ends_no_bag(engine):
    for count in (0, 2):
        ids = torch.ones(count, dtype=torch.int64)
        out = embedding_bag(ids, torch.randn(4, 2), torch.tensor([0]), include_last_offset=True)
        assert out.shape == (0, 2)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "`mode`", {"mode": "min"}),
        (ValueError, "`sparse`", {"mode": "max", "sparse": True}),
        (ValueError, "`scale_grad_by_freq`", {"mode": "max", "scale_grad_by_freq": True}),
        (NotImplementedError, "`per_sample_weights`", {"mode": "max", "per_sample_weights": torch.ones(3)}),
        (ValueError, "`per_sample_weights`", {"per_sample_weights": torch.ones(2)}),
        (ValueError, "`per_sample_weights`", {"per_sample_weights": torch.ones(1, 3)}),
        (TypeError, "`per_sample_weights`", {"per_sample_weights": torch.ones(3, dtype=torch.int64)}),
        (ValueError, "`padding_idx`", {"padding_idx": 4}),
        (ValueError, "`padding_idx`", {"padding_idx": -5}),
        (ValueError, "`weight`", {"weight": torch.ones(4)}),
        (TypeError, "`weight`", {"weight": torch.ones(4, 2, dtype=torch.int32)}),
        (TypeError, "`input`", {"input": torch.ones(3)}),
        (TypeError, "`input`", {"input": torch.ones(3, dtype=torch.bool)}),
        (ValueError, "`input`", {"input": torch.tensor(1)}),
        (ValueError, "`offsets`", {"offsets": None}),
        (ValueError, "`offsets`", {"offsets": torch.tensor([[0]])}),
        (ValueError, "`offsets`", {"input": torch.tensor([[0, 1, 2]])}),
        (TypeError, "`offsets`", {"offsets": torch.tensor([0.0])}),
    ],
)
def test_refusals_name_the_argument(error, message, change):
    arguments = {"input": torch.tensor([0, 1, 2]), "weight": torch.ones(4, 2), "offsets": torch.tensor([0])} | change
    with pytest.raises(error, match=message):
        embedding_bag(**arguments)
