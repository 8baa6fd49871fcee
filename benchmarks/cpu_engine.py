"""The native CPU engine against `torch.nn.EmbeddingBag`, as ratios: `python benchmarks/cpu_engine.py`.

All contestants run in one process and take turns, round after round; what is printed is the ratio of the medians, with
those of the first and last third of the rounds beside it to show how steady the machine was. Ids are uniform. Every
result is compared with PyTorch's before it is timed. On a machine that others use, set OMP_PROC_BIND=true: else both
threads may be put on one processor.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from embedfuse import cpu
from embedfuse.optim import Adagrad
from embedfuse.plan import T_RULE, T_SLOT0, PlannedFeature, plan_group
from embedfuse.torch.backends import Csr, Update
from embedfuse.torch.backends.cpu import BACKEND

LEARNING_RATE = 0.05


@dataclass
class Case:
    """Some tables of one shape, each read by one feature with `sum`, and one batch."""

    tables: int
    bags: int
    shortest: int
    longest: int
    rows: int = 100_000
    dim: int = 64
    large_pages: bool = False

    def __str__(self) -> str:
        lengths = f"{self.shortest}" if self.shortest == self.longest else f"{self.shortest}-{self.longest}"
        return f"{self.tables} x {self.bags} x {lengths} ids, {self.rows} rows, dim {self.dim}"


class Embedfuse:
    """All tables in one call."""

    def __init__(self, case: Case, lengths: Tensor, ids: Tensor, grad: Tensor, weights: list[Tensor]) -> None:
        group = plan_group(
            [(case.rows, case.dim)] * case.tables, [PlannedFeature(t, "sum") for t in range(case.tables)]
        )
        tables = group.tables.copy()
        tables[:, T_RULE] = 0
        tables[:, T_SLOT0] = tables[:, 0]
        self.features, self.width, self.grad = torch.from_numpy(group.features), group.width, grad
        self.arena, slots = torch.zeros(group.size), torch.zeros(group.size)
        if case.large_pages:
            cpu.prefer_large_pages(self.arena)
            cpu.prefer_large_pages(slots)
        slots.fill_(0.1)
        for table, weight in zip(group.tables, weights, strict=True):
            self.arena[int(table[0]) :][: weight.numel()] = weight.view(-1)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.csr = Csr(ids, offsets, None, case.bags)
        optimizer = Adagrad(LEARNING_RATE)
        hyper = torch.tensor([optimizer.hyper(LEARNING_RATE)] * case.tables, dtype=torch.float64)
        steps = torch.ones(case.tables, dtype=torch.int64)
        self.update = Update(self.arena, self.features, torch.from_numpy(tables), [Adagrad], slots, hyper, steps)
        self.scale = torch.empty(0)

    def forward(self) -> Tensor:
        return BACKEND.pooled_lookup(self.arena, self.features, self.csr, self.width, False, "raise")[0]

    def train(self) -> None:
        self.forward()
        BACKEND.row_update(self.update, self.csr, self.scale, self.grad)


class Torch:
    """One `EmbeddingBag(sparse=True)` a table, and `torch.optim.Adagrad`."""

    def __init__(self, case: Case, lengths: Tensor, ids: Tensor, grad: Tensor, weights: list[Tensor]) -> None:
        self.bags = [
            torch.nn.EmbeddingBag(case.rows, case.dim, mode="sum", sparse=True, _weight=weight.clone())
            for weight in weights
        ]
        self.parameters = [bag.weight for bag in self.bags]
        self.optimizer = torch.optim.Adagrad(self.parameters, LEARNING_RATE, initial_accumulator_value=0.1, eps=0.0)
        self.ids = list(ids.split(lengths.view(case.tables, -1).sum(1).tolist()))
        self.offsets = [part.cumsum(0) - part for part in lengths.view(case.tables, -1)]
        self.grads = list(grad.split(case.dim, 1))

    def forward(self) -> list[Tensor]:
        with torch.no_grad():
            return [
                F.embedding_bag(ids, weight, offsets, mode="sum")
                for ids, weight, offsets in zip(self.ids, self.parameters, self.offsets, strict=True)
            ]

    def train(self) -> None:
        outputs = [bag(*batch) for bag, *batch in zip(self.bags, self.ids, self.offsets, strict=True)]
        torch.autograd.backward(outputs, self.grads)
        self.optimizer.step()
        self.optimizer.zero_grad()


def contestants(case: Case) -> tuple[Embedfuse, Torch]:
    """Both, on the same tables and the same batch."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(case.shortest, case.longest + 1, (case.tables * case.bags,), generator=generator)
    ids = torch.randint(0, case.rows, (int(lengths.sum()),), generator=generator)
    grad = torch.randn(case.bags, case.tables * case.dim, generator=generator)
    weights = [torch.randn(case.rows, case.dim, generator=generator) for _ in range(case.tables)]
    return Embedfuse(case, lengths, ids, grad, weights), Torch(case, lengths, ids, grad, weights)


def check(ours: Embedfuse, theirs: Torch) -> None:
    """Raises unless both compute the same, forward and after a step."""
    torch.testing.assert_close(ours.forward(), torch.cat(theirs.forward(), 1))
    ours.train()
    theirs.train()
    torch.testing.assert_close(ours.forward(), torch.cat(theirs.forward(), 1))


def take_turns(
    runs: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each run, in `rounds` rounds of all of them, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if number:
                seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> str:
    """How many times as fast, by medians: of all rounds (of the first third, of the last third)."""
    third = max(len(seconds[slow]) // 3, 1)
    parts = (slice(None), slice(None, third), slice(-third, None))
    whole, first, last = (
        statistics.median(seconds[slow][part]) / statistics.median(seconds[fast][part]) for part in parts
    )
    return f"{whole:.2f}x ({first:.2f}, {last:.2f})"


def with_threads(threads: int, run: Callable[[], object]) -> Callable[[], object]:
    """`run`, on that many threads."""

    def wrapper() -> object:
        torch.set_num_threads(threads)
        return run()

    return wrapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="threads of the comparison with PyTorch")
    parser.add_argument(
        "--thread-time", action="store_true",
        help="time what the calling thread gets of the processor, for machines that others use, too",
    )  # fmt: skip
    parser.add_argument("--large-pages", action="store_true", help="for our tables (`prefer_large_pages`)")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.thread_time else time.perf_counter
    print(f"torch {torch.__version__}, numpy {np.__version__}, engine {cpu.isa()}, {arguments.threads} thread(s)")
    for longest in (20, 1):
        case = Case(26, 2048, 1, longest, large_pages=arguments.large_pages)
        torch.set_num_threads(arguments.threads)
        ours, theirs = contestants(case)
        check(ours, theirs)
        print(case)
        for part in ("forward", "train"):
            runs = {"ours": getattr(ours, part), "torch": getattr(theirs, part)}
            runs = {name: with_threads(arguments.threads, run) for name, run in runs.items()}
            runs |= {f"ours on {n}": with_threads(n, getattr(ours, part)) for n in (1, 2)}
            seconds = take_turns(runs, arguments.rounds, clock)
            print(
                f"  {part:8} {statistics.median(seconds['ours']) * 1e3:7.2f} ms"
                f"   over torch {ratio(seconds, 'torch', 'ours')}"
                f"   2 threads over 1 {ratio(seconds, 'ours on 1', 'ours on 2')}"
            )


if __name__ == "__main__":
    main()
