"""`embedfuse bench`: times embeddings side by side here, or shows what an earlier run found."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Suite(StrEnum):
    """Choices of --suite."""

    ENGINE = "engine"
    CPU = "cpu"
    MODELS = "models"


def bench(
    suite: Annotated[
        Suite | None,
        typer.Option(
            help="engine: lookup and update on a GPU. cpu: the same, smaller, on one and two threads. models: whole "
            "training steps of DLRM, DeepFM and WDL. [default: engine on a GPU, else cpu]"
        ),
    ] = None,
    cases: Annotated[
        str | None, typer.Option(help="Names with commas between them, which may hold * and ?. [default: all]")
    ] = None,
    providers: Annotated[str | None, typer.Option(help="Names, likewise. [default: all that are installed]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. [default: cuda if there is one]")] = None,
    threads: Annotated[str, typer.Option(help="cpu: numbers of threads to time on.")] = "1,2",
    scale: Annotated[
        float, typer.Option(help="Of rows and batches. All of suite cpu takes one to three minutes at 0.02.")
    ] = 1.0,
    rounds: Annotated[int, typer.Option(help="Samples of each clock.")] = 21,
    budget: Annotated[
        float, typer.Option(help="Seconds after which no further case begins and no further provider is set up.")
    ] = 540.0,
    gigabytes: Annotated[float, typer.Option(help="Most that one copy of a case's tables may take.")] = 24.0,
    graphs: Annotated[bool, typer.Option(help="Time the device alone by CUDA graphs.")] = True,
    commit: Annotated[str | None, typer.Option(help="Of the sources, where git cannot tell.")] = None,
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path("runs/bench.json"),
    picture: Annotated[Path | None, typer.Option(help="Where to draw. [default: beside the JSON]")] = None,
    earlier: Annotated[Path | None, typer.Option("--from", help="Measure nothing: show this JSON.")] = None,
    names: Annotated[bool, typer.Option("--list", help="List cases and providers, and measure nothing.")] = False,
) -> None:
    """Time embeddings: ours, torch.nn.EmbeddingBag, and fbgemm-gpu, TensorFlow and JAX where they are installed.

    All take turns in one process. Each result is compared with a float64 computation first; one that is wrong gets no
    speed, but the reason. Tables and the picture are made from the JSON. Run it on an idle machine; without options
    it takes up to --budget and one case more, so about ten minutes.

    \b
    Examples:
      embedfuse bench --scale 0.02 --threads 1 --providers embedfuse,torch
                                                        a quick try: about 15 seconds on a CPU
      embedfuse bench --scale 0.02                      small sizes: one to three minutes on 2 cores
      embedfuse bench --suite cpu --out cpu.json
      embedfuse bench --cases 'tiny*' --providers embedfuse,fbgemm
      embedfuse bench --from cpu.json                   its tables and picture again
    """
    given = {
        "suite": None if suite is None else suite.value, "cases": cases, "providers": providers,
        "device": device, "threads": threads, "scale": scale, "rounds": rounds, "budget": budget,
        "gigabytes": gigabytes, "graphs": graphs, "commit": commit,
    }  # fmt: skip
    if names:
        raise typer.Exit(list_command())
    raise typer.Exit(bench_command(given, out, picture, earlier))


def bench_command(given: dict[str, Any], out: Path, picture: Path | None, earlier: Path | None) -> int:
    """Runs and shows, or only shows; returns the exit code."""
    from rich.console import Console

    from ..bench.report import show
    from ..bench.roofline import draw
    from .train import STOPPED, _fail

    errors, console = Console(stderr=True), Console()
    if not console.is_terminal:
        # into a file: no reason to break lines
        console = Console(width=max(console.width, 150))

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    try:
        if earlier is not None:
            report = _read(earlier)
        else:
            from ..bench.entry import measured

            report = measured(given, out, say)
    except (ValueError, OSError) as error:
        return _fail(errors, str(error))
    except KeyboardInterrupt:
        errors.print(f"embedfuse: stopped; the cases before are in {out}", highlight=False)
        return STOPPED
    show(report, console)
    source = earlier or out
    if report["kind"] == "cases":
        picture = picture or source.with_suffix(".png")
        draw(report, picture)
        console.print(f"Written: {picture}", highlight=False)
    if earlier is None:
        console.print(f"Written: {out}", highlight=False)
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"`--from` must be a JSON of `embedfuse bench`, got {str(path)!r}: {error}") from error
    if not isinstance(report, dict) or report.get("format") != 1:
        raise ValueError(f"`--from` must be a JSON of `embedfuse bench`, got {str(path)!r}")
    return report


def list_command() -> int:
    """Prints cases and providers."""
    from rich.console import Console

    from ..bench.cases import SUITES
    from ..bench.models import MODEL_CASES, MODEL_PROVIDERS
    from ..bench.providers import REGISTRY

    console = Console()
    for suite, cases in SUITES.items():
        console.print(f"suite {suite}:", highlight=False)
        for case in cases:
            console.print(f"  {case.name}: {case.describe()}", highlight=False, soft_wrap=True)
    console.print("suite models:", highlight=False)
    for model in MODEL_CASES:
        console.print(f"  {model.name}: {model.describe()}", highlight=False, soft_wrap=True)
    console.print("providers:", highlight=False)
    for name, entry in REGISTRY.items():
        console.print(f"  {name}: {entry.title}", highlight=False, soft_wrap=True)
    console.print(f"providers of suite models: {', '.join(MODEL_PROVIDERS)}", highlight=False, soft_wrap=True)
    return 0
