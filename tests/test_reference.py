"""The judge, judged: PyTorch's own embedding bag and its autograd in float64, and numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import CASES, build, numbers, update_of
from tolerance import assert_close

from embedfuse import reference
from embedfuse.optim import SGD, Adagrad
from embedfuse.plan import COLUMN, DIM, FLAGS, MAX_NORM, MOMENT, NO_DEFAULT, NO_MAX_NORM, OFFSET, POWER, ROWS, number_of
from embedfuse.torch.backends import Csr


def _pooled(table: torch.Tensor, features: np.ndarray, csr: Csr, weights: torch.Tensor, width: int) -> torch.Tensor:
    """What `pooled_lookup` means, in operations that PyTorch can differentiate."""
    pieces = torch.zeros(csr.bags, width, dtype=torch.float64)
    for number, feature in enumerate(features):
        rows, dim = int(feature[ROWS]), int(feature[DIM])
        matrix = table[int(feature[OFFSET]) :][: rows * dim].view(rows, dim)
        for b in range(csr.bags):
            mine = slice(*csr.offsets[number * csr.bags + b :][:2].tolist())
            ids, w = csr.ids[mine], weights[mine]
            keep = (ids >= 0) & (ids < rows)
            if feature[FLAGS] & 2:
                keep &= w > 0
            ids, w = ids[keep], w[keep]
            looked_up, most = matrix[ids], number_of(feature[MAX_NORM])
            if most < np.inf:
                length = looked_up.norm(dim=1, keepdim=True)
                looked_up = torch.where(length > most, looked_up * (most / length), looked_up)
            bag = (looked_up * w[:, None]).sum(0)
            if feature[POWER] and len(ids):
                total = w.pow(int(feature[MOMENT])).sum()
                bag = bag * 0 if total == 0 else bag / (total if feature[POWER] == 2 else total.sqrt())
            pieces[b, feature[COLUMN] : feature[COLUMN] + dim] += bag
    return pieces


@pytest.mark.parametrize(
    "name",
    ["means", "weighted", "weighted_means", "mixed_dims", "shared_table", "absent", "dropping", "no_ids", "cut",
     "cut_odd", "cut_hot_row"],
)  # fmt: skip
def test_gradients_are_those_of_autograd(name: str) -> None:
    work = build(replace(CASES[name], dtype="float64"))
    table, features, csr, grad = work.judged()
    leaf = work.table.nan_to_num().requires_grad_()
    given = torch.ones(len(work.csr.ids), dtype=torch.float64) if work.csr.weights is None else work.csr.weights
    weights = given.clone().requires_grad_()
    out = _pooled(leaf, features, work.csr, weights, work.group.width)
    expected, scale = reference.pooled_lookup(table, features, csr, work.group.width)
    assert_close(numbers(out), expected, 1e-12, "out")
    # without any id there is nothing to differentiate
    loss = (out * work.grad).sum() + 0 * (leaf.sum() + weights.sum())
    by_table, by_weight = torch.autograd.grad(loss, [leaf, weights])
    by_rows = reference.row_grad(work.group.size, work.group.tables, features, csr, scale, grad, table=table)
    assert_close(by_rows, numbers(by_table), 1e-12, "table")
    assert_close(reference.coefficient_grad(table, features, csr, scale, grad), numbers(by_weight), 1e-12, "weights")


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_pooling_is_that_of_torch(mode: str) -> None:
    work = build(replace(CASES["plain"], dtype="float64", bags=20))
    table, features, csr, grad = work.judged()
    leaf = work.table[:40].view(10, 4).requires_grad_()
    out = torch.nn.functional.embedding_bag(work.csr.ids, leaf, work.csr.offsets, mode=mode, include_last_offset=True)
    out.backward(work.grad)
    if mode == "max":
        expected, winners = reference.max_lookup(table, features, csr, 4)
        gradient = reference.max_grad(work.group.size, features, csr, winners, grad)
    else:
        features[:, [MOMENT, POWER]] = (1, 2) if mode == "mean" else (0, 0)
        expected, scale = reference.pooled_lookup(table, features, csr, 4)
        gradient = reference.row_grad(work.group.size, work.group.tables, features, csr, scale, grad)
    assert_close(numbers(out), expected, 1e-12, "out")
    assert leaf.grad is not None
    assert_close(gradient[:40], numbers(leaf.grad).reshape(-1), 1e-12, "gradient")


def test_combiners_by_hand() -> None:
    # rows 2 and 4, weights 1 and 3
    table = np.array([2.0, 4.0])
    csr = reference.Csr(np.array([0, 1] * 4), np.arange(0, 9, 2), np.array([1.0, 3.0] * 4), 1)
    features = np.array(
        [
            [0, 0, 2, 1, f, 0, *pair, 0, 1, NO_MAX_NORM, NO_DEFAULT]
            for f, pair in enumerate([(0, 0), (1, 2), (2, 1), (0, 2)])
        ]
    )
    out, scale = reference.pooled_lookup(table, features, csr, 4)
    assert_close(out, [[14, 3.5, 14 / 10**0.5, 7]], 1e-15)
    assert_close(scale, [1, 0.25, 10**-0.5, 0.5], 1e-15)


def test_an_id_counts_or_not() -> None:
    features = np.array([[0, 0, 3, 1, 0, 0, 0, 0, 0, 1, NO_MAX_NORM, NO_DEFAULT]])
    csr = reference.Csr(np.array([2, -1, 3, 0, 1]), np.array([0, 5]), np.array([1.0, 1.0, 1.0, 0.0, -1.0]), 1)

    def positions(flags: int) -> list[int]:
        features[0, FLAGS] = flags
        return [term.position for term in reference.terms(features, csr)]

    assert positions(0) == positions(1) == [0, 3, 4]
    assert positions(2) == positions(3) == [0]
    features[0, FLAGS] = 0
    assert reference.first_bad_id(features, csr) == 1
    features[0, FLAGS] = 1
    assert reference.first_bad_id(features, csr) == 2
    features[0, ROWS] = 4
    assert reference.first_bad_id(features, csr) is None


def test_max_takes_the_first_of_equals_and_nan_over_numbers() -> None:
    table = np.array([1.0, np.nan, 1.0, 5.0])
    features = np.array([[0, 0, 4, 1, 0, 0, 0, 0, 0, 1, NO_MAX_NORM, NO_DEFAULT]])
    csr = reference.Csr(np.array([2, 0, 0, 1, 3, 1]), np.array([0, 2, 6, 6]), None, 3)
    out, winners = reference.max_lookup(table, features, csr, 1)
    assert_close(out, [[1], [np.nan], [0]], 0)
    assert winners.tolist() == [[0], [3], [-1]]


def test_duplicates_are_summed_before_the_one_step() -> None:
    work = build(replace(CASES["plain"], dtype="float64", bags=1))
    work.table[:40] = 0
    work = replace(work, csr=Csr(torch.tensor([3, 3, 3]), torch.tensor([0, 3]), None, 1))
    update = update_of(work, [Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-8)])
    judged = reference.Update(
        numbers(update.table), numbers(update.features), numbers(update.tables), update.rules, numbers(update.slots),
        numbers(update.hyper), numbers(update.steps),
    )  # fmt: skip
    table, slots = reference.row_update(judged, work.judged()[2], np.zeros(0), np.ones((1, 4)))
    assert_close(slots[12:16], [9.0] * 4, 0)
    assert_close(table[12:16], [-0.1 * 3 / (3 + 1e-8)] * 4, 1e-15)
    assert np.all(table[:12] == 0) and np.all(slots[:12] == 0)
    halved = judged._replace(grad_scale=0.5, rules=[SGD(0.1).kernel_class()])
    table, _ = reference.row_update(halved, work.judged()[2], np.zeros(0), np.ones((1, 4)))
    assert_close(table[12:16], [-0.15] * 4, 1e-15)
