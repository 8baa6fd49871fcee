"""Two byte-level language models that differ in one block, trained on the same text in the same order."""

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import __version__
from ..data.python_text import Text, load_text
from ..torch.backends import select
from .lm_loop import LanguageReport, LanguageTrainer
from .lm_model import KINDS, differing_block, make_model
from .lm_plots import draw
from .lm_settings import LanguageSettings

METRICS, PICTURE = "metrics.json", "report.png"


class LanguageScreen(Protocol):
    """Where a run tells how it goes."""

    def say(self, text: str) -> None:
        """One line."""

    def begin(self, title: str, steps: int | None) -> None:
        """A piece of work starts."""

    def progress(self, report: LanguageReport) -> None:
        """It got this far."""

    def end(self) -> None:
        """It is done."""


def run_language(
    settings: LanguageSettings, out: Path, screen: LanguageScreen, text: Text | None = None
) -> dict[str, Any]:
    """Trains both models, writes `metrics.json` and `report.png` to `out`, and returns what the first one holds.

    Args:
        settings: the run.
        out: folder of its files, made if missing.
        screen: where it tells how it goes.
        text: what to learn; what the settings say if None.

    Raises:
        DataError: no text on this machine.
        DivergedError: a loss that is not finite.
    """
    text = load_text(settings.text) if text is None else text
    facts = text.facts
    screen.say(
        f"{facts.source}: {facts.train_files:,} files with {facts.train_bytes:,} bytes to train on, "
        f"{facts.held_out_files:,} files with {facts.held_out_bytes:,} bytes held out"
    )
    screen.say(_compute(settings))
    results, uses = [], []
    for kind in KINDS:
        screen.begin(kind, settings.steps)
        try:
            result, use = LanguageTrainer(kind, text, settings, screen.progress).train()
        finally:
            screen.end()
        results.append(result)
        uses += [use] if use is not None else []
    metrics = {
        "settings": settings.describe(),
        "data": facts.describe(),
        "machine": _machine(settings.device),
        "models": {result.kind: asdict(result) for result in results},
    }
    out.mkdir(parents=True, exist_ok=True)
    draw(metrics, uses[0].counts, out / PICTURE)
    _write(out / METRICS, json.dumps(metrics, indent=1, allow_nan=False))
    return metrics


def _compute(settings: LanguageSettings) -> str:
    """One line on the work of both models."""
    models = [make_model(kind, settings) for kind in KINDS]
    plain, memory = (differing_block(model, settings).flops_per_token for model in models)
    whole = [model.flops_per_token(settings.context) for model in models]
    rows = settings.num_keys**2
    return (
        f"FLOPs for each byte, forward: the feed-forward block of layer {settings.memory_position} {plain:,}, the "
        f"memory of {rows:,} rows in its place {memory:,} ({memory / plain:.0%}); the whole models {whole[0]:,} and "
        f"{whole[1]:,}"
    )


def _machine(name: str) -> dict[str, Any]:
    device = torch.device(name)
    known = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "processor": known,
        "threads": torch.get_num_threads(),
        "backend": select(device, torch.float32).name,
        "embedfuse": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _write(path: Path, content: str) -> None:
    """In one piece: whoever looks finds the old file or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(content, encoding="utf-8")
    part.replace(path)
