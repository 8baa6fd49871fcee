"""`embedfuse train`: options in, a run, and what went wrong as one sentence."""

import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..data.schema import DataError
from ..torch.backends import select
from ..training import DivergedError, Interrupted, ResumeError, Settings, run
from ..training.presets import preset
from ..training.settings import check_is_of_data
from .screen import RichScreen, result_table, speed_line, table_notes

MISTAKE, STOPPED = 2, 130


def train_command(model: str, data: str, given: dict[str, Any], out: Path, *, resume: bool, threads: int | None) -> int:
    """Runs it; returns the exit code."""
    errors = Console(stderr=True)
    try:
        for name in given:
            check_is_of_data(name, data)
        settings = Settings(model=model, data=data, **{**preset(model, data), **given})
        _check_device(settings.device)
        select(torch.device(settings.device), torch.float32)
        if out.exists() and not out.is_dir():
            raise ValueError(f"`out` must be a folder, or be made as one, got the file {str(out)!r}: choose another")
    except (ValueError, NotImplementedError) as error:
        return _fail(errors, str(error))
    if threads is not None:
        if threads < 1:
            return _fail(errors, f"`threads` must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    console = Console()
    # torch says this of its own sparse gradients
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    try:
        metrics = run(settings, out, RichScreen(console), resume)
    except (DataError, ResumeError, DivergedError, OSError) as error:
        return _fail(errors, str(error))
    except Interrupted as stop:
        errors.print(f"embedfuse: {stop}", highlight=False)
        return STOPPED
    except KeyboardInterrupt:
        errors.print("embedfuse: stopped", highlight=False)
        return STOPPED
    _show(console, metrics, out)
    return 0


def _fail(errors: Console, message: str) -> int:
    errors.print(f"embedfuse: {message}", highlight=False, markup=False, soft_wrap=True)
    return MISTAKE


def _check_device(name: str) -> None:
    """Raises ValueError unless torch can use that device here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"`device` must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(
                f"`device` must be one this machine has, got {name!r} and torch finds {count} CUDA GPUs: use --device "
                "cpu, or a CUDA build of torch on a machine with a GPU"
            )


def _show(console: Console, metrics: dict[str, Any], out: Path) -> None:
    data = metrics["data"]
    if data.get("bad_lines"):
        console.print(f"Bad lines, left out: {data['bad_lines']:,}. The first of them:", highlight=False)
        for line in data["first_bad_lines"]:
            console.print(f"  {line}", highlight=False, markup=False)
    console.print(result_table(metrics))
    for line in (*table_notes(metrics), speed_line(metrics)):
        if line is not None:
            console.print(line, highlight=False)
    console.print(
        f"Written to {out}: metrics.json, report.png, and a checkpoint in each model's folder.", highlight=False
    )
