"""Saving a run so that it continues bit for bit: weights, both optimizers, random state, and the place in the data."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..torch import load, save
from .settings import Settings, differences


class ResumeError(ValueError):
    """There is nothing to continue, or not with these settings."""


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        epoch, position: the next batch is number `position` of `epoch`.
        step: steps made.
        finished: all of them.
        seconds: spent training, evaluations left out.
        curve: of each evaluation, step, mean training loss since the one before, AUC and log loss.
        times: milliseconds of each step's phases, see `clock.py`.
        losses: of the steps since the last evaluation.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    finished: bool = False
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass
class Parts:
    """What is saved."""

    model: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    progress: Progress


def save_run(folder: Path, parts: Parts, settings: Settings) -> None:
    """Replaces the checkpoint in `folder` in one step; killed before it, the one before stays whole."""
    random = {"cpu": torch.get_rng_state()}
    if torch.device(settings.device).type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state()
    state = {"settings": settings.describe(), "progress": asdict(parts.progress), "random": random}
    save(folder, {"model": parts.model}, parts.optimizers, state)


def load_run(folder: Path, parts: Parts, settings: Settings) -> None:
    """Continues from the checkpoint in `folder`: fills the model and optimizers, sets progress and random state.

    Raises:
        ResumeError: other settings, or a checkpoint that does not fit the model.
    """
    state: Any = load(folder)
    different = differences(state["settings"], settings)
    if different:
        raise ResumeError(
            f"the run in {str(folder.parent)!r} was made with other settings: {'; '.join(different)}. "
            "Give the same ones, or another `--out`"
        )
    try:
        load(folder, {"model": parts.model}, parts.optimizers)
    except ValueError as error:
        raise ResumeError(f"the checkpoint in {str(folder)!r} does not fit: {error}") from error
    parts.progress = Progress(**state["progress"])
    torch.set_rng_state(state["random"]["cpu"])
    if "cuda" in state["random"] and torch.device(settings.device).type == "cuda":
        torch.cuda.set_rng_state(state["random"]["cuda"])
