"""Times an `EmbeddingCollection` with its fused optimizer beside one `torch.nn.EmbeddingBag` per table.

    python benchmarks/collection.py --out collection.json [--device cuda] [--rounds 9]

26 tables of 100,000 rows, dim 64, float32, batch 2048; 1, 5 and 20 ids a bag. Both sides run in one process, in turns;
times are medians of wall time. Before anything is timed, both sides are compared: outputs, and tables after a step.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from clocks import about, timed
from torch import Tensor

import embedfuse
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer

TABLES, ROWS, DIM, BATCH, LENGTHS = 26, 100_000, 64, 2048, (1, 5, 20)


class Ours:
    """All tables in one collection, stepped by a fused Adagrad."""

    def __init__(self, device: torch.device) -> None:
        tables = [embedfuse.TableConfig(ROWS, DIM, combiner="sum", name=f"t{number}") for number in range(TABLES)]
        features = {table.name: embedfuse.FeatureConfig(table) for table in tables}
        rule = embedfuse.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=1e-10)
        self.collection = EmbeddingCollection(features, optimizer=rule, device=device)
        self.optimizer = FusedOptimizer(self.collection)

    def forward(self, batch: dict[str, Bags]) -> Tensor:
        return self.collection.concatenated(batch)

    def step(self) -> None:
        self.optimizer.step()

    def tables(self) -> list[Tensor]:
        return list(self.collection.tables.values())


class PerTable:
    """One `EmbeddingBag` per table with sparse gradients, stepped by torch's Adagrad."""

    def __init__(self, like: list[Tensor]) -> None:
        self.bags = [
            torch.nn.EmbeddingBag.from_pretrained(
                table.detach().clone(), freeze=False, mode="sum", sparse=True, include_last_offset=True
            )
            for table in like
        ]
        self.optimizer = torch.optim.Adagrad(self.tables(), 0.1, initial_accumulator_value=0.1, eps=1e-10)

    def forward(self, batch: dict[str, Bags]) -> Tensor:
        return torch.cat([bag(b.ids, b.offsets) for bag, b in zip(self.bags, batch.values(), strict=True)], 1)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tables(self) -> list[Tensor]:
        return [bag.weight for bag in self.bags]


def batch_of(length: int, seed: int, device: torch.device) -> dict[str, Bags]:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(BATCH + 1) * length
    return {
        f"t{number}": Bags(torch.randint(0, ROWS, (BATCH * length,), generator=generator), offsets).to(device)
        for number in range(TABLES)
    }


def measure(length: int, rounds: int, device: torch.device) -> dict[str, Any]:
    ours = Ours(device)
    theirs = PerTable(ours.tables())
    gradient = torch.randn(BATCH, TABLES * DIM, device=device)
    batches = [batch_of(length, seed, device) for seed in range(3)]

    def look_up(side: Ours | PerTable, batch: dict[str, Bags]) -> None:
        with torch.no_grad():
            side.forward(batch)

    def train(side: Ours | PerTable, batch: dict[str, Bags]) -> None:
        side.forward(batch).backward(gradient)
        side.step()

    torch.testing.assert_close(ours.forward(batches[0]), theirs.forward(batches[0]))
    for side in (ours, theirs):
        train(side, batches[0])
    for mine, other in zip(ours.tables(), theirs.tables(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    times: dict[str, list[float]] = {name: [] for name in ("forward", "forward_torch", "train", "train_torch")}
    for number in range(rounds + 2):
        batch = batches[number % len(batches)]
        for suffix, side in (("", ours), ("_torch", theirs)):
            for name, work in (("forward", look_up), ("train", train)):
                times[name + suffix].append(timed(lambda w=work, s=side, b=batch: w(s, b), device))
    medians = {name: statistics.median(values[2:]) * 1e3 for name, values in times.items()}
    # each looked-up row once in; the output once out
    moved = (BATCH * length + BATCH) * TABLES * DIM * 4
    return {
        "ids a bag": length,
        **{f"{name} ms": round(value, 3) for name, value in medians.items()},
        "forward GB/s": round(moved / medians["forward"] / 1e6, 2),
        "forward ratio": round(medians["forward_torch"] / medians["forward"], 2),
        "train ratio": round(medians["train_torch"] / medians["train"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    result: dict[str, Any] = {
        **about(device),
        "shape": f"{TABLES} tables x {ROWS} rows x dim {DIM}, float32, batch {BATCH}, uniform ids, sum, Adagrad",
        "cases": [],
    }
    for length in LENGTHS:
        case = measure(length, options.rounds, device)
        result["cases"].append(case)
        print(case, flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
