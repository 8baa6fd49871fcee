"""What `embedfuse lm` shows in the terminal."""

from typing import Any

from rich.table import Table

from ..training.lm_loop import LanguageReport
from .screen import RichScreen


class LanguageScreen(RichScreen):
    """A progress bar for each model, and a line that stays after each evaluation."""

    def progress(self, report: LanguageReport) -> None:
        """Moves the bar."""
        note = f"{report.training_bits:.3f} bits  {report.bytes_per_second:,.0f} bytes/s"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=report.step, count=f"{report.step}/{report.steps}", note=note)
        if report.bits is not None:
            self._console.print(
                f"  step {report.step:>6}  {note}  held out: {report.bits:.3f} bits per byte", highlight=False
            )


def language_table(metrics: dict[str, Any]) -> Table:
    """One row a model."""
    table = Table(title="held-out text", title_justify="left")
    table.add_column("block")
    for column in ("bits/byte", "weights", "MFLOP/byte", "in block", "ms/step", "time"):
        table.add_column(column, justify="right")
    for kind, model in metrics["models"].items():
        table.add_row(
            kind,
            f"{model['bits_per_byte']:.4f}",
            f"{model['parameters'] / 1e6:.2f} M",
            f"{model['flops'] / 1e6:.3f}",
            f"{model['block_flops'] / 1e6:.3f}",
            f"{model['milliseconds_per_step']:.0f}",
            f"{model['seconds']:.0f} s",
        )
    return table
