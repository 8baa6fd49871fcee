"""What a run shows in the terminal: lines, a progress bar, and a table at the end."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..training.loop import Report


class RichScreen:
    """A `Screen` of `training/compare.py` in colour, or in plain lines where the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._title = ""
        self._steps: int | None = None

    def say(self, text: str) -> None:
        """One line."""
        if self._progress is not None and self._console.is_terminal:
            self._progress.update(self._task or TaskID(0), note=text)
        else:
            self._console.print(text, highlight=False)

    def begin(self, title: str, steps: int | None) -> None:
        """A progress bar from 0 to `steps`; one that only moves if that is unknown."""
        self._title, self._steps = title, steps
        self._progress = Progress(
            TextColumn("[bold]{task.description:<20}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._progress.start()
        self._task = self._progress.add_task(title, total=steps, count=f"0/{steps}" if steps else "", note="")
        if not self._console.is_terminal:
            self._console.print(title, highlight=False)

    def report(self, report: Report) -> None:
        """Moves the bar; after an evaluation also prints a line that stays."""
        note = f"loss {report.loss:.4f}  {report.rows_per_second:,.0f} rows/s"
        count = f"{report.step}/{report.steps}" if report.steps else f"{report.step}"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=report.step, count=count, note=note)
        if report.quality is not None:
            self._console.print(
                f"  step {report.step:>6}  {note}  held out: AUC {report.quality.auc:.4f}, "
                f"log loss {report.quality.log_loss:.4f}",
                highlight=False,
            )

    def move(self, steps: int) -> None:
        """Moves the bar."""
        if self._progress is not None and self._task is not None:
            count = f"{steps}/{self._steps}" if self._steps else f"{steps}"
            self._progress.update(self._task, completed=steps, count=count)

    def end(self) -> None:
        """Takes the bar away."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None


def result_table(metrics: dict[str, Any]) -> Table:
    """One row a model. The regression gets no step time: its steps are of another size."""
    table = Table(title=f"{metrics['settings']['data']}: held-out rows", title_justify="left")
    table.add_column("model")
    for column in ("AUC", "log loss", "ms a step", "s of training"):
        table.add_column(column, justify="right")
    rows = {}
    if metrics["logistic_regression"] is not None:
        rows["logistic regression"] = metrics["logistic_regression"]
    name = {"dlrm": "DLRM", "deepfm": "DeepFM", "wdl": "WDL"}[metrics["settings"]["model"]]
    rows |= {f"{name} {kind}": model for kind, model in metrics["models"].items()}
    for title, row in rows.items():
        table.add_row(
            title, f"{row['auc']:.4f}", f"{row['log_loss']:.4f}",
            f"{row['milliseconds_per_step']:.2f}" if "steps" in row else "", f"{row['seconds']:.1f}",
        )  # fmt: skip
    return table


def table_notes(metrics: dict[str, Any]) -> list[str]:
    """What the last two columns of the table are."""
    models = metrics["models"]
    timed = "of some that both made in turn, after the training" if "unfused" in models else "of the training"
    notes = [
        f"ms a step: the median {timed}. s of training: all {models['fused']['steps']:,} steps as they were made, "
        "evaluations left out. It is more than the product of both where other work kept the machine busy meanwhile."
    ]
    if metrics["logistic_regression"] is not None:
        notes.append("Logistic regression: the seconds of all its fits, evaluations included.")
    return notes


def speed_line(metrics: dict[str, Any]) -> str | None:
    """How the fused step compares with the unfused one, as a whole and without the dense layers."""
    models = metrics["models"]
    if "unfused" not in models:
        return None
    whole, part = (
        models["unfused"][name] / max(models["fused"][name], 1e-9)
        for name in ("milliseconds_per_step", "embedding_milliseconds")
    )
    return (
        f"Unfused time / fused time, in steps that both made in turn: {whole:.2f} for a whole step, {part:.2f} for the "
        "embeddings alone (lookup, backward and update of all tables, without the dense layers)."
    )
