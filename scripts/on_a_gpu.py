"""Everything that a machine with a GPU is needed for, in one call: tests first, then the timings that README quotes.

    python scripts/on_a_gpu.py --out results --budget 600 [--steps tests,engine,collection] [--commit HASH]

Each step writes its JSON to `results/` as it goes and is stopped when the time is over; what was found by then is
there. Timings of a tree whose tests failed say so.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (\S+)")
TESTS = {
    "tests": ["-m", "gpu", "--ignore-glob=*/test_cpu_*"],
    # those that CI makes, too, for the torch and Python of this machine; needs the C++ engine
    "everything": [],
}
STEPS = {
    "engine": ["benchmarks/gpu_engine.py", "--rounds", "40", "--out", "h200-engine.json"],
    "collection": ["benchmarks/collection.py", "--device", "cuda", "--out", "h200-collection.json"],
    "inputs": ["benchmarks/input_layer.py", "--device", "cuda", "--out", "h200-input-layer.json"],
    "bench": ["-m", "embedfuse.bench", "--suite", "engine", "--device", "cuda", "--out", "h200-bench-engine.json"],
    "models": ["-m", "embedfuse.bench", "--suite", "models", "--device", "cuda", "--out", "h200-bench-models.json"],
}


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run_tests(seconds: float, workers: int, log: Path, which: list[str]) -> dict[str, Any]:
    """Outcomes of tests, whether all were made in time, and the names of those that failed; in full: `log`."""
    command = [
        sys.executable, "-m", "pytest", "-v", *which, "-n", str(workers), "--dist", "worksteal", "-p",
        "no:cacheprovider", "-W", "ignore", "--tb=short", "--durations=25", "tests",
    ]  # fmt: skip
    counts: Counter[str] = Counter()
    failed: list[str] = []
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    complete = True
    written = log.open("w")
    for line in process.stdout:
        written.write(line)
        for outcome, test in OUTCOME.findall(line):
            # the summary repeats those that failed
            if outcome in ("FAILED", "ERROR"):
                if test in failed:
                    continue
                failed.append(test)
                print(outcome, test, flush=True)
            counts[outcome.lower()] += 1
        if time.monotonic() - start > seconds:
            process.kill()
            complete = False
            break
    process.wait()
    written.close()
    return {
        "what": " ".join(["pytest", *which, "tests"]), "complete": complete, **counts, "failed tests": failed,
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--budget", type=float, default=600, help="seconds for all of it")
    parser.add_argument("--steps", default="tests,engine,collection,inputs", help=f"of {', '.join([*TESTS, *STEPS])}")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 14), help="processes of the tests")
    parser.add_argument("--commit", default="", help="noted in the results")
    options = parser.parse_args()
    import torch

    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.budget
    about = {
        "commit": options.commit, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
    status = 0
    for step in options.steps.split(","):
        left = until - time.monotonic()
        if left < 20:
            print(f"{step}: no time left", flush=True)
            continue
        if step in TESTS:
            log = options.out / f"h200-{step}.log"
            found = {**about, **run_tests(left, options.workers, log, TESTS[step])}
            log.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
            print({key: value for key, value in found.items() if key != "failed tests"}, flush=True)
            status |= bool(found["failed tests"])
            continue
        arguments = [str(options.out / part) if part.endswith(".json") else part for part in STEPS[step]]
        try:
            done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=_environment(), timeout=left)
            status |= done.returncode
        except subprocess.TimeoutExpired:
            print(f"{step}: stopped, time is over", flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
