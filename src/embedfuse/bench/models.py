"""Whole training steps of DLRM, DeepFM and WDL: the same model over every kind of embeddings, in three modes.

Checked first: three losses and the rows after the first step, against a float64 model whose tables hold only the rows
of the batches. Rows may be off by as much as those of the same model in float32 are, three times.
"""

import dataclasses
import fnmatch
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..models import MODELS, UnfusedEmbeddings
from ..training.clock import PHASES, StepClock
from .model_parts import DENSE_EPSILON, DENSE_RATE, PROVIDERS, ModelCase, Rows, Trainable, draw, filled, why_not
from .providers import LIBRARY_ERRORS, Phase, Unsupported
from .runner import Options, check_providers, report_of, save
from .timing import Job, Refusals, examine, quartiles, results, take_turns

BATCHES = 3
LOSS_TOLERANCE, MOVE_TOLERANCE, NOISE = 2e-3, 0.02, 3.0
"""The first two relative, of three losses and of the rows' moves in the first step; or so many times what plain PyTorch
in float32 is off by: batch normalisation of channels that are nearly constant makes much of the last digits."""
MODES = ("eager", "compiled", "graphs")
MODEL_PROVIDERS = tuple(PROVIDERS)
MODEL_CASES = [
    ModelCase(f"{model}{suffix}_{batch}", model, batch, dim, rows)
    for batch in (512, 8192)
    for model, suffix, dim, rows in (
        ("dlrm", "", 16, 10_000), ("wdl", "", 64, 10_000), ("deepfm", "", 16, 10_000),
        ("dlrm", "_large", 128, 1_000_000),
    )
]  # fmt: skip


def run(options: Options) -> dict[str, Any]:
    """Runs the suite of models; first all of it eager, then compiled and in CUDA graphs while there is time.

    Raises:
        ValueError: a case or provider that is not known.
    """
    check_providers(options.providers, MODEL_PROVIDERS)
    chosen = [
        dataclasses.replace(
            case, batch=max(2, round(case.batch * options.scale)), rows=max(8, round(case.rows * options.scale))
        )
        for case in choose(options.cases)
    ]
    report = report_of(options, "models")
    usable = []
    for name in options.providers or MODEL_PROVIDERS:
        reason = options.over if options.is_over() else why_not(name, options.device)
        report["providers"][name] = {"title": PROVIDERS[name], "reason": reason}
        if reason is None:
            usable.append(name)
    report["cases"] = [{"name": case.name, "shape": case.describe(), "providers": {}} for case in chosen]
    refusals = Refusals()
    # a C++ compiler takes minutes for each model on a CPU
    passes = [("eager",), ("compiled", "graphs")] if options.device.type == "cuda" and options.graphs else [("eager",)]
    for modes in passes:
        for case, entry in zip(chosen, report["cases"], strict=True):
            if options.is_over():
                report["not run"].append({"name": f"{case.name}, {', '.join(modes)}", "reason": options.over})
                continue
            options.say(f"{case.name}, {', '.join(modes)}: {case.describe()}")
            try:
                measure(case, usable, modes, entry, options, refusals)
            except LIBRARY_ERRORS as error:
                report["not run"].append({"name": case.name, "reason": f"{type(error).__name__}: {error}"})
            save(report, options)
            gc.collect()
            if options.device.type == "cuda":
                torch.cuda.empty_cache()
    save(report, options)
    return report


def choose(patterns: Sequence[str]) -> list[ModelCase]:
    """The cases whose names fit one of the patterns; all without any."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in MODEL_CASES):
            names = ", ".join(case.name for case in MODEL_CASES)
            raise ValueError(f"`cases` must name cases of suite 'models', got {pattern!r}: there are {names}")
    return [c for c in MODEL_CASES if not patterns or any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]


def measure(
    case: ModelCase, names: Sequence[str], modes: Sequence[str], entry: dict[str, Any], options: Options,
    refusals: Refusals,
) -> None:  # fmt: skip
    """Checks and times one case in some modes, and puts what is found into its entry."""
    began = time.monotonic()
    if "compiled" in modes:
        # all cases compile one `forward`, and a compiler that has seen too many kinds of it gives up
        torch.compiler.reset()
    batches = draw(case, options.device, BATCHES)
    touched = _touched(case, batches)
    expected = None
    jobs: list[tuple[Job, Trainable, str]] = []
    for name in names:
        found = entry["providers"].setdefault(name, {})
        for mode in modes:
            if mode == "graphs":
                continue
            if options.is_over():
                found[f"unsupported, {mode}"] = options.over
                continue
            try:
                made = Trainable(case, name, options.device)
                saved = {n: (touched[n], t.detach()[touched[n]].clone()) for n, t in made.embeddings.weights().items()}
                if mode == "compiled":
                    _compile(made)
                if saved:
                    expected = expected or _expect(case, batches, touched, saved)
                    reason = _wrong(made, batches, saved, expected)
                    if reason:
                        found["wrong"] = f"{mode}: {reason}"
                        options.say(f"  {name}: {found['wrong']}")
                        continue
                    made.reset(saved)
                jobs += [(job, made, mode) for job in _jobs(name, mode, made, batches, "graphs" in modes)]
            except Unsupported as error:
                found[f"unsupported, {mode}"] = str(error)
            except LIBRARY_ERRORS as error:
                text = str(error).strip() or type(error).__name__
                found[f"error, {mode}"] = f"{type(error).__name__}: {text.splitlines()[0][:300]}"
                options.say(f"  {name}: {mode}: {found[f'error, {mode}']}")
    examine([job for job, _, _ in jobs], options.device)
    # PyTorch's own last: what fails to be captured may disturb those after it
    for job, _, mode in sorted(jobs, key=lambda entry: entry[0].provider.startswith("torch")):
        if mode == "compiled" and job.capturable and job.error is None:
            refusals.capture(job)
    take_turns([job for job, _, _ in jobs], options.device, options.rounds, lambda: None)
    alone = {job.name: job for job, _, _ in jobs if job.provider == "none"}
    for job, made, mode in jobs:
        found = results(job) | added_to(alone.get(job.name), job)
        entry["providers"][job.provider].setdefault("phases", {})[job.name] = found
        if mode == "eager" and job.name == "eager":
            entry["providers"][job.provider]["breakdown"] = _breakdown(made, batches, options)
    entry.setdefault("seconds", {})[modes[0]] = round(time.monotonic() - began, 1)
    for name in names:
        phases = entry["providers"][name].get("phases", {})
        times = [f"{phase} {own['wall']['median']:.3g}" for phase, own in phases.items() if "wall" in own]
        options.say(f"  {name}: {', '.join(times)} ms" if times else f"  {name}: no speed")


def added_to(alone: Job | None, job: Job) -> dict[str, Any]:
    """What tables add to a step of the dense net: the differences of each round, of wall time and of the graphs.

    A host's speed changes within a run by more than they add, and less within a round.
    """
    if alone is None or alone is job or alone.error is not None or job.error is not None:
        return {}
    return {
        f"added, {clock}": quartiles([own - least for own, least in zip(mine, alone.samples[clock], strict=True)])
        for clock, mine in job.samples.items()
        if clock in ("wall", "graph, wall") and clock in alone.samples
    }


def _compile(made: Trainable) -> None:
    if made.provider == "torch-sparse":
        raise Unsupported("torch.compile knows no sparse gradients")
    made.called = torch.compile(made.model, dynamic=False)


def _jobs(name: str, mode: str, made: Trainable, batches: Sequence[Rows], graphs: bool) -> list[Job]:
    step = Job(name, mode, Phase(lambda batch, _: made.step(batch)), batches, mode == "compiled" and graphs)
    if mode != "eager" or name == "none":
        return [step]
    return [step, Job(name, "embeddings alone", Phase(lambda batch, _: made.step_tables(batch)), batches, False)]


def _breakdown(made: Trainable, batches: Sequence[Rows], options: Options) -> dict[str, float]:
    """Milliseconds of each phase of an eager step: events on a GPU, so of the device with its gaps."""
    clock = StepClock(options.device)
    for number in range(options.rounds + 5):
        clock.start()
        # there is no data to load
        clock.mark()
        made.step(batches[number % len(batches)], clock.mark)
    clock.collect()
    return {phase: value for phase, value in clock.medians().items() if phase != PHASES[0]}


# --- the check -------------------------------------------------------------------------------------------------------


def _touched(case: ModelCase, batches: Sequence[Rows]) -> dict[str, Tensor]:
    """For each table the rows of the batches."""
    rows = {field.name: torch.cat([b.inputs[field.name] for b in batches]).unique() for field in case.schema().fields}
    return {lookup.name: rows[lookup.field.name] for lookup in case.lookups(case.schema())}


Expected = tuple[list[float], dict[str, Tensor], dict[str, float]]
"""Losses, rows after the first step, and how far their moves may be off, relative."""


def _expect(
    case: ModelCase, batches: Sequence[Rows], touched: dict[str, Tensor], saved: dict[str, tuple[Tensor, Tensor]]
) -> Expected:
    """Of a step on each batch."""
    losses, tables = _judge(case, batches, touched, saved, torch.float64)
    _, rounded = _judge(case, batches[:1], touched, saved, torch.float32)
    allowed = {
        name: max(MOVE_TOLERANCE, NOISE * _error(rounded[name], saved[name][1], table))
        for name, table in tables.items()
    }
    return losses, tables, allowed


def _judge(
    case: ModelCase, batches: Sequence[Rows], touched: dict[str, Tensor], saved: dict[str, tuple[Tensor, Tensor]],
    dtype: torch.dtype,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """Losses of a step on each batch, and rows after the first, by a plain model with just these rows."""
    fields = [field.name for field in case.schema().fields]
    small = case.schema([len(touched[name]) for name in fields])
    lookups = filled(case, case.lookups(small))
    device = batches[0].numeric.device
    embeddings = UnfusedEmbeddings(lookups, device, "dense")
    torch.manual_seed(0)
    make: Any = MODELS[case.model]
    model = make(embeddings, small, dim=case.dim).to(device, dtype)
    with torch.no_grad():
        for name, table in embeddings.weights().items():
            table.copy_(saved[name][1])
    dense = [value for name, value in model.named_parameters() if not name.startswith("embeddings.")]
    optimizers = [embeddings.make_optimizer(), torch.optim.Adam(dense, DENSE_RATE, eps=DENSE_EPSILON)]
    losses: list[float] = []
    tables: dict[str, Tensor] = {}
    for batch in batches:
        inputs = {name: torch.searchsorted(touched[name], batch.inputs[name]) for name in fields}
        logits = model(inputs, batch.numeric.to(dtype))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.to(dtype))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if not tables:
            tables = {name: table.detach().clone() for name, table in embeddings.weights().items()}
    return losses, tables


def _wrong(
    made: Trainable, batches: Sequence[Rows], saved: dict[str, tuple[Tensor, Tensor]], expected: Expected
) -> str | None:
    losses, tables, allowed = expected
    for number, (batch, loss) in enumerate(zip(batches, losses, strict=True), 1):
        made.step(batch)
        found = float(made.loss.detach())
        if not abs(found - loss) <= LOSS_TOLERANCE * abs(loss):
            return f"loss {found:.6f} in step {number}, expected {loss:.6f}"
        reason = _moved_wrongly(made, saved, tables, allowed) if number == 1 else None
        if reason:
            return reason
    return None


def _moved_wrongly(
    made: Trainable, saved: dict[str, tuple[Tensor, Tensor]], tables: dict[str, Tensor], allowed: dict[str, float]
) -> str | None:
    for name, table in made.embeddings.weights().items():
        rows, before = saved[name]
        error = _error(table.detach()[rows], before, tables[name])
        if not error <= allowed[name]:
            return f"rows of {name} moved wrongly, by {error:.0%} of their way"
    return None


def _error(found: Tensor, before: Tensor, expected: Tensor) -> float:
    """How far rows are from where they should be, in shares of their way there."""
    move, right = (values.double() - before.double() for values in (found, expected))
    return float((move - right).norm() / right.norm().clamp_min(1e-12))
