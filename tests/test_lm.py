"""`embedfuse lm`: its text, its models, what a run writes, and what it says of mistakes."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedfuse import cli
from embedfuse.data.python_text import LEAST, Text, TextFacts, is_held_out, load_installed_text, load_stdlib_text
from embedfuse.data.schema import DataError
from embedfuse.models.byte_lm import ByteShape
from embedfuse.torch import use_backend
from embedfuse.torch.memory import ProductKeyMemory
from embedfuse.training.lm import run_language
from embedfuse.training.lm_loop import LanguageReport, LanguageTrainer
from embedfuse.training.lm_model import KINDS, make_model, rate_factor
from embedfuse.training.lm_settings import PRESETS, LanguageSettings

TINY: dict[str, Any] = {
    "steps": 6, "batch_size": 2, "context": 16, "dim": 16, "layers": 2, "heads": 2, "num_keys": 8, "topk": 4,
    "windows": 8, "evaluations": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick_backend() -> Any:
    with use_backend("cpu"):
        yield


@pytest.fixture(scope="module")
def text() -> Text:
    return load_stdlib_text()


class Quiet:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.reports: list[LanguageReport] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def begin(self, title: str, steps: int | None) -> None:
        self.lines.append(title)

    def progress(self, report: LanguageReport) -> None:
        self.reports.append(report)

    def end(self) -> None:
        self.lines.append("end")


# --- the text ------------------------------------------------------------------------------------------------------


def test_the_standard_library_is_there(text: Text) -> None:
    facts = text.facts
    assert facts.train_bytes == len(text.train) > 10 * LEAST and facts.held_out_bytes == len(text.held_out) > LEAST
    assert b"class OrderedDict(dict):" in text.train.tobytes() + text.held_out.tobytes()
    assert 0.02 < facts.held_out_files / facts.train_files < 0.3
    assert facts.describe()["source"].startswith("the standard library of Python 3")


def test_names_decide_what_is_held_out(tmp_path: Path) -> None:
    names = [f"m{number}.py" for number in range(40)]
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_bytes(b"left out" * LEAST)
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * LEAST)
    found = load_stdlib_text(tmp_path)
    held_out = {name for name in names if is_held_out(name)}
    # the same on every machine
    assert held_out == {
        "m4.py",
        "m6.py",
        "m13.py",
        "m25.py",
        "m30.py",
        "m32.py",
        "m34.py",
    } and found.facts.held_out_files == len(held_out)
    assert b"left out" not in found.train.tobytes() and b"m13.py" not in found.train.tobytes()
    assert b"m13.py" in found.held_out.tobytes()
    with pytest.raises(DataError, match="must hold text of at least 20,000 bytes to train on"):
        load_stdlib_text(tmp_path / "test")


def test_a_file_of_installed_packages_is_read_once(tmp_path: Path) -> None:
    names = ["m0.py", "m4.py", "sub/m5.py", "pip/m7.py", "_vendor/m8.py", "tests/m9.py"]
    for folder in ("stdlib", "packages"):
        for name in names:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(name.encode() * LEAST)
    (tmp_path / "packages" / "m6.py").write_bytes(b"another" * LEAST)
    found = load_installed_text([tmp_path / "stdlib", tmp_path / "packages"])
    assert [is_held_out(name) for name in ("m0.py", "m4.py", "sub/m5.py", "m6.py")] == [False, True, False, True]
    assert (found.facts.train_files, found.facts.held_out_files) == (2, 2)
    assert found.train.tobytes() == b"m0.py" * LEAST + b"\0" + b"sub/m5.py" * LEAST + b"\0"
    assert found.held_out.tobytes() == b"m4.py" * LEAST + b"\0" + b"another" * LEAST + b"\0"


def test_batches_depend_on_seed_and_step_alone() -> None:
    made = Text(np.arange(200, dtype=np.uint8), np.arange(50, dtype=np.uint8), TextFacts("", 1, 200, 1, 50))
    batch = made.batch(3, 10, 0, 5)
    assert batch.shape == (3, 11) and (np.diff(batch) == 1).all()
    assert (batch == made.batch(3, 10, 0, 5)).all() and (batch != made.batch(3, 10, 0, 6)).any()
    assert (batch != made.batch(3, 10, 1, 5)).any()
    windows = made.held_out_windows(100, 12)
    assert windows[:, 0].tolist() == [0, 12, 24, 36] and made.held_out_windows(2, 12)[:, 0].tolist() == [0, 36]


# --- the models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_models_do_not_look_ahead(kind: Any) -> None:
    model = make_model(kind, LanguageSettings(**TINY)).eval()
    ids = torch.randint(0, 256, (2, 16))
    other = ids.clone()
    other[:, 9:] = torch.randint(0, 256, (2, 7))
    a, b = model(ids), model(other)
    assert a.shape == (2, 16, 256)
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_memory_does_no_more_work(preset: str) -> None:
    settings = LanguageSettings(**{**PRESETS[preset], "device": "cpu", "layers": 1})
    plain, memory = (make_model(kind, settings) for kind in KINDS)
    assert memory.flops_per_token(64) <= plain.flops_per_token(64)


def test_only_one_block_differs() -> None:
    plain, memory = (make_model(kind, LanguageSettings(**TINY)) for kind in KINDS)
    others = dict(memory.named_parameters())
    for name, value in plain.named_parameters():
        if name.startswith("layers.1.feed_forward."):
            assert name not in others
        else:
            assert torch.equal(value, others[name])
    assert isinstance(memory.layers[1].feed_forward, ProductKeyMemory)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="`dim` must be a multiple of twice the heads, 8, got 12"):
        ByteShape(dim=12)


def test_the_rate_rises_and_falls() -> None:
    rates = [rate_factor(step, 100) for step in range(100)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0] and max(rates) == 1.0
    assert all(later <= earlier for earlier, later in pairwise(rates[5:]))
    assert 0.1 <= rates[-1] < 0.11 and rate_factor(0, 1) == 1.0


# --- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_writes_all_it_promises(text: Text, tmp_path: Path) -> None:
    screen = Quiet()
    metrics = run_language(LanguageSettings(**TINY), tmp_path / "run", screen, text)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == metrics
    assert (tmp_path / "run" / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"metrics.json", "report.png"}
    assert list(metrics["models"]) == list(KINDS)
    for model in metrics["models"].values():
        assert 1 < model["bits_per_byte"] < 9 and [point["step"] for point in model["curve"]] == [3, 6]
    use = metrics["models"]["memory"]["usage"]
    assert use["num_slots"] == 64 and 0 < use["top1_used"] <= use["used"] <= 1
    assert metrics["models"]["feed-forward"]["usage"] is None
    assert "FLOPs for each byte" in screen.lines[1] and screen.lines[2:] == ["feed-forward", "end", "memory", "end"]
    assert [report.step for report in screen.reports if report.bits is not None] == [3, 6, 3, 6]


def test_equal_seeds_give_equal_runs(text: Text) -> None:
    settings = LanguageSettings(**TINY)
    runs = [LanguageTrainer("memory", text, settings, lambda report: None) for _ in range(2)]
    before = [value.detach().clone() for value in runs[0].model.parameters()]
    bits = [run.train()[0].bits_per_byte for run in runs]
    assert bits[0] == bits[1]
    # all parameters learn, the memory's rows among them
    for old, new in zip(before, runs[0].model.parameters(), strict=True):
        assert not torch.equal(old, new)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    sizes = ["--steps", "4", "--batch-size", "2", "--context", "16", "--dim", "16", "--layers", "2", "--topk", "4"]
    assert cli.main(["lm", *sizes, "--num-keys", "8", "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("standard library of Python", "held out", "FLOPs for each byte", "bits per byte", "rows read", "Gini"):
        assert part in shown
    assert json.loads((out / "metrics.json").read_text())["settings"]["num_keys"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "`steps` must be at least 1, got 0"),
        (["--dim", "12"], "`dim` must be a multiple of twice the heads, 8, got 12"),
        (["--memory-layer", "9"], "`memory_layer` must be from 0 to 3, got 9"),
        (["--topk", "200"], "`topk` must be at most `num_keys`"),
        (["--device", "tpu"], "`device` must be cpu, cuda or cuda:N, got 'tpu'"),
        (["--text", "poems"], "Invalid value for '--text'"),
        (["--threads", "0"], "`threads` must be at least 1, got 0"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lm", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err


def test_stopping_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LanguageTrainer, "train", stop)
    assert cli.main(["lm", "--out", str(tmp_path / "run")]) == 130
    assert "stopped" in capsys.readouterr().err and not (tmp_path / "run").exists()
