"""Cases of the benchmarks, their batches, the providers, and the check before anything is timed."""

import dataclasses
import math
import statistics
from typing import Any

import pytest
import torch
from bench_helpers import (
    CPU,
    SMALL,
    options,
    quick_backend,  # noqa: F401 (a fixture for all tests here)
)
from cases import BENCHMARKS
from torch import Tensor

from embedfuse.bench import (
    batches,
    cases,
    checking,
    models,
    providers,
    report,
    runner,
    timing,
)
from embedfuse.bench.providers import ours


def test_names_of_cases_are_unique_and_shared_with_the_tests() -> None:
    for suite in cases.SUITES.values():
        names = [case.name for case in suite]
        assert len(set(names)) == len(names)
    engine = {case.name: case for case in cases.ENGINE}
    shared = engine.keys() & BENCHMARKS.keys()
    assert {"ten_tables", "single_ids", "long_bags", "memory_layer", "fbgemm_default", "tiny"} <= shared
    for name in shared:
        mine, theirs = engine[name], BENCHMARKS[name]
        assert list(zip(mine.rows, mine.dims, strict=True)) == list(theirs.tables)
        assert mine.bags == theirs.bags
        assert {statistics.mean(lengths) for lengths in mine.lengths} == {statistics.mean(theirs.lengths)}


def test_the_suite_has_what_it_promises() -> None:
    engine = {case.name: case for case in cases.ENGINE}
    assert (
        sum(name.removesuffix("_zipf") in ("ten_tables", "single_ids", "long_bags", "memory_layer") for name in engine)
        == 8
    )
    dcn = engine["dcn_v2"]
    assert sum(high for _, high in dcn.lengths) == 214
    assert (len(dcn.rows), dcn.bags, set(dcn.dims), dcn.dtype) == (26, 8192, {128}, "float16")
    assert len(engine["many_tiny_tables"].rows) == 500
    assert len(engine["mixed_dims"].rows) == 66
    assert {case.optimizer for case in cases.ENGINE} == set(cases.OPTIMIZERS)
    assert {case.dtype for case in cases.ENGINE} == set(cases.DTYPES)
    assert {case.weights for case in cases.ENGINE} == {"none", "fixed", "learned"}
    assert {case.ids for case in cases.ENGINE} == {"uniform", "zipf 1.05", "zipf 1.15", "hot", "unique"}
    assert max(case.table_bytes for case in cases.ENGINE) < 24 * 2**30
    assert {case.name for case in models.MODEL_CASES} >= {"dlrm_512", "wdl_8192", "deepfm_512", "dlrm_large_8192"}


def test_choose_takes_patterns_and_knows_typing_errors() -> None:
    assert [case.name for case in cases.choose("cpu", ["cpu_ti*", "cpu_wide"])] == ["cpu_tiny", "cpu_wide"]
    assert cases.choose("cpu") == cases.CPU
    with pytest.raises(ValueError, match="`cases` must name cases of suite 'cpu', got 'tinny'"):
        cases.choose("cpu", ["tinny"])


def test_scaled_and_fitting_cases_say_so() -> None:
    small = cases.scaled(cases.ENGINE[0], 0.01)
    assert (small.bags, set(small.rows), small.dims) == (20, {10_000}, cases.ENGINE[0].dims)
    assert "scaled by 0.01" in small.describe()
    unique = cases.scaled(next(case for case in cases.ENGINE if case.ids == "unique"), 0.001)
    assert unique.rows[0] >= unique.bags * unique.lengths[0][1]
    cut = cases.fitting(SMALL, 1000)
    assert 0 < cut.table_bytes <= 1000
    assert "tables cut to" in cut.note
    assert cases.fitting(SMALL, SMALL.table_bytes) is SMALL


@pytest.mark.parametrize("kind", ["uniform", "zipf 1.05", "zipf 1.15", "hot", "unique"])
def test_ids_lie_in_their_table_and_are_spread_as_named(kind: str) -> None:
    ids = batches.draw_ids(kind, 1000, 900, torch.Generator().manual_seed(0))
    assert ids.shape == (900,)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 1000
    counts = ids.bincount(minlength=1000)
    if kind == "unique":
        assert int(counts.max()) == 1
    elif kind == "hot":
        assert int(counts[0]) >= 450
    elif kind.startswith("zipf"):
        # of 1000 rows the first has 13 % (1.05) or 18 % (1.15) of all
        assert 0.06 < int(counts.max()) / 900 < 0.3
    else:
        assert int(counts.max()) < 12


def test_bytes_are_those_that_must_move() -> None:
    case = cases.Case("one", (3,), (4,), 2, ((2, 2),), ids="hot", optimizer="adam", weights="learned")
    work = batches.draw(case, CPU)
    found = batches.count_bytes(work)
    distinct = statistics.mean(len(batch.ids.unique()) for batch in work.batches)
    assert (found.ids, found.unique) == (4, distinct)
    output, index = 2 * 4 * 4, 4 * (8 + 4)
    assert found.forward == pytest.approx(distinct * 16 + output + index)
    assert found.backward == pytest.approx(2 * distinct * 16 + 2 * distinct * 32 + output + index + 4 * 4)
    assert found.asked == 4 * 16 + output + index
    assert found.of("train") == found.forward + found.backward


NAMES = [name for name in providers.REGISTRY if name not in ("torch-compiled", "fbgemm-v2")]
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"combiner": "mean"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int32": {"index": "int32"},
    "sgd": {"optimizer": "sgd"},
    "adagrad": {"optimizer": "adagrad"},
    "adam": {"optimizer": "adam"},
    "weighted": {"weights": "fixed", "optimizer": "sgd"},
    "learned": {"weights": "learned"},
    "hot": {"ids": "hot"},
    "sequence": {"sequence": True, "lengths": ((1, 1),) * 3, "dims": (8, 8, 8)},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_every_provider_is_right(name: str, change: str) -> None:
    reason = providers.why_not(name, CPU)
    if reason:
        pytest.skip(reason)
    work = batches.draw(dataclasses.replace(SMALL, **CHANGES[change]), CPU)
    try:
        provider = providers.make(name, work, {})
    except providers.Unsupported as unsupported:
        assert name not in providers.OURS
        pytest.skip(str(unsupported))
    found = checking.wrong(provider, work, checking.expect(work))
    if found and name not in providers.OURS and work.case.dtype in runner.LOOSE:
        provider.reset()
        found = checking.wrong(provider, work, checking.expect(work, runner.LOOSE[work.case.dtype]))
    assert found is None
    provider.reset()
    assert torch.equal(provider.rows(0, torch.arange(5)).to(work.weights[0].dtype), work.weights[0][:5])
    for phase in checking.measured_phases(provider):
        timing.Job(name, phase, provider.phases[phase], work.batches, False).call(1)


class Faulty(ours.Engine):
    """Right but for one number."""

    def __init__(self, work: batches.Workload, fault: str) -> None:
        self.fault = fault
        super().__init__(work)

    def output(self, batch: batches.Batch) -> Tensor:
        out = super().output(batch)
        if self.fault == "output":
            out[1, 2] += 1e-5
        return out

    def train(self, batch: batches.Batch) -> None:
        super().train(batch)
        table = self._view(1)
        touched = batch.ids[batch.starts[1] : batch.starts[2]].unique()
        if self.fault == "row":
            table[touched[0], 0] += 1e-5
        elif self.fault == "untouched row":
            table[next(row for row in range(30) if row not in touched), 0] += 1
        elif self.fault == "NaN":
            table[touched[0], 0] = math.nan
        elif self.fault == "one step only" and batch is self.work.again:
            self.reset()
            super().train(batch)

    def weight_grad(self) -> Tensor | None:
        if self.fault == "no weight gradient":
            return None
        grad = super().weight_grad()
        if grad is not None and self.fault == "weight gradient":
            grad = grad + 1e-4
        return grad


@pytest.mark.parametrize(
    "fault",
    ["output", "row", "untouched row", "NaN", "one step only", "no weight gradient", "weight gradient"],
)
def test_what_is_wrong_is_found(fault: str) -> None:
    work = batches.draw(dataclasses.replace(SMALL, weights="learned"), CPU)
    assert checking.wrong(Faulty(work, fault), work, checking.expect(work)) is not None
    assert checking.wrong(Faulty(work, ""), work, checking.expect(work)) is None


def test_a_wrong_result_gets_no_speed_but_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    true_make = providers.make

    def make(name: str, work: batches.Workload, shared: providers.Shared) -> providers.Provider:
        return Faulty(work, "row") if name == "embedfuse-engine" else true_make(name, work, shared)

    monkeypatch.setattr(runner, "make", make)
    made = runner.run(options(cases=("cpu_wide",), providers=("embedfuse-engine", "torch")))
    found = made["cases"][0]["providers"]
    assert "wrong" in found["embedfuse-engine"]["wrong"]
    assert "phases" not in found["embedfuse-engine"]
    assert found["torch"]["phases"]["forward, 1 thread"]["wall"]["median"] > 0
    assert any("embedfuse-engine: wrong: table 1" in line for line in report.refusals(made))


def test_a_provider_that_is_missing_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = providers.importlib.util.find_spec
    monkeypatch.setattr(
        providers.importlib.util, "find_spec", lambda name: None if name == "fbgemm_gpu" else found(name)
    )
    made = runner.run(options(cases=("cpu_wide",), providers=("embedfuse", "fbgemm", "fbgemm-v2")))
    assert made["providers"]["fbgemm"]["reason"] == "fbgemm_gpu is not installed"
    assert made["providers"]["fbgemm-v2"]["reason"] == "its experimental kernels are for GPUs"
    assert list(made["cases"][0]["providers"]) == ["embedfuse"]
