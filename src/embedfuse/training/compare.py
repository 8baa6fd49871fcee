"""One command's work: the baseline, the unfused model, the fused one, and the files and table that compare them.

In `out`: `metrics.json`, `report.png`, and for each model a folder with its `checkpoint` and `result.json`.
"""

import dataclasses
import json
import math
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from .. import __version__
from ..data import SyntheticSize, load_flights, load_synthetic
from ..data.schema import Dataset
from ..models import ModelOptions, build_model
from ..torch.backends import select
from .baseline import PENALTIES, Baseline, baseline_steps, train_baseline
from .checkpoints import ResumeError
from .loop import Report, Trainer
from .plots import draw
from .settings import Settings
from .timing import STEPS, time_in_turn

Kind = Literal["unfused", "fused"]
KINDS: tuple[Kind, ...] = ("unfused", "fused")
METRICS, PICTURE, BASELINE = "metrics.json", "report.png", "logistic_regression.json"


@dataclass(frozen=True)
class Result:
    """Of one trained model, as written to `result.json`.

    `seconds` is the whole training without evaluations; step times are medians, in a comparison those of steps that
    both models made in turn, and `embedding_milliseconds` those of the embeddings without the dense layers.
    """

    kind: str
    auc: float
    log_loss: float
    milliseconds_per_step: float
    seconds: float
    steps: int
    phases: dict[str, float]
    curve: list[dict[str, float]]
    embedding_milliseconds: float | None = None


class Screen(Protocol):
    """Where a run tells how it goes."""

    def say(self, text: str) -> None:
        """One line."""

    def begin(self, title: str, steps: int | None) -> None:
        """A piece of work starts."""

    def report(self, report: Report) -> None:
        """It got this far."""

    def move(self, steps: int) -> None:
        """So many steps of it are made."""

    def end(self) -> None:
        """It is done."""


def load_dataset(settings: Settings) -> Dataset:
    """The data set that the settings name."""
    if settings.data == "flights":
        return load_flights()
    if settings.data == "synthetic":
        return load_synthetic(SyntheticSize(rows=settings.rows), settings.seed)
    from ..data.criteo import CriteoDataset

    assert settings.path is not None
    return CriteoDataset(settings.path, settings.test_path, settings.buckets)


def run(settings: Settings, out: Path, screen: Screen, resume: bool = False) -> dict[str, Any]:
    """Trains what the settings ask for, writes the files, and returns what is in `metrics.json`.

    Args:
        settings: the run.
        out: folder of its files, made as soon as there is something to write.
        screen: where it tells how it goes.
        resume: continue the run whose checkpoints are in `out`; what is finished there is not done again.

    Raises:
        ResumeError: nothing to continue, or with other settings.
        Interrupted: stopped by Ctrl-C.
    """
    kinds = KINDS if settings.compare else KINDS[1:]
    if resume and not any((out / kind / "checkpoint").exists() for kind in kinds):
        raise ResumeError(f"`--resume` needs a checkpoint, and there is none in {str(out)!r}: start without it first")
    # first of all, so that data that are not there leave everything as it is
    dataset = load_dataset(settings)
    if not resume:
        _clear(out, screen)
    screen.say(_introduction(dataset, settings))
    screen.say(_plan(settings))
    baseline = _baseline(dataset, settings, out, screen, resume) if settings.compare else None
    results = [_trained(kind, dataset, settings, out, screen, resume) for kind in kinds]
    if settings.compare:
        results = _timed(results, dataset, settings, out, screen)
    metrics = {
        "settings": settings.describe(),
        "data": dataset.describe(),
        "machine": _machine(settings),
        "logistic_regression": None if baseline is None else asdict(baseline),
        "models": {result.kind: asdict(result) for result in results},
    }
    _write(out / METRICS, _without_nan(metrics))
    draw(metrics, out / PICTURE)
    return metrics


def _trainer(kind: Kind, dataset: Dataset, settings: Settings, folder: Path, screen: Screen) -> Trainer:
    """Of a fresh model; the same first weights for both kinds."""
    torch.manual_seed(settings.seed)
    options = ModelOptions(
        kind,
        settings.table_optimizer,
        settings.dim,
        settings.dropout,
        settings.gradients,
        tuple(settings.shape.items()),
        torch.device(settings.device),
    )
    return Trainer(build_model(settings.model, dataset.schema, options), dataset, settings, folder, screen.report)


def _trained(kind: Kind, dataset: Dataset, settings: Settings, out: Path, screen: Screen, resume: bool) -> Result:
    folder = out / kind
    trainer = _trainer(kind, dataset, settings, folder, screen)
    if resume and (folder / "checkpoint").exists():
        trainer.resume()
        screen.say(f"{kind}: continuing after step {trainer.parts.progress.step}")
    screen.begin(f"{settings.model} {kind}", trainer.steps())
    try:
        quality = trainer.train()
    finally:
        screen.end()
    progress = trainer.parts.progress
    result = Result(
        kind,
        quality.auc,
        quality.log_loss,
        trainer.clock.median_step(),
        round(progress.seconds, 2),
        progress.step,
        trainer.clock.medians(),
        progress.curve,
    )
    _write(folder / "result.json", asdict(result))
    return result


def _timed(results: list[Result], dataset: Dataset, settings: Settings, out: Path, screen: Screen) -> list[Result]:
    """The same results with step times that were taken in turn."""
    trainers: dict[str, Trainer] = {kind: _trainer(kind, dataset, settings, out / kind, screen) for kind in KINDS}
    screen.begin("timing steps in turn", 2 * STEPS)
    try:
        times = time_in_turn(trainers, dataset, settings, screen.move)
    finally:
        screen.end()
    return [
        dataclasses.replace(
            result, milliseconds_per_step=own.whole, phases=own.phases, embedding_milliseconds=own.embeddings
        )
        for result in results
        for own in (times[result.kind],)
    ]


def _baseline(dataset: Dataset, settings: Settings, out: Path, screen: Screen, resume: bool) -> Baseline:
    file = out / BASELINE
    if resume and file.exists():
        return Baseline(**json.loads(file.read_text(encoding="utf-8")))
    screen.begin("logistic regression", baseline_steps(dataset, settings))
    try:
        baseline = train_baseline(dataset, settings, screen.say, screen.move)
    finally:
        screen.end()
    _write(file, asdict(baseline))
    return baseline


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _without_nan(value: Any) -> Any:
    """JSON has no NaN, which is the AUC of rows of one kind."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _clear(out: Path, screen: Screen) -> None:
    """Removes an earlier run's files, so that no later `--resume` takes them for its own."""
    old = [out / kind / "checkpoint" for kind in KINDS if (out / kind / "checkpoint" / "checkpoint.json").exists()]
    if old:
        screen.say(f"replacing the earlier run in {out} (--resume continues one instead)")
    for folder in old:
        shutil.rmtree(folder)
    for name in (METRICS, PICTURE, BASELINE, *(f"{kind}/result.json" for kind in KINDS)):
        (out / name).unlink(missing_ok=True)


def _introduction(dataset: Dataset, settings: Settings) -> str:
    facts = dataset.describe()
    if settings.data == "criteo":
        return f"{facts['path']}: {len(dataset.schema.fields)} fields, {facts['hash']}; tested on {facts['test_path']}"
    text = f"{facts['train_rows']:,} rows to train on, {facts['test_rows']:,} held out"
    if settings.data == "flights":
        text = (
            f"{facts['flights']:,} flights, {facts['left_out_without_arrival']:,} without a known arrival left out; "
            f"{text} on {facts['test_days']} whole days"
        )
    return text


def _plan(settings: Settings) -> str:
    """What comes in which order, and how long it takes if that is known."""
    if not settings.compare:
        return "To come: the training of the fused model, with evaluations on the way. No comparison."
    plan = (
        f"To come, in this order: a logistic regression ({len(PENALTIES) + 1} fits, to choose its penalty), the "
        f"unfused {settings.model}, the fused one, and {2 * STEPS} steps of both in turn, to time them."
    )
    if settings.data == "criteo":
        plan = plan.replace(f" ({len(PENALTIES) + 1} fits, to choose its penalty)", "")
    if settings.data == "flights" and settings.model == "dlrm" and settings.max_steps is None:
        plan += " With the default sizes that takes about 4 minutes on 2 idle cores, much longer on busy ones."
    return plan


def _machine(settings: Settings) -> dict[str, Any]:
    device = torch.device(settings.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": settings.device,
        "processor": name,
        "threads": torch.get_num_threads(),
        "backend": select(device, torch.float32).name,
        "embedfuse": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
