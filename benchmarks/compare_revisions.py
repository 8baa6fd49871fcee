"""Runs `embedfuse bench` on a base revision and on this tree, in turn, and prints what moved.

    python benchmarks/compare_revisions.py --base HEAD~5 -- --suite engine --cases 'ten_tables*,tiny'
    python benchmarks/compare_revisions.py --base-tree ../other -- --suite engine
    python benchmarks/compare_revisions.py --old a.json --new b.json

The suite is this tree's in both runs (it is copied into the base), so that both measure the same. Each revision runs in
processes of its own, by turns. `--build` compiles the C++ engine of both first, for the suite of the CPU; without it
both use the engine that is installed, which is right for a GPU. Exits with 1 if anything became slower.
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from embedfuse.bench.compare import THRESHOLD, changes, lines, lost

ROOT = Path(__file__).resolve().parents[1]
SUITE = ("src/embedfuse/bench", "src/embedfuse/commands/bench.py")


def export(revision: str, place: Path) -> Path:
    """The files of a revision, without touching this tree."""
    place.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive, check=True)
    return place


def with_suite(tree: Path) -> Path:
    """The tree with this tree's suite in place of its own."""
    for name in SUITE:
        source, target = ROOT / name, tree / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return tree


START = """
import runpy, sys
# an editable install would put its own tree before the one that is asked for
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
sys.path.insert(0, sys.argv.pop(1))
import embedfuse
assert embedfuse.__file__.startswith(sys.path[0]), embedfuse.__file__
runpy.run_module("embedfuse.bench", run_name="__main__", alter_sys=True)
"""


def installed(tree: Path, place: Path, build: bool) -> Path:
    """What to put on the path for a tree."""
    if not build:
        shutil.copytree(tree / "src", place, ignore=shutil.ignore_patterns("__pycache__"))
        engine = importlib.util.find_spec("embedfuse.cpu._engine")
        if engine is not None and engine.origin is not None:
            shutil.copy(engine.origin, place / "embedfuse" / "cpu")
        return place
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--target", str(place)]
    build_dir = f"--config-settings=build-dir={place}-build"
    subprocess.run([sys.executable, "-m", "pip", "install", *options, build_dir, str(tree)], check=True)
    return place


def run(path: Path, arguments: list[str], out: Path) -> dict[str, Any]:
    """One run of the suite in a process of its own."""
    command = [sys.executable, "-c", START, str(path), *arguments, "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"embedfuse bench {' '.join(arguments)} failed with {done.returncode}")
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def measured(options: argparse.Namespace, work: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Reports of the base and of this tree, taken in turn."""
    if options.base_tree is not None:
        base = work / "base"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "runs")
        shutil.copytree(options.base_tree, base, ignore=ignored)
    else:
        base = export(options.base, work / "base")
    old_path = installed(with_suite(base), work / "old", options.build)
    new_path = installed(ROOT, work / "new", options.build)
    arguments = options.arguments or []
    if not any(word.startswith("--providers") for word in arguments):
        arguments = [*arguments, "--providers", "embedfuse,embedfuse-engine"]
    reports: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    for turn in range(options.turns):
        for name, path in (("old", old_path), ("new", new_path)):
            print(f"turn {turn + 1} of {options.turns}: {name}", flush=True)
            reports[name].append(run(path, arguments, options.out / f"{name}-{turn}.json"))
    return reports["old"], reports["new"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="the revision to compare with")
    parser.add_argument("--base-tree", type=Path, help="or a folder with its files, where there is no git")
    parser.add_argument("--old", type=Path, nargs="+", help="or reports of it")
    parser.add_argument("--new", type=Path, nargs="+", help="reports of this tree")
    parser.add_argument("--build", action="store_true", help="compile the C++ engine of both")
    parser.add_argument("--turns", type=int, default=2, help="runs of each")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="least change to be shown")
    parser.add_argument("--out", type=Path, default=Path("runs/revisions"), help="folder for the reports")
    parser.add_argument("arguments", nargs="*", help="for `embedfuse bench`, after --")
    options = parser.parse_args()
    if options.old or options.new:
        if not (options.old and options.new):
            parser.error("--old and --new go together")
        old, new = ([json.loads(path.read_text()) for path in paths] for paths in (options.old, options.new))
    else:
        options.out = options.out.resolve()
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            old, new = measured(options, Path(work))
    found = changes(old, new)
    for line in (*lines(found, options.threshold), *lost(old, new)):
        print(line)
    return int(any(change.moved(options.threshold) and change.ratio > 1 for change in found))


if __name__ == "__main__":
    sys.exit(main())
