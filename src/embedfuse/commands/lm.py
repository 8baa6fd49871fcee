"""`embedfuse lm`: a language model with a feed-forward block against one with a memory in its place."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Text(StrEnum):
    """Choices of --text."""

    STDLIB = "stdlib"
    INSTALLED = "installed"


class Preset(StrEnum):
    """Choices of --preset."""

    CPU = "cpu"
    GPU = "gpu"


def lm(
    preset: Annotated[
        Preset, typer.Option(help="Sizes to start from. cpu: a few minutes on two cores. gpu: larger, for a CUDA GPU.")
    ] = Preset.CPU,
    steps: Annotated[int | None, typer.Option(help="Training steps of each model. [default: by --preset]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pieces of text in a step. [default: by --preset]")] = None,
    context: Annotated[int | None, typer.Option(help="Bytes of a piece of text. [default: by --preset]")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the Transformer. [default: by --preset]")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the Transformer. [default: by --preset]")] = None,
    memory_layer: Annotated[
        int | None, typer.Option(help="Layer, from 0, whose block becomes the memory. [default: the middle one]")
    ] = None,
    num_keys: Annotated[
        int | None, typer.Option(help="Keys of each half; the memory has this number squared of rows.")
    ] = None,
    memory_heads: Annotated[int | None, typer.Option(help="Queries that each byte sends to the memory.")] = None,
    topk: Annotated[int | None, typer.Option(help="Rows that each query reads.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--lr", help="Of all but the memory's rows.")
    ] = None,
    value_learning_rate: Annotated[
        float | None, typer.Option("--value-learning-rate", "--value-lr", help="Of the memory's rows.")
    ] = None,
    text: Annotated[
        Text | None,
        typer.Option(
            help="What to read: Python's standard library, or all installed packages, too. [default: by --preset]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the text.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. [default: by --preset]")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads. [default: torch's choice]")] = None,
    out: Annotated[Path, typer.Option(help="Folder for metrics.json and report.png.")] = Path("runs/lm"),
) -> None:
    """Train a small language model twice: with a feed-forward block, and with a memory in its place.

    The model predicts the next byte of Python's own standard library (on a GPU also of the packages installed beside
    it), which is on this machine already; some files are held out to test on. A memory layer looks up a few rows of a
    large table for each byte, so it has many more parameters at about the same work. Fewer bits per held-out byte are
    better. Nothing is downloaded.

    \b
    Examples:
      embedfuse lm                             a few minutes on two cores
      embedfuse lm --steps 100                 a first impression
      embedfuse lm --num-keys 256              65,536 rows in place of 16,384
      embedfuse lm --preset gpu                larger, on a GPU
    """
    given = {
        "steps": steps, "batch_size": batch_size, "context": context, "dim": dim, "layers": layers,
        "memory_layer": memory_layer, "num_keys": num_keys, "memory_heads": memory_heads, "topk": topk,
        "learning_rate": learning_rate, "value_learning_rate": value_learning_rate, "seed": seed, "device": device,
        "text": None if text is None else text.value,
    }  # fmt: skip
    chosen = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(lm_command(preset.value, chosen, out, threads))


def lm_command(preset: str, given: dict[str, Any], out: Path, threads: int | None) -> int:
    """Runs it; returns the exit code."""
    import torch
    from rich.console import Console

    from ..data.schema import DataError
    from ..training.lm import run_language
    from ..training.lm_settings import PRESETS, LanguageSettings
    from ..training.metrics import DivergedError
    from .lm_screen import LanguageScreen, language_table
    from .train import STOPPED, _check_device, _fail

    errors, console = Console(stderr=True), Console()
    try:
        settings = LanguageSettings(**{**PRESETS[preset], **given})
        _check_device(settings.device)
        if threads is not None:
            if threads < 1:
                raise ValueError(f"`threads` must be at least 1, got {threads}")
            torch.set_num_threads(threads)
        metrics = run_language(settings, out, LanguageScreen(console))
    except (ValueError, DataError, DivergedError, OSError) as error:
        return _fail(errors, str(error))
    except KeyboardInterrupt:
        errors.print("embedfuse: stopped; nothing was written", highlight=False)
        return STOPPED
    console.print(language_table(metrics))
    for line in _findings(metrics):
        console.print(line, highlight=False)
    console.print(f"Written to {out}: metrics.json and report.png.", highlight=False)
    return 0


def _findings(metrics: dict[str, Any]) -> list[str]:
    """What the numbers say, in sentences."""
    plain, memory = (metrics["models"][kind] for kind in ("feed-forward", "memory"))
    use, gain = memory["usage"], plain["bits_per_byte"] - memory["bits_per_byte"]
    verdict = "fewer" if gain > 0 else "more"
    return [
        f"After the same {metrics['settings']['steps']:,} steps the memory model needs {abs(gain):.3f} bits per byte "
        f"{verdict} on the held-out text. A byte takes it {memory['flops'] / 1e6:.3f} MFLOP in place of "
        f"{plain['flops'] / 1e6:.3f}, and a step {memory['milliseconds_per_step']:.0f} ms in place of "
        f"{plain['milliseconds_per_step']:.0f}.",
        f"Memory, on the held-out text: {use['used']:.1%} of {use['num_slots']:,} rows read, {use['top1_used']:.1%} as "
        f"the best of a query; half of all reads go to {use['hold_50']:,} rows, 90 % to {use['hold_90']:,}; KL to "
        f"uniform {use['kl']:.2f}, Gini {use['gini']:.2f}.",
    ]
