"""From words of a command line to a run; for the command and for `python -m embedfuse.bench` alike."""

import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import models, runner
from .machine import command_line

SUITES = ("engine", "cpu", "models")
DEFAULTS: dict[str, Any] = {
    "suite": None, "cases": "", "providers": "", "device": None, "threads": "1,2", "scale": 1.0, "rounds": 21,
    "budget": 540.0, "gigabytes": 24.0, "graphs": True, "commit": None,
}  # fmt: skip


def measured(given: dict[str, Any], out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs one suite; `given` may leave out what is in `DEFAULTS`.

    Raises:
        ValueError: an option of the wrong kind.
    """
    given = {**DEFAULTS, **given}
    device = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    place = device_of(device)
    suite = given["suite"] or ("cpu" if place.type == "cpu" else "engine")
    for name in ("scale", "rounds", "budget", "gigabytes"):
        if not given[name] > 0:
            raise ValueError(f"`{name}` must be more than 0, got {given[name]}")
    # torch says this of its own sparse gradients
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    options = runner.Options(
        suite=suite, device=place, cases=words(given["cases"]), providers=words(given["providers"]),
        threads=threads_of(given["threads"]), scale=given["scale"], rounds=given["rounds"], budget=given["budget"],
        gigabytes=given["gigabytes"], graphs=given["graphs"], command=tuple(command_line()), commit=given["commit"],
        out=out, say=say, began=time.monotonic(),
    )  # fmt: skip
    return models.run(options) if suite == "models" else runner.run(options)


def words(text: str | None) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def threads_of(text: str) -> tuple[int, ...]:
    """Numbers between commas."""
    if not re.fullmatch(r"\s*[1-9][0-9]*\s*(,\s*[1-9][0-9]*\s*)*", text):
        raise ValueError(f"`threads` must be numbers from 1 with commas between them, got {text!r}")
    return tuple(int(word) for word in text.split(","))


def device_of(name: str) -> torch.device:
    """The device of that name, a GPU with its number, which some libraries want; from here on the current one."""
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", name):
        raise ValueError(f"`device` must be cpu, cuda or cuda:N, got {name!r}")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", device.index or 0)
    if device.index >= count:
        raise ValueError(f"`device` must be one this machine has, got {name!r} and torch finds {count} CUDA GPUs")
    torch.cuda.set_device(device)
    return device
