"""The command line: what it writes, how it stops and goes on, and what it says of a user's mistakes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import embedfuse
from embedfuse import cli
from embedfuse.torch import load, use_backend
from embedfuse.torch.backends import why_not

SMALL = ["train", "--data", "synthetic", "--rows", "700", "--batch-size", "64", "--dim", "2", "--epochs", "1"]
TINY = [*SMALL, "--layers", "8", "--bottom", "8"]


@pytest.fixture(autouse=True)
def _quick_backend() -> Iterator[None]:
    with use_backend("cpu" if why_not("cpu", torch.device("cpu")) is None else "eager"):
        yield


def environment() -> dict[str, str]:
    """For other processes: one thread, and no interpreted kernels in place of the engine."""
    source = str(Path(embedfuse.__file__).parents[1])
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source, "COLUMNS": "200"}


def one_line(text: str) -> str:
    return " ".join(text.split())


# --- runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["dlrm", "wdl"])
def test_train_writes_all_it_promises(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert cli.main([*SMALL, "--model", model, "--layers", "16", "--out", str(out)]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics["models"]) == {"fused", "unfused"}
    fused, unfused = metrics["models"]["fused"], metrics["models"]["unfused"]
    assert abs(fused["auc"] - unfused["auc"]) < 0.02
    assert list(fused["phases"]) == ["data", "forward", "backward", "embedding optimizer", "dense optimizer"]
    assert all(milliseconds > 0 for milliseconds in fused["phases"].values())
    assert fused["steps"] == 9
    assert metrics["logistic_regression"]["auc"] > 0.5
    assert (out / "report.png").read_bytes()[:4] == b"\x89PNG"
    for kind in ("fused", "unfused"):
        assert load(out / kind / "checkpoint")["progress"]["finished"]
    shown = capsys.readouterr().out
    for text in (
        "logistic regression",
        "unfused",
        "fused",
        "AUC",
        "log loss",
        "ms a step",
        "s of training",
        "rows/s",
        "600 rows",
    ):
        assert text in shown
    # what comes, before anything of it; and what the columns and the ratios are
    assert shown.index("To come, in this order") < shown.index("fit 1 of 4, penalty")
    for text in ("the median of some that both made in turn", "evaluations left out", "for the embeddings alone"):
        assert text in one_line(shown)


def test_train_without_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    options = ["--no-compare", "--embedding-optimizer", "adam", "--interaction", "dot", "--max-steps", "3"]
    assert cli.main([*TINY, *options, "--out", str(out)]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    assert list(metrics["models"]) == ["fused"]
    assert metrics["models"]["fused"]["steps"] == 3
    assert metrics["settings"]["interaction"] == "dot"
    assert "logistic" not in capsys.readouterr().out


def test_train_criteo_reports_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (Path(__file__).parent / "data" / "clicks.tsv").read_text().splitlines()
    (tmp_path / "clicks.tsv").write_text("\n".join([*lines[:4], "bad line", *lines[4:]]) + "\n")
    options = [
        "--data",
        "criteo",
        "--path",
        str(tmp_path / "clicks.tsv"),
        "--buckets",
        "50",
        "--model",
        "deepfm",
        "--layers",
        "8",
    ]
    code = cli.main(["train", *options, "--batch-size", "16", "--max-steps", "2", "--out", str(tmp_path / "run")])
    shown = one_line(capsys.readouterr().out)
    assert code == 0
    # read four times, counted once
    assert "Bad lines, left out: 1. The first of them: line 5: 1 columns, 40 expected" in shown
    data = json.loads((tmp_path / "run" / "metrics.json").read_text())["data"]
    assert data["bad_lines"] == 1


def test_resume_of_a_finished_run_repeats_its_result(tmp_path: Path) -> None:
    command = [*TINY, "--out", str(tmp_path)]
    assert cli.main(command) == 0
    first = json.loads((tmp_path / "metrics.json").read_text())
    assert cli.main([*command, "--resume"]) == 0
    second = json.loads((tmp_path / "metrics.json").read_text())
    for kind in ("fused", "unfused"):
        assert first["models"][kind]["curve"] == second["models"][kind]["curve"]


def test_a_new_run_replaces_an_old_one_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*TINY, "--no-compare", "--max-steps", "2", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert cli.main([*command, "--seed", "1"]) == 0
    assert "replacing the earlier run" in capsys.readouterr().out
    assert load(tmp_path / "fused" / "checkpoint")["settings"]["seed"] == 1


def running(command: list[str], out: Path) -> subprocess.Popen[str]:
    """A run in another process, once its first checkpoint is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "embedfuse", *command], env=environment(), text=True, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    until = time.monotonic() + 120
    while not (out / "fused" / "checkpoint" / "checkpoint.json").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.05)
    return process


LONG = [*TINY, "--no-compare", "--checkpoint-every", "3", "--threads", "1", "--epochs", "12"]


@pytest.fixture(scope="module")
def whole_curve(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The learning curve of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole")
    with use_backend("cpu" if why_not("cpu", torch.device("cpu")) is None else "eager"):
        assert cli.main([*LONG, "--out", str(out)]) == 0
    return curve_of(out)


def curve_of(out: Path) -> Any:
    return json.loads((out / "metrics.json").read_text())["models"]["fused"]["curve"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on_as_if_nothing_happened(how: signal.Signals, whole_curve: Any, tmp_path: Path) -> None:
    process = running([*LONG, "--out", str(tmp_path)], tmp_path)
    process.send_signal(how)
    _, errors = process.communicate(timeout=120)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert re.search(r"stopped after step \d+; continue with --resume", errors)
        assert "Traceback" not in errors
    assert 0 < load(tmp_path / "fused" / "checkpoint")["progress"]["step"] < 108
    assert cli.main([*LONG, "--out", str(tmp_path), "--resume"]) == 0
    assert curve_of(tmp_path) == whole_curve


# --- mistakes ----------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], str]] = {
    "no path": (["--data", "criteo"], "`path` must name the file of data 'criteo', got none: give --path"),
    "no such file": (["--data", "criteo", "--path", "no.tsv"], "`path` must be a file, got 'no.tsv'"),
    "path for flights": (["--data", "flights", "--path", "x"], "`path` is of data 'criteo', got it for 'flights'"),
    "test path": (["--data", "synthetic", "--test-path", "x"], "`test_path` is of data 'criteo', got it for"),
    "buckets": (["--data", "synthetic", "--buckets", "9"], "leave it out, or give --data criteo"),
    "rows": (["--data", "flights", "--rows", "9"], "`rows` is of data 'synthetic', got it for 'flights'"),
    "out": (["--data", "synthetic", "--out", __file__], "`out` must be a folder, or be made as one, got the file"),
    "epochs": (["--data", "synthetic", "--epochs", "0"], "`epochs` must be at least 1, got 0"),
    "dropout": (["--data", "synthetic", "--dropout", "1"], "`dropout` must be in [0, 1), got 1.0"),
    "threads": (["--data", "synthetic", "--threads", "0"], "`threads` must be at least 1, got 0"),
    "device": (["--data", "synthetic", "--device", "gpu"], "`device` must be cpu, cuda or cuda:N, got 'gpu'"),
    "dim": (["--data", "synthetic", "--dim", "0"], "`dim` must be at least 1, got 0"),
    "resume": (["--data", "synthetic", "--resume"], "`--resume` needs a checkpoint, and there is none in"),
    "layers": (["--layers", "512,256"], "must be sizes joined by -, such as 512-256, got '512,256'"),
    "bottom": (["--model", "wdl", "--bottom", "8"], "`bottom` is DLRM's, got it for 'wdl'"),
    "choice": (["--data", "movies"], "'movies' is not one of"),
    "option": (["--speed", "9"], "No such option"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence_and_exit_code_2(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = MISTAKES[mistake]
    assert cli.main(["train", "--out", str(tmp_path / "run"), *options]) == 2
    shown = capsys.readouterr()
    assert message in one_line(shown.err)
    assert "Traceback" not in shown.err + shown.out
    # nothing was written, so no folder
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--device", "cuda", "--out", str(tmp_path)]) == 2
    message = one_line(capsys.readouterr().err)
    assert "got 'cuda' and torch finds 0 CUDA GPUs: use --device cpu" in message


def test_resume_with_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*TINY, "--no-compare", "--max-steps", "2", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert cli.main([*command, "--resume", "--lr", "0.5"]) == 2
    assert "learning_rate was 0.003, now 0.5" in one_line(capsys.readouterr().err)


def test_a_run_that_diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY, "--no-compare", "--lr", "1e30", "--out", str(tmp_path)]) == 2
    assert "the training has diverged, try a lower learning rate" in one_line(capsys.readouterr().err)


def test_files_with_too_few_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (Path(__file__).parent / "data" / "clicks.tsv").read_text().splitlines(keepends=True)
    command = ["train", "--data", "criteo", "--layers", "4", "--no-compare", "--buckets", "9", "--out", str(tmp_path)]
    (tmp_path / "one.tsv").write_text(lines[0])
    assert cli.main([*command, "--path", str(tmp_path / "one.tsv")]) == 2
    assert "training needs at least 2 rows in a batch, got 1" in one_line(capsys.readouterr().err)
    (tmp_path / "three.tsv").write_text("".join(lines[:3]))
    assert cli.main([*command, "--path", str(tmp_path / "three.tsv")]) == 0
    # there is nothing to test on
    assert json.loads((tmp_path / "metrics.json").read_text())["models"]["fused"]["auc"] is None
    assert "nan" in capsys.readouterr().out


def test_flights_without_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedfuse.data.flights.find_spec", lambda _name: None)
    assert cli.main(["train", "--out", str(tmp_path / "runs" / "flights")]) == 2
    assert "pip install 'embedfuse[demo]'" in one_line(capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()


def test_data_that_are_not_there_leave_an_earlier_run_alone(tmp_path: Path) -> None:
    command = [*TINY, "--no-compare", "--max-steps", "2", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert cli.main(["train", "--data", "criteo", "--path", "no.tsv", "--out", str(tmp_path)]) == 2
    assert (tmp_path / "metrics.json").exists()
    assert load(tmp_path / "fused" / "checkpoint")["progress"]["finished"]


def test_missing_extras(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    known = cli.importlib.util.find_spec
    monkeypatch.setattr(
        cli.importlib.util, "find_spec", lambda name: None if name in ("torch", "rich") else known(name)
    )
    assert cli.main(["info"]) == 2
    shown = capsys.readouterr().err
    assert "needs torch, rich, not installed here" in shown
    assert "pip install 'embedfuse[torch,cli]'" in shown


# --- the rest ----------------------------------------------------------------------------------------------------


def test_info_lists_backends_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    for text in (embedfuse.__version__, torch.__version__, "triton", "cpu", "eager", "reason if not"):
        assert text in shown


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["info", "-h"], []])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) in (0, 2)
    shown = capsys.readouterr()
    assert "Usage: embedfuse" in shown.out + shown.err


def test_python_m_and_version() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "embedfuse", "--version"], env=environment(), text=True, capture_output=True, check=True
    )
    assert result.stdout.strip() == f"embedfuse {embedfuse.__version__}"


def test_the_command_line_loads_nothing_before_it_looks() -> None:
    code = "import sys, embedfuse.cli; print(sorted({'torch', 'typer', 'rich'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], env=environment(), text=True, capture_output=True, check=True)
    assert result.stdout.strip() == "[]"
