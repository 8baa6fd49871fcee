"""Times the Triton backend on one GPU: `pooled_lookup` and `row_update` (row-wise Adagrad, sort included).

    python benchmarks/gpu_engine.py --out engine.json [--sweep] [--budget 500] [--cases 10x2048x20]

Results are checked first, against PyTorch in float64 on the same GPU; a case that fails is not timed. Times are
medians of CUDA-graph replays, which rotate over several batches. `floor` is the time that the bytes that cannot be
avoided take at the measured copy bandwidth: each touched row (and its state) once in, and in the update once out;
ids; outputs or gradients.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from embedfuse.kernels import configs
from embedfuse.optim import RowWiseAdagrad
from embedfuse.plan import ALIGNMENT, ROW_BASE, T_RULE, T_SLOT0, PlannedFeature, plan_group
from embedfuse.torch.backends import Csr, Update
from embedfuse.torch.backends.triton import TritonBackend

BATCHES = 3
DEVICE = torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Shape:
    """`tables` tables of `rows` rows, each looked up by one feature with `bags` bags of `length` ids."""

    tables: int
    bags: int
    length: int
    rows: int
    dim: int
    zipf: float = 0.0
    hot: float = 0.0  # share of ids that are row 1
    dtype: str = "float32"

    def __str__(self) -> str:
        kind = f"zipf {self.zipf}" if self.zipf else f"{self.hot:.0%} one row" if self.hot else "uniform"
        suffix = "" if self.dtype == "float32" else f" {self.dtype}"
        return f"{self.tables}x{self.bags}x{self.length} {self.rows // 1000}k d{self.dim} {kind}{suffix}"


MAIN = [
    dataclasses.replace(shape, zipf=zipf)
    for shape in (
        Shape(10, 2048, 20, 1_000_000, 128),
        Shape(26, 65536, 1, 500_000, 128),
        Shape(8, 4096, 64, 2_000_000, 64),
        Shape(1, 8192, 128, 1_000_000, 512),
    )
    for zipf in (0.0, 1.05)
]
MORE = [
    Shape(1, 16384, 128, 1_000_000, 128, hot=0.5),
    Shape(10, 2048, 20, 1_000_000, 128, dtype="float16"),
    Shape(4, 512, 8, 10_000, 16),
]


class Case:
    """Tables, batches and the calls to time."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        group = plan_group([(shape.rows, shape.dim)] * shape.tables, [
            PlannedFeature(table, "sum") for table in range(shape.tables)
        ])  # fmt: skip
        self.group, self.width = group, group.width
        dtype = getattr(torch, shape.dtype)
        self.table = torch.empty(group.size, dtype=dtype, device=DEVICE).uniform_(-1, 1)
        self.features = torch.from_numpy(group.features).to(DEVICE)
        stride = -(-shape.rows // ALIGNMENT) * ALIGNMENT
        tables = group.tables.copy()
        tables[:, T_RULE] = 0
        tables[:, T_SLOT0] = range(0, stride * shape.tables, stride)
        self.slot_stride = stride
        self.optimizer = RowWiseAdagrad(0.01)
        self.update = Update(
            self.table, self.features, torch.from_numpy(tables).to(DEVICE), [RowWiseAdagrad],
            torch.zeros(stride * shape.tables, device=DEVICE),
            torch.tensor([self.optimizer.hyper(0.01)] * shape.tables, dtype=torch.float64, device=DEVICE),
            torch.ones(shape.tables, dtype=torch.int64, device=DEVICE),
        )  # fmt: skip
        self.batches = [self._batch(number) for number in range(BATCHES)]
        self.no_scale = torch.empty(0, device=DEVICE)
        unique = statistics.mean(len(self.keys(csr).unique()) for csr, _ in self.batches)
        size, count = self.table.element_size(), shape.tables * shape.bags * shape.length
        row, pooled = shape.dim * size, shape.tables * shape.bags * shape.dim * size
        self.ids, self.unique = count, unique
        self.forward_bytes = unique * row + pooled + count * 8
        self.logical_bytes = count * row + pooled + count * 8
        self.update_bytes = unique * (2 * row + 8) + pooled + count * 8

    def _batch(self, seed: int) -> tuple[Csr, Tensor]:
        shape = self.shape
        generator = torch.Generator(DEVICE).manual_seed(seed)
        count = shape.tables * shape.bags * shape.length
        if shape.zipf:
            weight = torch.arange(1, shape.rows + 1, dtype=torch.float64, device=DEVICE) ** -shape.zipf
            total = weight.cumsum(0)
            drawn = torch.rand(count, generator=generator, dtype=torch.float64, device=DEVICE) * total[-1]
            # spread the frequent rows over the table
            ids = torch.searchsorted(total, drawn).clamp(max=shape.rows - 1) * 2654435761 % shape.rows
        else:
            ids = torch.randint(shape.rows, (count,), generator=generator, device=DEVICE)
        if shape.hot:
            ids[torch.rand(count, generator=generator, device=DEVICE) < shape.hot] = 1
        offsets = torch.arange(0, count + 1, shape.length, device=DEVICE)
        grad = torch.empty(shape.bags, self.width, dtype=self.table.dtype, device=DEVICE)
        grad.normal_(generator=generator)
        return Csr(ids, offsets, None, shape.bags), grad

    def keys(self, csr: Csr) -> Tensor:
        """Each id's row among all tables."""
        return csr.ids.view(self.shape.tables, -1) + self.features[:, ROW_BASE, None]

    def forward(self, backend: TritonBackend, batch: int) -> Tensor:
        csr, _ = self.batches[batch]
        return backend.pooled_lookup(self.table, self.features, csr, self.width, False, "raise")[0]

    def step(self, backend: TritonBackend, batch: int) -> None:
        csr, grad = self.batches[batch]
        backend.row_update(self.update, csr, self.no_scale, grad)

    def check(self, backend: TritonBackend) -> dict[str, float]:
        """Largest error of both ops against PyTorch in float64, relative to the largest value."""
        shape = self.shape
        (csr, grad), errors = self.batches[0], {}
        out = self.forward(backend, 0)
        rounding = 2.0**-11 if shape.dtype == "float16" else 1e-6
        worst = 0.0
        for number in range(shape.tables):
            start = number * self._table_stride()
            table = self.table[start : start + shape.rows * shape.dim].view(shape.rows, shape.dim)
            ids = csr.ids.view(shape.tables, shape.bags, shape.length)[number]
            columns = slice(number * shape.dim, (number + 1) * shape.dim)
            for some in range(0, shape.bags, 4096):
                expected = table[ids[some : some + 4096]].double().sum(1)
                error = (out[some : some + 4096, columns].double() - expected).abs().max()
                worst = max(worst, float(error / expected.abs().max()))
        errors["forward"] = worst
        rows, inverse = self.keys(csr).reshape(-1).unique(return_inverse=True)
        bag = torch.arange(shape.bags, device=DEVICE).repeat_interleave(shape.length)
        before, slots = self.table.clone(), self.update.slots.clone()
        self.step(backend, 0)
        total = torch.zeros(len(rows), shape.dim, dtype=torch.float64, device=DEVICE)
        per = shape.bags * shape.length
        for number in range(shape.tables):
            columns = slice(number * shape.dim, (number + 1) * shape.dim)
            total.index_add_(0, inverse[number * per : (number + 1) * per], grad[:, columns].double()[bag])
        number, local = rows // shape.rows, rows % shape.rows
        place = number * self.slot_stride + local
        state = slots[place].double() + (total * total).mean(1)
        step = 0.01 / (state.sqrt() + self.optimizer.epsilon)
        at = number * self._table_stride() + local * shape.dim
        columns = torch.arange(shape.dim, device=DEVICE)
        for some in range(0, len(rows), 1 << 18):
            part = slice(some, some + (1 << 18))
            index = at[part, None] + columns
            before[index] = (before[index].double() - step[part, None] * total[part]).to(before.dtype)
        slots[place] = state.float()
        errors["update"] = float((self.table - before).abs().max())
        errors["state"] = float(((self.update.slots - slots).abs() / (slots.abs() + 1)).max())
        errors["allowed"] = 8 * rounding
        return errors

    def _table_stride(self) -> int:
        return -(-self.shape.rows * self.shape.dim // ALIGNMENT) * ALIGNMENT


def graphs_of(work: Callable[[int], Any]) -> list[torch.cuda.CUDAGraph]:
    """One graph for each batch."""
    graphs = []
    for batch in range(BATCHES):
        work(batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work(batch)
        graphs.append(graph)
    return graphs


def milliseconds(work: Callable[[int], Any], rounds: int) -> float:
    """Median device time of one call."""
    graphs = graphs_of(work)
    for graph in graphs:
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for number, (start, end) in enumerate(events):
        start.record()
        graphs[number % BATCHES].replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def host_microseconds(work: Callable[[int], Any], rounds: int = 200) -> float:
    """Host time of one call, the device not waited for."""
    work(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        work(0)
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / rounds * 1e6


def kernel_times(work: Callable[[int], Any]) -> dict[str, float]:
    """Device microseconds of each kernel of one call, by the profiler; the mean over the batches."""
    work(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in range(BATCHES):
            work(batch)
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profile.events():
        spent = getattr(event, "device_time_total", 0) or 0
        if spent:
            name = event.name if len(event.name) < 60 else event.name[:57] + "..."
            times[name] = times.get(name, 0.0) + spent / BATCHES
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy, read and written."""
    source = torch.empty(1 << 30, device=DEVICE).uniform_()
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() * 4 / (statistics.median(times) * 1e-3)


# --- tiles to try --------------------------------------------------------------------------------------------------


def lookup_candidates(shape: Shape) -> Iterator[configs.LookupConfig]:
    """Tiles of the forward around the default."""
    widths = {min(configs.power_of_two(shape.dim), most) for most in (64, 128, 256, 512)}
    if shape.length <= 8:
        for block_d in sorted(widths):
            for bags in (8, 16, 32, 64):
                for per_warp in (512, 1024, 2048):
                    warps = bags * block_d // per_warp
                    if 1 <= warps <= 8:
                        yield configs.LookupConfig(True, bags, bags, block_d, warps)
    if shape.length > 1:
        for block_d in sorted(widths):
            for rows in (4, 8, 16, 32):
                for sums in (rows, 1):
                    for warps in (1, 2, 4):
                        # 3 elements in 4 of the registers, at most
                        if block_d // warps >= 64 and rows * block_d // warps <= 4096:
                            yield configs.LookupConfig(False, rows, sums, block_d, warps)


def update_neighbours(best: configs.UpdateConfig) -> Iterator[tuple[str, configs.UpdateConfig]]:
    """Tiles that differ from the best so far in one respect, respect by respect."""
    for segments, warps in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2), (2, 4), (4, 4), (8, 4)):
        if 128 <= segments * best.block_d // warps <= 1024 and best.block_d // warps <= 512:
            yield "tile", dataclasses.replace(best, segments=segments, warps=warps)
    for unroll in (1, 2, 4):
        yield "unroll", dataclasses.replace(best, unroll=unroll)
    for chunk in (16, 32, 64, 128):
        yield "chunk", dataclasses.replace(best, chunk=chunk)
    for parts in (8, 16, 32, 64):
        yield "parts", dataclasses.replace(best, parts=parts)
    for join in (1, 2, 4, 8, 16):
        if join * best.block_d // best.warps <= 2048:
            yield "join", dataclasses.replace(best, join=join)
    for edges in (1, 2, 4, 8, 16):
        yield "edges", dataclasses.replace(best, edges=edges)


def geometric_mean(times: Sequence[float]) -> float:
    """The mean, infinite if one of them is."""
    return math.inf if math.inf in times else math.exp(statistics.mean(map(math.log, times)))


def attempt(op: Callable[[TritonBackend, int], Any], backend: TritonBackend, rounds: int) -> float:
    """The time of an op, or infinity where the compiler refuses its tiles."""
    try:
        return milliseconds(lambda batch: op(backend, batch), rounds)
    except (RuntimeError, TritonError) as error:
        print("   refused:", str(error).splitlines()[0][:100], flush=True)
        return math.inf


def sweep(cases: Sequence[Case], rounds: int, until: float) -> dict[str, Any]:
    """The best tiles for cases of one shape: the least geometric mean of their times."""
    shape = cases[0].shape
    report: dict[str, Any] = {"shape": str(shape), "lookup": [], "update": []}
    best_time = math.inf
    for config in lookup_candidates(shape):
        if time.monotonic() > until:
            break
        backend = TritonBackend(lookup=lambda widest, length, config=config: config)
        times = [attempt(case.forward, backend, rounds) for case in cases]
        mean = geometric_mean(times)
        report["lookup"].append({"config": dataclasses.asdict(config), "ms": times})
        if mean < best_time:
            best_time = mean
            report["best lookup"] = {"config": dataclasses.asdict(config), "ms": times}
            print("  lookup", config, [f"{t:.4f}" for t in times], flush=True)
    best = configs.update_config(shape.dim)
    tried: dict[configs.UpdateConfig, float] = {}

    def timed(config: configs.UpdateConfig) -> float:
        if config not in tried:
            backend = TritonBackend(update=lambda widest: config)
            times = [attempt(case.step, backend, rounds) for case in cases]
            tried[config] = geometric_mean(times)
            report["update"].append({"config": dataclasses.asdict(config), "ms": times})
        return tried[config]

    timed(best)
    for respect in dict.fromkeys(name for name, _ in update_neighbours(best)):
        for name, config in list(update_neighbours(best)):
            if name == respect and time.monotonic() < until and timed(config) < timed(best):
                best = config
                print("  update", respect, best, f"{timed(best):.4f}", flush=True)
    report["best update"] = {"config": dataclasses.asdict(best), "ms": tried[best]}
    return report


# --- the report ----------------------------------------------------------------------------------------------------


def measure(case: Case, bandwidth: float, rounds: int) -> dict[str, Any]:
    """Checks a case, then times both ops with the tiles that ship."""
    backend = TritonBackend()
    row: dict[str, Any] = {"case": str(case.shape), "ids": case.ids, "unique rows": case.unique}
    row["errors"] = errors = case.check(backend)
    if max(errors["forward"], errors["update"], errors["state"]) > errors["allowed"]:
        print(f"{case.shape!s:44} WRONG {errors}", flush=True)
        return row
    forward = milliseconds(lambda b: case.forward(backend, b), rounds)
    update = milliseconds(lambda b: case.step(backend, b), rounds)
    kernels = kernel_times(lambda b: case.step(backend, b))
    # segments, fold and join are the update; keys, runs and PyTorch's kernels are the sort
    own = sum(spent for name, spent in kernels.items() if name.startswith(("segments_", "fold_", "join_"))) / 1e3
    row |= {
        "forward ms": forward, "forward floor ms": case.forward_bytes / bandwidth * 1e3,
        "forward GB/s of bytes asked for": case.logical_bytes / forward / 1e6,
        "update ms": update, "update floor ms": case.update_bytes / bandwidth * 1e3,
        "update without sort ms": own, "kernels us": kernels,
        "host us forward": host_microseconds(lambda b: case.forward(backend, b)),
        "host us update": host_microseconds(lambda b: case.step(backend, b)),
    }  # fmt: skip
    print(
        f"{case.shape!s:44} fwd {forward:.4f} (floor {row['forward floor ms']:.4f}, "
        f"{case.logical_bytes / forward / 1e6:.0f} GB/s, share {row['forward floor ms'] / forward:.0%})  "
        f"update {update:.4f} = sort {update - own:.4f} + {own:.4f} (floor {row['update floor ms']:.4f}, "
        f"share {row['update floor ms'] / update:.0%})  "
        f"host {row['host us forward']:.0f} + {row['host us update']:.0f} us",
        flush=True,
    )
    for name, spent in list(kernels.items())[:8]:
        print(f"      {spent:8.1f} us  {name}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--sweep", action="store_true", help="try other tiles after the report")
    parser.add_argument("--budget", type=float, default=500, help="seconds after which no new tile is tried")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cases", default="", help="only cases whose name holds this")
    options = parser.parse_args()
    until = time.monotonic() + options.budget
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    result: dict[str, Any] = {
        "device": device, "torch": torch.__version__, "copy GB/s": bandwidth / 1e9, "cases": [], "sweep": [],
    }  # fmt: skip

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(result, indent=1))

    chosen = [shape for shape in [*MAIN, *MORE] if options.cases in str(shape)]
    for shape in chosen:
        case = Case(shape)
        result["cases"].append(measure(case, bandwidth, options.rounds))
        save()
        del case
        torch.cuda.empty_cache()
    if options.sweep:
        uniform = [shape for shape in chosen if shape in MAIN and not shape.zipf]
        pairs = [[other for other in chosen if dataclasses.replace(other, zipf=0.0) == shape] for shape in uniform]
        for number, pair in enumerate(pairs):
            print(pair[0], flush=True)
            now = time.monotonic()
            share = now + (until - now) / (len(pairs) - number)
            result["sweep"].append(sweep([Case(shape) for shape in pair], max(options.rounds // 3, 6), share))
            save()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
