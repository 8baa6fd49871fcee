"""`python -m embedfuse.bench`: the measuring half of `embedfuse bench`, with PyTorch alone.

For machines without the packages of the command line: it writes the JSON, which `embedfuse bench --from` shows
elsewhere. It also takes several suites at once, which share the time.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from .entry import DEFAULTS, SUITES, measured, words

SHARES = {"engine": 0.6, "cpu": 0.5, "models": 0.4}
"""Of the time, if several suites are asked for; the last gets what is left."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; those of `embedfuse bench`."""
    parser = argparse.ArgumentParser(
        "python -m embedfuse.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", help=f"{', '.join(SUITES)}, or several of them with commas between")
    for name in ("cases", "providers", "device", "threads", "commit"):
        parser.add_argument(f"--{name}", default=DEFAULTS[name])
    for name in ("scale", "budget", "gigabytes"):
        parser.add_argument(f"--{name}", type=float, default=DEFAULTS[name])
    parser.add_argument("--rounds", type=int, default=DEFAULTS["rounds"])
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"), help="with several suites -SUITE is added")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit code."""
    given: dict[str, Any] = vars(parse(sys.argv[1:] if arguments is None else arguments))
    out: Path = given.pop("out")
    suites: tuple[str | None, ...] = words(given["suite"]) or (None,)
    left = given["budget"]
    for number, suite in enumerate(suites):
        last = number == len(suites) - 1
        given |= {"suite": suite, "budget": left if last else given["budget"] * SHARES.get(suite or "", 0.5)}
        path = out if len(suites) == 1 else out.with_name(f"{out.stem}-{suite}{out.suffix}")
        try:
            report = measured(given, path, lambda text: print(text, flush=True))
        except (ValueError, OSError) as error:
            print(f"embedfuse: {error}", file=sys.stderr)
            return 2
        left = max(1.0, left - report["seconds"])
        if importlib.util.find_spec("rich") is not None:
            from rich.console import Console

            from .report import show

            show(report, Console(width=150))
        print(f"Written: {path}, to be shown with: embedfuse bench --from {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
