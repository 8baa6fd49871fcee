"""Which ops of the engine a backward asks for: one pass for the gradients of table and weights, no more than is needed.

That the numbers are right is for the other files here, whose backwards go the same ways.
"""

from collections import Counter

import pytest
import torch
from gather_judge import random_problem

from embedfuse.torch import use_backend
from embedfuse.torch.backends import load
from embedfuse.torch.gather import functions as gather_functions
from embedfuse.torch.gather import gather_reduce_sum
from embedfuse.torch.gather.expert import expert_lookup
from embedfuse.torch.gather.grouped import grouped_gather_sum

OPS = ("pooled_lookup", "row_grad", "coefficient_grad", "row_update")


@pytest.fixture
def asked(placement, backend, monkeypatch):
    """Each backend in turn, chosen, and how often it is asked for what; `row_grad` with dots counts as "both"."""
    counts = Counter()

    def counting(name, op):
        def asked_for(*arguments, **named):
            has_dots = name == "row_grad" and (len(arguments) > 6 or named.get("dots") is not None)
            counts["both" if has_dots else name] += 1
            return op(*arguments, **named)

        return asked_for

    chosen = load(placement[0])
    for name in OPS:
        monkeypatch.setattr(chosen, name, counting(name, getattr(chosen, name)), raising=True)
    with use_backend(placement[0]):
        yield counts


def leaves_of(problem, table=True, weights=True):
    return problem.table.clone().requires_grad_(table), problem.weights.clone().requires_grad_(weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_for_both(asked, device, dtype):
    problem = random_problem(dtype=dtype).to(device)
    table, weights = leaves_of(problem)
    gather_reduce_sum(table, problem.indices, weights).backward(problem.x)
    assert asked == {"pooled_lookup": 1, "both": 1}
    problem.check({"sum.table": table.grad, "sum.weights": weights.grad})


def test_no_more_than_is_needed(asked, device):
    problem = random_problem(dtype=torch.float32).to(device)
    for needed, op in (((True, False), "row_grad"), ((False, True), "coefficient_grad")):
        table, weights = leaves_of(problem, *needed)
        asked.clear()
        gather_reduce_sum(table, problem.indices, weights).backward(problem.x)
        assert asked == {"pooled_lookup": 1, op: 1}
    table, _ = leaves_of(problem)
    asked.clear()
    gather_reduce_sum(table, problem.indices).backward(problem.x)
    assert asked == {"pooled_lookup": 1, "row_grad": 1}


def test_absent_references_and_none_at_all(asked, device):
    table = torch.randn(5, 63, device=device, requires_grad=True)
    indices = torch.tensor([[-1, 2, 2, 9], [7, 7, -3, 5]], dtype=torch.int32, device=device)
    weights = torch.randn(2, 4, device=device, requires_grad=True)
    upstream = torch.randn(2, 1, device=device).expand(2, 63)
    gather_reduce_sum(table, indices, weights, out_of_range="drop").backward(upstream)
    assert asked["both"] == 1 and not asked["coefficient_grad"]
    expected = torch.zeros(2, 4, device=device)
    expected[0, 1:3] = (table[2] * upstream[0]).sum()
    torch.testing.assert_close(weights.grad, expected)
    rows = torch.zeros(5, 63, device=device)
    rows[2] = (weights[0, 1] + weights[0, 2]).detach() * upstream[0]
    torch.testing.assert_close(table.grad, rows)
    weights = torch.zeros(3, 0, device=device, requires_grad=True)
    nothing = torch.zeros(3, 0, dtype=torch.int64, device=device)
    table.grad = None
    gather_reduce_sum(table, nothing, weights).sum().backward()
    assert not table.grad.any() and weights.grad.shape == (3, 0)


def test_tables_with_gaps(asked, device):
    """A transposed table, whose copy is what the engine reads."""
    problem = random_problem(dtype=torch.float32).to(device)
    weights = problem.weights.clone().requires_grad_()
    table = problem.table.t().contiguous().t().requires_grad_()
    found = torch.autograd.grad(gather_reduce_sum(table, problem.indices, weights), [table, weights], problem.x)
    assert asked["both"] == 1
    problem.check({"sum.table": found[0], "sum.weights": found[1]})


def test_groups_and_slices(asked, device):
    problem = random_problem(dim=6, dtype=torch.float32).to(device)
    for weights in (problem.weights, torch.stack([problem.weights, problem.scores])):
        table, given = problem.table.clone().requires_grad_(), weights.clone().requires_grad_()
        asked.clear()
        grouped_gather_sum(table, problem.indices, given, problem.indices % 3, 3).square().sum().backward()
        assert asked == {"pooled_lookup": 1, "both": 1}


def test_experts(asked, device, placement):
    problem = random_problem(dtype=torch.float32).to(device)
    down, up, x, scores = (t.clone().requires_grad_() for t in (problem.table, problem.rows, problem.x, problem.scores))
    expert_lookup(x, down, up, problem.indices, scores).square().sum().backward()
    # rows of `up` once for both gradients; `down` gets its own, and `x` a sum of its rows
    assert (asked["both"], asked["row_grad"]) == (1, 1)
    # the dots with `down` of the forward, which is one kernel on a GPU
    assert asked["coefficient_grad"] == (0 if placement[0] == "triton" else 1)
    asked.clear()
    expert_lookup(x.detach(), down.detach(), up, problem.indices, scores.detach()).sum().backward()
    assert asked["both"] == 0 and asked["row_grad"] == 1


def test_what_may_be_differentiated_again_goes_through_the_primitives(asked, device):
    problem = random_problem(dtype=torch.float32).to(device)
    leaves = leaves_of(problem)
    grads = []
    for again in (False, True):
        out = gather_reduce_sum(leaves[0], problem.indices, leaves[1])
        grads.append(torch.autograd.grad(out, leaves, problem.x, create_graph=again))
    assert (asked["both"], asked["row_grad"], asked["coefficient_grad"]) == (1, 1, 1)
    for one, other in zip(*grads, strict=True):
        assert other.requires_grad
        torch.testing.assert_close(one, other)
    asked.clear()
    torch.func.grad(lambda *given: gather_reduce_sum(given[0], problem.indices, given[1]).sum(), (0, 1))(*leaves)
    assert asked["both"] == 0 and asked["coefficient_grad"] == 1


def test_compiled_backward_is_one_pass_too(asked, device):
    problem = random_problem(dtype=torch.float32).to(device)
    compiled = torch.compile(gather_reduce_sum, fullgraph=True, backend="aot_eager")
    leaves = leaves_of(problem)
    found = torch.autograd.grad(compiled(leaves[0], problem.indices, leaves[1]), leaves, problem.x)
    assert asked == {"pooled_lookup": 1, "both": 1}
    problem.check({"sum.table": found[0], "sum.weights": found[1]})


def test_other_places_of_the_gradient_keep_two_passes(asked, device):
    problem = random_problem(dtype=torch.float32).to(device)
    table, weights = leaves_of(problem)
    gather_reduce_sum(table, problem.indices, weights, grad="sparse").backward(problem.x)
    assert (asked["both"], asked["row_grad"], asked["coefficient_grad"]) == (0, 1, 1)
    buffer = torch.zeros_like(problem.table)
    gather_reduce_sum(table, problem.indices, weights, grad_into=buffer).backward(problem.x)
    assert (asked["both"], asked["row_update"], asked["coefficient_grad"]) == (0, 1, 2)


def test_the_op_is_sound():
    """Its shapes and schema, as PyTorch checks them."""
    problem = random_problem(dtype=torch.float32)
    offsets = torch.arange(10) * 4
    arguments = problem.table, problem.x, problem.weights.reshape(-1), problem.indices.reshape(-1), offsets, "drop"
    torch.library.opcheck(
        torch.ops.embedfuse.scatter_and_dot.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    with torch.no_grad():
        both = gather_functions.scatter_and_dot(*arguments)
    problem.check({"sum.table": both[0], "sum.weights": both[1]})
