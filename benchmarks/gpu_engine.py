"""Times the Triton backend on one GPU: `pooled_lookup` and `row_update` (row-wise Adagrad, sort included).

    python benchmarks/gpu_engine.py --out engine.json [--sweep] [--budget 500] [--cases 10x2048x20]

Results are checked first, against PyTorch in float64 on the same GPU; a case that fails is not timed. Times are
medians of CUDA-graph replays, which rotate over several batches. `floor` is the time that the bytes that cannot be
avoided take at the measured copy bandwidth: each touched row (and its state) once in, and in the update once out;
ids; outputs or gradients.
"""

import argparse
import dataclasses
import datetime
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_cases import MAIN, MORE, Case
from gpu_sweep import sweep
from gpu_timing import copy_bandwidth, host_microseconds, kernel_times, milliseconds

from embedfuse.torch.backends.triton import TritonBackend


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
    # segments, long, fold and join are the update, some of them beside each other; the others are the sort
    updating = ("segments_", "long_", "fold_", "join_")
    sort = sum(spent for name, spent in kernels.items() if not name.startswith(updating)) / 1e3
    row |= {
        "forward ms": forward, "forward floor ms": case.forward_bytes / bandwidth * 1e3,
        "forward GB/s of bytes asked for": case.logical_bytes / forward / 1e6,
        "update ms": update, "update floor ms": case.update_bytes / bandwidth * 1e3,
        "update without sort ms": update - sort, "kernels us": kernels,
        "host us forward": host_microseconds(lambda b: case.forward(backend, b)),
        "host us update": host_microseconds(lambda b: case.step(backend, b)),
    }  # fmt: skip
    print(
        f"{case.shape!s:44} fwd {forward:.4f} (floor {row['forward floor ms']:.4f}, "
        f"{case.logical_bytes / forward / 1e6:.0f} GB/s, share {row['forward floor ms'] / forward:.0%})  "
        f"update {update:.4f} = sort {sort:.4f} + {update - sort:.4f} (floor {row['update floor ms']:.4f}, "
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
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{device}, {versions}, copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    result: dict[str, Any] = {
        "device": device, "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "copy GB/s": bandwidth / 1e9, "cases": [], "sweep": [],
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
