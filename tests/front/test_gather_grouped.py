"""`grouped_gather_sum`, sliced scores and remapped indices against gathered rows. Conformance case 42."""

import pytest
import torch

from embedfuse.torch import use_backend
from embedfuse.torch.gather import grouped_gather_sum, remap_indices, virtual_rows


@pytest.fixture
def engine(placement, backend):
    """Each backend in turn, chosen."""
    with use_backend(placement[0]):
        yield placement[0]


def plain(table, indices, weights, groups, count):
    chosen = torch.nn.functional.one_hot(groups, count).to(table.dtype)
    return torch.einsum("...k,...ke,...kd->...ed", weights, chosen, table[indices])


def plain_slices(table, indices, weights, groups, count):
    parts = table.chunk(weights.shape[0], 1)
    return torch.cat([plain(part, indices, own, groups, count) for part, own in zip(parts, weights, strict=True)], -1)


def problem(device, dtype, slices=None, lead=(2, 3), places=5, rows=9, dim=6, count=4):
    table = torch.randn(rows, dim, dtype=dtype, device=device, requires_grad=True)
    indices = torch.randint(0, rows, (*lead, places), device=device)
    shape = indices.shape if slices is None else (slices, *indices.shape)
    weights = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    return table, indices, weights, torch.randint(0, count, indices.shape, device=device), count


@pytest.mark.parametrize("slices", [None, 1, 3])
def test_groups_and_slices(engine, device, slices):
    dtype = torch.float32 if engine == "triton" else torch.float64
    given = problem(device, dtype, slices)
    reference = plain if slices is None else plain_slices
    results = []
    for function in (grouped_gather_sum, reference):
        out = function(*given)
        upstream = torch.arange(out.numel(), dtype=dtype, device=device).sin().view(out.shape)
        results.append([out, *torch.autograd.grad(out, [given[0], given[2]], upstream)])
    torch.testing.assert_close(*results)
    table, indices, weights, *_ = given
    together = grouped_gather_sum(table, indices, weights)
    torch.testing.assert_close(together, results[0][0].sum(-2))


def test_no_weights_empty_groups_and_empty_batches(engine, device):
    table, indices, _, groups, _ = problem(device, torch.float32)
    out = grouped_gather_sum(table, indices, None, groups, 7)
    assert out.shape == (2, 3, 7, 6)
    assert not out[..., 4:, :].any()
    torch.testing.assert_close(out, plain(table, indices, torch.ones(2, 3, 5, device=device), groups, 7))
    for shape in ((0, 5), (2, 0)):
        nothing = torch.zeros(shape, dtype=torch.int64, device=device)
        assert grouped_gather_sum(table, nothing, None, nothing, 3).shape == (shape[0], 3, 6)


def test_gradcheck():
    for slices in (None, 2):
        table, indices, weights, groups, count = problem("cpu", torch.float64, slices, lead=(2,), places=3, rows=4)

        def run(table, weights, rest=(indices, groups, count)):
            return grouped_gather_sum(table, rest[0], weights, *rest[1:])

        assert torch.autograd.gradcheck(run, [table, weights])
        assert torch.autograd.gradgradcheck(run, [table, weights])


def test_compiles_whole():
    torch._dynamo.reset()
    compiled = torch.compile(grouped_gather_sum, fullgraph=True, backend="aot_eager")
    for slices, lead in ((None, (2, 3)), (None, (4, 3)), (2, (2, 3))):
        given = problem("cpu", torch.float32, slices, lead)
        torch.testing.assert_close(compiled(*given), grouped_gather_sum(*given))


def test_virtual_rows_equal_the_dense_expansion(engine, device):
    """Several virtual ids of one physical row add up: a rival overwrites them in its scatter."""
    dtype = torch.float32 if engine == "triton" else torch.float64
    rows, count = 5, 3
    table = torch.randn(rows, 4, dtype=dtype, device=device, requires_grad=True)
    project = torch.randn(count, 4, 6, dtype=dtype, device=device)
    virtual = torch.randint(0, rows * count, (7, 8), device=device)
    scores = torch.randn(7, 8, dtype=dtype, device=device)
    groups, ids = virtual_rows(virtual, rows, rows)
    out = torch.einsum("bed,edo->bo", grouped_gather_sum(table, ids, scores, groups, count), project)
    dense = torch.cat([table @ part for part in project])
    expected = torch.einsum("bk,bko->bo", scores, dense[virtual])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(out)
    grads = [torch.autograd.grad(made, table, upstream)[0] for made in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_remapping():
    indices = torch.tensor([-(2**63), -7, -1, 0, 5, 2**62, 2**63 - 1])
    for rows in (1, 5, 2**40 + 3):
        assert remap_indices(indices, rows).tolist() == [value % rows for value in indices.tolist()]
        for shift in (-3, 0, 11, 2**62):
            expected = [(value + shift) % rows for value in indices.tolist()]
            assert remap_indices(indices, rows, "shift", shift=shift).tolist() == expected
    # splitmix64, whose first output for seed 0 is 16294208416658607535
    assert int(remap_indices(torch.tensor([0]), 2**62, "hash")) == 16294208416658607535 % 2**62
    many = torch.arange(100_000)
    counts = torch.bincount(remap_indices(many, 1000, "hash"), minlength=1000)
    assert counts.min() > 50 and counts.max() < 150
    assert not torch.equal(remap_indices(many, 1000, "hash"), remap_indices(many, 1000, "hash", seed=1))
    assert remap_indices(many.int(), 1000, "hash").dtype == torch.int64
    groups, rows = virtual_rows(torch.arange(12), 4, 5, shift=2)
    assert groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert rows.tolist() == [2, 3, 4, 0] * 3


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "`groups`", {"groups": torch.zeros(2, 2, dtype=torch.int64)}),
        (TypeError, "`groups`", {"groups": torch.zeros(2, 3)}),
        (ValueError, r"`groups` must lie in \[0, 2\)", {"groups": torch.full((2, 3), 2)}),
        (ValueError, r"`groups` must lie in \[0, 2\)", {"groups": torch.full((2, 3), -1)}),
        (ValueError, "`groups` must be given", {"groups": None}),
        (ValueError, "`num_groups`", {"num_groups": 0}),
        (ValueError, "`weights`", {"weights": torch.ones(3)}),
        (ValueError, "`weights` must be of slices", {"weights": torch.ones(3, 2, 3)}),
        (ValueError, "`weights`", {"weights": torch.ones(2, 2, 4)}),
        (IndexError, r"\[0, 4\)", {"indices": torch.full((2, 3), 4)}),
        (ValueError, "`params`", {"params": torch.ones(4)}),
    ],
)
def test_refusals(error, message, change):
    arguments = {
        "params": torch.ones(4, 2), "indices": torch.zeros(2, 3, dtype=torch.int64), "weights": torch.ones(2, 3),
        "groups": torch.zeros(2, 3, dtype=torch.int64), "num_groups": 2,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        grouped_gather_sum(**(arguments | change))


def test_refusals_of_remapping():
    for arguments, message in (
        ((torch.zeros(2), 3), "`indices`"),
        ((torch.zeros(2, dtype=torch.int64), 0), "`num_rows`"),
        ((torch.zeros(2, dtype=torch.int64), 3, "xor"), "`method`"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            remap_indices(*arguments)
    with pytest.raises(ValueError, match="`rows_per_group`"):
        virtual_rows(torch.arange(3), 0, 4)
