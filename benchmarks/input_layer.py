"""Times a fused `InputLayer` beside the same columns in plain PyTorch operations, one column at a time.

    python benchmarks/input_layer.py --out input_layer.json [--device cuda] [--rounds 9]

26 features of one table each, batch 4096, 1 to 10 ids a bag (uniform), mean; dim 16 and 128, float32. Plain means, for
each column: mask, gather, weigh, sum over segments, divide (`do_fusion=False`); once in eager mode and once through
`torch.compile`. All sides run in turn in one process, ids lie on the device before; medians of wall time of

- `forward`: without gradients.
- `backward`: forward and backward. Plain eager gives sparse gradients, the quickest it can do; compiled plain dense
  ones, since torch.compile knows no others. Ours keeps ids and upstream gradients for the optimizer (`update="step"`),
  as it does in training, so its work on rows is not in this number, but in the next two.
- `train`: forward, backward and an Adagrad step: `FusedOptimizer` beside `torch.optim.Adagrad`.
- `in backward`: ours with `update="backward"`: forward, backward and the whole step, to be held against the others'
  forward and backward alone.

Before anything is timed, all sides are compared: outputs, and tables after a training step.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from clocks import about, timed
from torch import Tensor, nn

import embedfuse
from embedfuse.torch import Bags, FusedOptimizer
from embedfuse.torch import feature_column as fc
from embedfuse.torch.feature_column.plain import plain_lookup

FEATURES, BATCH, DIMS, MOST = 26, 4096, (16, 128), 10


class Compiled(nn.Module):
    """The plain lookups of all columns, as one graph."""

    def __init__(self, tables: list[Tensor]) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(table.detach().clone()) for table in tables])

    def forward(self, batch: dict[str, Bags]) -> Tensor:
        return torch.cat(
            [plain_lookup(t, b, "mean", None, False) for t, b in zip(self.tables, batch.values(), strict=True)], 1
        )


class Side:
    """One way to look up, with an optimizer; all start from the same tables."""

    def __init__(
        self, name: str, dim: int, rows: int, device: torch.device, values: list[Tensor] | None, update: Any = "step"
    ) -> None:
        columns = [
            fc.embedding_column(fc.categorical_column_with_identity(f"f{n:02}", rows), dim, do_fusion=name == "fused")
            for n in range(FEATURES)
        ]
        rule = embedfuse.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=1e-10)
        layer = fc.InputLayer(columns, rule, update, device, grad="sparse")
        assert layer.tables is not None
        self.forward: Callable[[Any], Tensor] = layer
        self.tables: list[nn.Parameter] = [table for _, table in sorted(layer.tables.named_tables())]
        for table, value in zip(self.tables, values or [], strict=False):
            table.data.copy_(value)
        if name == "compiled":
            module = Compiled(self.tables)
            self.tables, self.forward = list(module.tables), torch.compile(module, dynamic=True)
        self.optimizer: torch.optim.Optimizer
        if name == "fused":
            self.optimizer = FusedOptimizer(layer)
        else:
            self.optimizer = torch.optim.Adagrad(self.tables, 0.1, initial_accumulator_value=0.1, eps=1e-10)

    def only_forward(self, batch: Any, gradient: Tensor) -> None:
        with torch.no_grad():
            self.forward(batch)

    def backward(self, batch: Any, gradient: Tensor) -> None:
        self.forward(batch).backward(gradient)
        self.optimizer.zero_grad()

    def train(self, batch: Any, gradient: Tensor) -> None:
        self.forward(batch).backward(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch_of(rows: int, batch: int, seed: int, device: torch.device) -> dict[str, Bags]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number in range(FEATURES):
        lengths = torch.randint(1, MOST + 1, (batch,), generator=generator)
        ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
        made[f"f{number:02}"] = Bags.from_lengths(ids, lengths).to(device)
    return made


def check(sides: dict[str, Side], batch: Any, gradient: Tensor) -> None:
    """Raises unless all sides have the same outputs, and the same tables after a step."""
    with torch.no_grad():
        outputs = [side.forward(batch) for side in sides.values()]
    for side in sides.values():
        side.train(batch, gradient)
    for out, side in zip(outputs, sides.values(), strict=True):
        torch.testing.assert_close(out, outputs[0], rtol=1e-5, atol=1e-5)
        for mine, other in zip(side.tables, sides["plain"].tables, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def measure(dim: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    plain = Side("plain", dim, options.rows, device, None)
    values = [table.detach().clone() for table in plain.tables]
    sides = {
        "fused": Side("fused", dim, options.rows, device, values),
        "plain": plain,
        "compiled": Side("compiled", dim, options.rows, device, values),
    }
    batches = [batch_of(options.rows, options.batch, seed, device) for seed in range(3)]
    gradient = torch.randn(options.batch, FEATURES * dim, device=device)
    check(sides, batches[0], gradient)
    jobs = {
        f"{what} {name}": getattr(side, method)
        for what, method in (("forward", "only_forward"), ("backward", "backward"), ("train", "train"))
        for name, side in sides.items()
    }
    jobs["in backward fused"] = Side("fused", dim, options.rows, device, values, "backward").backward
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(options.rounds + 2):
        for name, job in jobs.items():
            times[name].append(timed(partial(job, batches[number % len(batches)], gradient), device))
    medians = {name: statistics.median(values[2:]) * 1e3 for name, values in times.items()}
    ratios = {
        f"{what}: {other} / fused": medians[f"{what} {other}"] / medians[f"{what} fused"]
        for what in ("forward", "backward", "train")
        for other in ("plain", "compiled")
    }
    for other in ("plain", "compiled"):
        ratios[f"backward {other} / in backward fused"] = medians[f"backward {other}"] / medians["in backward fused"]
    return {
        "dim": dim,
        **{f"{name} ms": round(value, 3) for name, value in medians.items()},
        **{name: round(value, 2) for name, value in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--dims", type=int, nargs="+", default=list(DIMS))
    options = parser.parse_args()
    device = torch.device(options.device)
    result: dict[str, Any] = {
        **about(device),
        "shape": f"{FEATURES} tables x {options.rows} rows, float32, batch {options.batch}, 1 to {MOST} ids a bag",
        "cases": [],
    }
    for dim in options.dims:
        case = measure(dim, options, device)
        result["cases"].append(case)
        print(case, flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
