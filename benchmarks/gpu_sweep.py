"""Other tiles than those that ship: what `gpu_engine.py --sweep` tries, and how it chooses."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpu_cases import Case, Shape
from gpu_timing import milliseconds
from triton.runtime.errors import TritonError

from embedfuse.kernels import configs
from embedfuse.torch.backends.triton import TritonBackend


def lookup_candidates(shape: Shape) -> Iterator[configs.LookupConfig]:
    """Tiles of the forward around the default."""
    widths = {min(configs.power_of_two(shape.dim), most) for most in (64, 128, 256, 512)}
    if shape.length <= 8:
        for block_d in sorted(widths):
            for bags in (8, 16, 32, 64):
                for per_warp in (512, 1024, 2048):
                    warps = bags * block_d // per_warp
                    if 1 <= warps <= 8:
                        yield configs.LookupConfig(True, bags, block_d, warps)
    if shape.length > 1:
        for block_d in sorted(widths):
            for rows in (4, 8, 16, 32):
                for warps in (1, 2, 4):
                    # half of the registers, at most
                    if block_d // warps >= 64 and rows * block_d // warps <= 4096:
                        yield configs.LookupConfig(False, rows, block_d, warps)


def update_neighbours(best: configs.UpdateConfig) -> Iterator[tuple[str, configs.UpdateConfig]]:
    """Tiles that differ from the best so far in one respect, respect by respect."""
    for segments in (1, 2, 4, 8):
        for warps in (1, 2, 4):
            if 128 <= segments * best.block_d // warps <= 1024 and best.block_d // warps <= 512:
                yield "tile", dataclasses.replace(best, segments=segments, warps=warps)
    for chunk in (16, 32, 64, 128):
        yield "chunk", dataclasses.replace(best, chunk=chunk)
    for parts in (16, 32, 64, 128, 256):
        yield "parts", dataclasses.replace(best, parts=parts)
    for join in (4, 8, 16, 32, 64):
        for warps in (2, 4, 8):
            if 512 <= join * best.block_d // warps <= 4096:
                yield "join", dataclasses.replace(best, join=join, join_warps=warps)
    for fold in (16, 32, 64, 128):
        yield "fold", dataclasses.replace(best, fold=fold)
    for long in (4, 8, 16):
        yield "long", dataclasses.replace(best, long=long)
    for terms in (4, 8, 16, 32):
        for warps in (1, 2, 4):
            if 256 <= terms * best.block_d // warps <= 2048:
                yield "terms", dataclasses.replace(best, terms=terms, long_warps=warps)
    for keys in (256, 512, 1024):
        yield "keys", dataclasses.replace(best, keys=keys)


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
