"""No gathered row is ever in memory: what forward and backward allocate, counted. Conformance case 33."""

import pathlib
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from embedfuse.torch import use_backend
from embedfuse.torch.backends import eager
from embedfuse.torch.gather import gather_dot, gather_reduce_sum
from embedfuse.torch.gather.expert import expert_lookup
from embedfuse.torch.gather.grouped import grouped_gather_sum

BAGS, PLACES, ROWS, DIM = 512, 64, 2048, 256
GATHERED = BAGS * PLACES * DIM * 4
"""Bytes of the gathered rows: 32 MB."""
TABLE = ROWS * DIM * 4


def largest_and_peak(run):
    """Bytes of the largest allocation of `run()`, and of all that were held at once, by torch's own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    sizes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = largest = 0
    for event in sorted(sizes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        largest, peak = max(largest, event.nbytes()), max(peak, held)
    return largest, peak


def inputs():
    torch.manual_seed(0)
    return {
        "table": torch.randn(ROWS, DIM, requires_grad=True),
        "other": torch.randn(ROWS, DIM, requires_grad=True),
        "indices": torch.randint(0, ROWS, (BAGS, PLACES)),
        "weights": torch.randn(BAGS, PLACES, requires_grad=True),
        "x": torch.randn(BAGS, DIM, requires_grad=True),
    }


def plain(given):
    torch.einsum("bk,bkd->bd", given["weights"], given["table"][given["indices"]]).sum().backward()


CALLS = {
    "sum": lambda given: gather_reduce_sum(given["table"], given["indices"], given["weights"]),
    "dot": lambda given: gather_dot(given["table"], given["x"], given["indices"]),
    "experts": lambda given: expert_lookup(
        given["x"], given["table"], given["other"], given["indices"], given["weights"]
    ),
    "groups": lambda given: grouped_gather_sum(
        given["table"], given["indices"], given["weights"], given["indices"] % 4, 4
    ),
}


@pytest.fixture(params=["eager", "cpu"])
def engine(request, monkeypatch):
    """Backends that serve the CPU; the plain one gathers in blocks, which are made small here."""
    for place in (eager, sys.modules.get("embedfuse.torch.backends.eager_sums")):
        if hasattr(place, "BLOCK"):
            monkeypatch.setattr(place, "BLOCK", 1 << 16)
    with use_backend(request.param):
        yield request.param


def test_the_count_sees_gathered_rows():
    largest, peak = largest_and_peak(lambda: plain(inputs()))
    assert largest >= GATHERED and peak >= 2 * GATHERED


@pytest.mark.parametrize("name", CALLS)
def test_nothing_of_the_size_of_the_gathered_rows(engine, name):
    given = inputs()
    outputs = 4 if name == "groups" else 1

    def run():
        # an upstream that is not expanded, as most are
        CALLS[name](given).square().sum().backward()

    run()
    largest, peak = largest_and_peak(run)
    tables = sum(given[key].grad is not None for key in ("table", "other"))
    # gradients of tables, some tensors like the output, and some of one number a reference
    allowed = tables * TABLE + (4 + 2 * outputs) * BAGS * DIM * 4 + 24 * BAGS * PLACES * 8
    # the plain backend has an int64 for every element of the distinct rows, for a moment
    extra = 2 * TABLE if engine == "eager" else 0
    assert largest <= max(TABLE, outputs * BAGS * DIM * 4, extra)
    assert peak <= allowed + extra < GATHERED


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own count")
def test_the_native_engine_keeps_nothing_either():
    """What the engine allocates itself torch does not see, the system does."""
    with use_backend("cpu"):
        given = inputs()
        # makes the gradients, and wakes what wakes once
        CALLS["sum"](given).sum().backward()
        before = _resident_peak(reset=True)
        CALLS["sum"](given).square().sum().backward()
        grown = _resident_peak() - before
    assert grown < GATHERED / 2


def _resident_peak(reset=False):
    """The most bytes this process has had in memory, from the last reset on."""
    if reset:
        try:
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            pytest.skip(f"this system does not reset its count: {error}")
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_buffer_and_optimizer_make_no_dense_gradient():
    """The gradient of a table that is large beside the batch costs no table."""
    rows = 1 << 16
    table = torch.randn(rows, 16, requires_grad=True)
    buffer = torch.zeros(rows, 16)
    indices = torch.randint(0, rows, (8, 4))

    def run():
        gather_reduce_sum(table, indices, grad_into=buffer).sum().backward()

    with use_backend("cpu"):
        run()
        largest, _ = largest_and_peak(run)
    assert largest < rows * 16
