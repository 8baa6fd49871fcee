"""What the benchmarks write and show."""

import copy
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_helpers import (
    CPU,
    options,
    quick_backend,  # noqa: F401 (a fixture for all tests here)
)
from rich.console import Console

from embedfuse import cli
from embedfuse.bench import (
    compare,
    ratios,
    reading,
    roofline,
    runner,
)
from embedfuse.torch import use_backend
from embedfuse.torch.backends import why_not


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    with use_backend("cpu" if why_not("cpu", CPU) is None else "eager"):
        runner.run(
            options(
                cases=("cpu_bags", "cpu_tiny"), providers=("embedfuse", "embedfuse-engine", "torch"),
                threads=(1, 2), out=out, command=("embedfuse", "bench"),
            )
        )  # fmt: skip
    loaded: dict[str, Any] = json.loads(out.read_text())
    # as if nothing else ran beside the tests
    for case in loaded["cases"]:
        case["load"] = 1.0
        for entry in case["providers"].values():
            for phase in [phase for phase in entry["phases"] if phase.endswith("2 threads")]:
                entry["phases"][phase] = copy.deepcopy(entry["phases"][phase.replace("2 threads", "1 thread")])
    return loaded


def test_the_json_has_what_a_reader_needs(made: dict[str, Any]) -> None:
    own = made["machine"]
    assert own["command"] == ["embedfuse", "bench"]
    for key in ("date", "processor", "cores", "python", "commit", "embedfuse"):
        assert own[key]
    assert own["versions"]["torch"] == torch.__version__
    assert made["copy bytes per second"] > 1e8
    assert all(gain > 0 for gain in made["gains of two threads"].values())
    assert made["seconds"] > 0
    case = made["cases"][0]
    assert case["bytes"]["train"] == case["bytes"]["forward"] + case["bytes"]["backward"]
    for entry in case["providers"].values():
        assert entry["wrong"] is None
        for phase in ("forward", "backward", "train"):
            for threads in ("1 thread", "2 threads"):
                sample = entry["phases"][f"{phase}, {threads}"]
                assert {"median", "q1", "q3", "samples"} <= sample["wall"].keys()
                assert sample["host"]["median"] <= sample["wall"]["median"]


def test_the_command_shows_a_json_again(
    made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(made))
    assert cli.main(["bench", "--from", str(path)]) == 0
    shown = capsys.readouterr().out
    for text in ("Providers", "forward, 1 thread", "geometric mean", "cpu_tiny", "of copy"):
        assert text in shown
    assert (tmp_path / "old.png").read_bytes()[:4] == b"\x89PNG"


def test_ratios_and_shares_are_computed_from_the_json(made: dict[str, Any]) -> None:
    own = copy.deepcopy(made)
    for case in own["cases"]:
        for name, milliseconds in (("embedfuse", 2.0), ("torch", 6.0)):
            case["providers"][name]["phases"]["train, 1 thread"]["wall"]["median"] = milliseconds
    rows = {(ours, other): found for ours, other, found in ratios.ratio_rows(own, "train, 1 thread", "wall")}
    assert [value for _, value in rows["embedfuse", "torch"]] == [3.0] * 2
    case = own["cases"][0]
    table = ratios.by_case(own)
    assert table is not None
    shown = io.StringIO()
    Console(file=shown, width=300).print(table)
    assert "3.00 / " in shown.getvalue()
    sides = {"1 thread": 3.0, "2 threads": 2.0}
    for found in own["cases"]:
        for threads, milliseconds in sides.items():
            found["providers"]["embedfuse"]["phases"][f"forward, {threads}"]["wall"]["median"] = milliseconds
    assert "embedfuse, forward: two threads are 1.50 times as fast as one" in list(ratios.scaling(own))
    own["gains of two threads"]["copy"] = 1.25
    assert "this machine, a copy: two threads are 1.25 times as fast as one" in list(ratios.scaling(own))
    own["copy bytes per second"] = case["bytes"]["train"] * 1000
    assert reading.share_of_copy(own, case, "embedfuse", "train, 1 thread") == pytest.approx(0.5)
    assert reading.geometric_mean([1, 4]) == pytest.approx(2)


def test_a_busy_machine_is_told_first_and_makes_no_ratios_of_several_threads(
    made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = copy.deepcopy(made)
    own["machine"]["cores"], own["machine"]["commit"] = 2, None
    for case in own["cases"]:
        case["load"] = 7.5
    path = tmp_path / "busy.json"
    path.write_text(json.dumps(own))
    assert cli.main(["bench", "--from", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("THE MACHINE WAS BUSY in 2 of 2 cases (load up to 7.5 on 2 cores)") < shown.index("Providers")
    assert "None" not in shown
    assert "two threads are" not in shown
    assert list(ratios.ratio_rows(own, "train, 2 threads", "wall")) == []
    assert len(list(ratios.ratio_rows(own, "train, 1 thread", "wall"))) == 2
    assert "busy" in shown and "!" in shown
    assert ratios.warning(made) is None
    # the load of the last minute does not know yet, but such times do
    own = copy.deepcopy(made)
    own["cases"][0]["providers"]["torch"]["phases"]["train, 2 threads"]["wall"]["median"] *= 6
    assert "BUSY in 1 of 2 cases (load up to 1.0 on" in str(ratios.warning(own))
    assert [len(found) for _, _, found in ratios.ratio_rows(own, "train, 2 threads", "wall")] == [1, 1]
    assert [len(found) for _, _, found in ratios.ratio_rows(own, "forward, 2 threads", "wall")] == [2, 2]


def test_labels_along_x_do_not_overlap() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for span in (2.5, 40.0, 3e5):
        figure = Figure(figsize=(4.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        axes.scatter([0.02, 0.02 * span], [1, 2])
        axes.set(xscale="log", yscale="log")
        roofline._label_few(axes, span)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        low, high = axes.get_xlim()
        boxes = [
            label.get_window_extent()
            for label, place in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True)
            if low <= place <= high and label.get_text()
        ]
        assert boxes
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_a_report_of_a_gpu_is_shown(made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = copy.deepcopy(made)
    own["machine"] |= {"device": "cuda", "cuda": "13.0", "driver": "1"}
    for case in own["cases"]:
        case["smallest graph ms"] = 1e9
        case["providers"]["fbgemm"] = copy.deepcopy(case["providers"]["torch"])
        case["providers"]["fbgemm-v2"] = copy.deepcopy(case["providers"]["torch"])
        for number, entry in enumerate(case["providers"].values()):
            phases = {name.split(", 1")[0]: own for name, own in entry["phases"].items() if name.endswith("1 thread")}
            entry["phases"] = phases
            for phase in phases.values():
                extra = {"launches": 7, "copies": 0, "peak bytes": 1e6, "kernels ms": 0.5}
                graphs = ("device", "device, cold cache", "graph, wall")
                phase |= extra | (dict.fromkeys(graphs, phase["wall"]) | {"host": phase["wall"]} if number else {})
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(own))
    assert cli.main(["bench", "--from", str(path), "--picture", str(tmp_path / "gpu.png")]) == 0
    shown = capsys.readouterr().out
    for text in ("launches", "~0.5", "better of both", "cold", "as a graph of one kernel"):
        assert text in shown
    assert (tmp_path / "gpu.png").exists()
    roofline.draw({**own, "cases": []}, tmp_path / "empty.png")


def slower(made: dict[str, Any], case: int, phase: str, factor: float) -> dict[str, Any]:
    """The report with one phase of ours so many times as slow."""
    own = copy.deepcopy(made)
    sample = own["cases"][case]["providers"]["embedfuse-engine"]["phases"][phase]["wall"]
    sample |= {key: sample[key] * factor for key in ("median", "q1", "q3", "least")}
    return own


def test_what_moved_between_revisions_is_told(made: dict[str, Any]) -> None:
    same = compare.changes([made, made], [made])
    assert len(same) > 20
    assert not any(change.moved() for change in same)
    phase = "train, 1 thread"
    found = compare.changes([made], [slower(made, 0, phase, 40), slower(made, 0, phase, 50)])
    moved = [change for change in found if change.moved()]
    assert [(change.case, change.phase, change.clock) for change in moved] == [("cpu_bags", phase, "wall")]
    assert moved[0].ratio == pytest.approx(40)
    told = list(compare.lines(found))
    assert told[0].startswith("40.00x slower: cpu_bags embedfuse-engine train, 1 thread, wall")
    assert told[-1].endswith("1 slower and 0 faster by more than 5%")
    # one run of two is not enough
    assert not any(c.moved() for c in compare.changes([made], [made, slower(made, 0, phase, 50)]))
    gone = copy.deepcopy(made)
    del gone["cases"][1]["providers"]["embedfuse"]["phases"]
    assert all("cpu_tiny embedfuse" in line and "no speed any more" in line for line in compare.lost([made], [gone]))
    with pytest.raises(ValueError, match="reports must be of one `suite`"):
        compare.changes([made], [{**made, "suite": "engine"}])
