"""`embedfuse bench` as a user calls it, the model suite, and the guard against a slow CPU engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import (
    CPU,
    needs_engine,
    options,
    quick_backend,  # noqa: F401 (a fixture for all tests here)
)

from embedfuse import cli
from embedfuse.bench import (
    batches,
    cases,
    models,
    providers,
    runner,
    timing,
)
from embedfuse.torch import use_backend


def test_the_command_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "bench.json"
    command = ["bench", "--suite", "cpu", "--scale", "0.004", "--rounds", "2", "--cases", "cpu_tiny,cpu_wide"]
    assert (
        cli.main([*command, "--providers", "embedfuse,torch", "--threads", "1", "--device", "cpu", "--out", str(out)])
        == 0
    )
    assert [case["name"] for case in json.loads(out.read_text())["cases"]] == ["cpu_tiny", "cpu_wide"]
    assert out.with_suffix(".png").exists()
    assert "cpu_wide" in capsys.readouterr().out


def test_cases_for_which_there_was_no_time_are_named() -> None:
    made = runner.run(options(cases=("cpu_tiny",), providers=("torch",), budget=1e-9))
    assert made["cases"] == []
    reason = "the budget of 1e-09 seconds was used up"
    assert made["not run"] == [{"name": "cpu_tiny", "reason": reason}]
    # some take long to import
    assert made["providers"]["torch"]["reason"] == reason


def test_the_budget_is_looked_at_before_each_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = options(cases=("cpu_tiny",), providers=("embedfuse", "torch"))
    ready: list[str] = []
    make = runner.make
    monkeypatch.setattr(runner, "make", lambda name, work, shared: (ready.append(name), make(name, work, shared))[1])
    monkeypatch.setattr(runner.Options, "is_over", lambda self: bool(ready))
    made = runner.run(chosen)
    found = made["cases"][0]["providers"]
    assert ready == ["embedfuse"]
    assert "train, 1 thread" in found["embedfuse"]["phases"]
    assert found["torch"] == {"unsupported": "the budget of 560 seconds was used up"}


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    for text in ("dcn_v2", "cpu_bags_bfloat16_adam", "dlrm_large_8192", "fbgemm-v2", "torch-sparse"):
        assert text in shown


MISTAKES = {
    "case": (["--suite", "cpu", "--cases", "nothing"], "`cases` must name cases of suite 'cpu', got 'nothing'"),
    "provider": (["--suite", "cpu", "--providers", "numpy"], "got 'numpy'"),
    "model provider": (
        ["--suite", "models", "--providers", "torch"],
        "`providers` must be of embedfuse, embedfuse-backward, torch-dense",
    ),
    "scale": (["--scale", "0"], "`scale` must be more than 0, got 0"),
    "threads": (["--threads", "1,x"], "`threads` must be numbers from 1"),
    "from": (["--from", "no.json"], "no.json"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = MISTAKES[mistake]
    assert cli.main(["bench", *arguments, "--device", "cpu", "--out", str(tmp_path / "x.json")]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown
    assert "Traceback" not in shown


def test_a_json_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "x.json").write_text(text)
        assert cli.main(["bench", "--from", str(tmp_path / "x.json")]) == 2
        assert "must be a JSON of `embedfuse bench`" in " ".join(capsys.readouterr().err.split())


def test_models_are_checked_and_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [
        models.ModelCase(f"{name}_512", name, 1200, 8, 2000, fields=3, numeric=2) for name in ("dlrm", "wdl", "deepfm")
    ]
    monkeypatch.setattr(models, "MODEL_CASES", small)
    out = tmp_path / "models.json"
    names = "embedfuse,embedfuse-backward,torch-dense,torch-sparse,fbgemm,none"
    command = ["bench", "--suite", "models", "--scale", "0.05", "--rounds", "2", "--device", "cpu", "--out", str(out)]
    assert cli.main([*command, "--providers", names]) == 0
    made = json.loads(out.read_text())
    assert made["not run"] == []
    for case in made["cases"]:
        for name in ("embedfuse", "embedfuse-backward", "torch-dense", "torch-sparse", "none"):
            entry = case["providers"][name]
            assert "wrong" not in entry
            assert entry["phases"]["eager"]["wall"]["median"] > 0
            assert list(entry["breakdown"]) == ["forward", "backward", "embedding optimizer", "dense optimizer"]
            assert ("added, wall" in entry["phases"]["eager"]) == (name != "none")
    shown = capsys.readouterr().out
    assert "A training step" in shown
    assert "times as fast as the better form" in shown
    assert cli.main(["bench", "--from", str(out)]) == 0


def test_a_wrong_model_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = models.ModelCase("dlrm_512", "dlrm", 64, 8, 100, fields=3, numeric=2)
    monkeypatch.setattr(models, "MODEL_CASES", [case])
    monkeypatch.setattr(models, "choose", lambda patterns: [case])
    true_step = models.Trainable.step

    def step(self: models.Trainable, rows: Any, mark: Any = lambda: None) -> None:
        true_step(self, rows, mark)
        if self.provider == "embedfuse":
            # as if the update had been made twice
            self.step_tables(rows)

    monkeypatch.setattr(models.Trainable, "step", step)
    made = models.run(options(suite="models", scale=1.0, providers=("embedfuse", "torch-sparse")))
    found = made["cases"][0]["providers"]
    assert "eager:" in found["embedfuse"]["wrong"]
    assert "phases" not in found["embedfuse"]
    assert "eager" in found["torch-sparse"]["phases"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_all_clocks() -> None:
    device = torch.device("cuda", 0)
    with use_backend("auto"):
        made = runner.run(
            options(
                suite="engine",
                device=device,
                scale=1.0,
                cases=("tiny",),
                providers=("embedfuse-engine", "embedfuse", "torch"),
            )
        )
    found = made["cases"][0]["providers"]
    for name in ("embedfuse", "embedfuse-engine"):
        assert found[name]["wrong"] is None
        for phase in ("forward", "backward", "train"):
            own = found[name]["phases"][phase]
            assert own["device"]["median"] > 0, own
            assert {"device, cold cache", "graph, wall", "wall", "host"} <= own.keys()
            assert own["launches"] > 0
            assert own["peak bytes"] >= 0
    assert found["torch"]["phases"]["train"]["kernels ms"] > 0
    assert made["cases"][0]["smallest graph ms"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_models_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MODEL_CASES", [models.ModelCase("dlrm_512", "dlrm", 512, 16, 1000, fields=4)])
    with use_backend("auto"):
        made = models.run(
            options(
                suite="models",
                device=torch.device("cuda", 0),
                scale=1.0,
                providers=("embedfuse", "embedfuse-backward", "torch-dense", "none"),
            )
        )
    for name in ("embedfuse", "embedfuse-backward"):
        own = made["cases"][0]["providers"][name]
        assert "wrong" not in own, own
        assert own["phases"]["eager"]["launches"] > 0
        assert "compiled" in own["phases"], own
        assert "device" in own["phases"]["compiled"], own["phases"]["compiled"]
        assert own["phases"]["compiled"]["device"]["median"] > 0, own


GUARDED = {"cpu_bags": (0.75, 2.2), "cpu_single_ids": (0.85, 2.0), "cpu_bags_bfloat16_adam": (0.8, 2.0)}
"""Least times as fast as torch's ops, forward and whole step: half of what a busy machine with AVX-512 shows."""
TRIES, TURNS = 3, 5


def best_ratios(name: str) -> tuple[float, float]:
    """Torch's least time over the engine's least time, forward and step, one thread, turn by turn."""
    case = cases.scaled(next(case for case in cases.CPU if case.name == name), 0.25)
    work = batches.draw(case, CPU)
    pair = [providers.make(provider, work, {}) for provider in ("embedfuse-engine", "torch")]
    jobs = [
        timing.Job("", phase, p.phases[phase], work.batches, False, 1) for phase in ("forward", "train") for p in pair
    ]
    timing.take_turns(jobs, CPU, TURNS, lambda: None)
    engine_forward, torch_forward, engine_train, torch_train = (min(job.samples["wall"]) for job in jobs)
    return torch_forward / engine_forward, torch_train / engine_train


@needs_engine
@pytest.mark.parametrize("name", GUARDED)
def test_the_cpu_engine_has_not_become_slow(name: str) -> None:
    """Ratios of least times in one process; noise would have to hit every turn of every try, and one side alone."""
    least, seen = GUARDED[name], []
    for _ in range(TRIES):
        seen.append(best_ratios(name))
        if all(found >= bound for found, bound in zip(seen[-1], least, strict=True)):
            return
    pytest.fail(f"forward and step are {seen} times as fast as torch's, at least {least} is expected")


def test_some_providers_run_if_they_are_named_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def note(case: object, names: list[str], *rest: object) -> None:
        asked.append(list(names))
        raise RuntimeError("noted")

    monkeypatch.setattr(runner, "measure", note)
    runner.run(options(cases=("cpu_tiny",), providers=()))
    runner.run(options(cases=("cpu_tiny",), providers=providers.BY_NAME))
    assert not set(asked[0]) & set(providers.BY_NAME)
    assert {"embedfuse", "embedfuse-engine", "torch"} <= set(asked[0])
    assert asked[1] == list(providers.BY_NAME)
