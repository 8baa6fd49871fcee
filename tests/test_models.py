"""Reference models, the baseline's metrics, and the training loop: fused beside unfused, resuming, stopping."""

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedfuse import FTRL, SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from embedfuse.data import InMemoryDataset, SyntheticSize, load_synthetic
from embedfuse.data.schema import Field, Schema
from embedfuse.models import MODELS, LogisticRegression, ModelOptions, build_model
from embedfuse.models.embeddings import FusedEmbeddings, Lookup, UnfusedEmbeddings
from embedfuse.torch import Bags, load, use_backend
from embedfuse.torch.backends import why_not
from embedfuse.training import DivergedError, Interrupted, ResumeError, Settings
from embedfuse.training.baseline import PENALTIES, baseline_steps, train_baseline
from embedfuse.training.compare import load_dataset
from embedfuse.training.inputs import to_torch
from embedfuse.training.loop import Trainer
from embedfuse.training.metrics import auc, evaluate, log_loss

CPU = torch.device("cpu")
SMALL = {"dlrm": (("bottom", (16, 8)), ("top", (16,))), "deepfm": (("deep", (16, 8)), ("final", (8,))),
         "wdl": (("deep", (16, 8)),)}  # fmt: skip


# torch says this of its own sparse gradients
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


@pytest.fixture(autouse=True)
def _quick_backend() -> Iterator[None]:
    with use_backend("cpu" if why_not("cpu", CPU) is None else "eager"):
        yield


@pytest.fixture(scope="module")
def data() -> InMemoryDataset:
    return load_synthetic(SyntheticSize(rows=3000, fields=3, vocabulary_size=40, numeric=2))


def small(name: str, data: InMemoryDataset, embedding: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    return build_model(name, data.schema, ModelOptions(embedding, dim=4, shape=SMALL[name], **options))


# --- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_fused_and_unfused_models_start_equal(name: str, data: InMemoryDataset) -> None:
    fused, unfused = small(name, data, "fused"), small(name, data, "unfused")
    rows = to_torch(data.batch(data.train[:64]), CPU)
    for table, weight in fused.embeddings.weights().items():
        assert torch.equal(weight, unfused.embeddings.weights()[table])
    out = fused(rows.inputs, rows.numeric)
    assert out.shape == (64,)
    torch.testing.assert_close(out, unfused(rows.inputs, rows.numeric), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradients", ["sparse", "dense"])
@pytest.mark.parametrize("name", MODELS)
def test_fused_and_unfused_models_learn_alike(name: str, gradients: Any, data: InMemoryDataset) -> None:
    losses = {}
    for kind in ("fused", "unfused"):
        model = small(name, data, kind, gradients=gradients)
        optimizers = [model.embeddings.make_optimizer(), torch.optim.SGD(model.parameters(), lr=0.0)]
        losses[kind] = []
        for batch in list(data.train_batches(128, 0, 0))[:12]:
            rows = to_torch(batch, CPU)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(rows.inputs, rows.numeric), rows.labels)
            loss.backward()
            losses[kind].append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    np.testing.assert_allclose(losses["fused"], losses["unfused"], rtol=2e-4)
    assert losses["fused"][-1] != losses["fused"][0]


@pytest.mark.parametrize(
    "optimizer",
    [
        Adagrad(0.1),
        SGD(0.1),
        SGD(0.1, momentum=0.9),
        Adam(0.01, bias_correction=True, epsilon=1e-8),
        Adam(0.01),
        RowWiseAdagrad(0.1),
        FTRL(0.1),
        Adagrad(0.1, clipvalue=0.001),
    ],
    ids=["adagrad", "sgd", "momentum", "adam", "tf-adam", "rowwise", "ftrl", "clipped"],
)
def test_torch_form_of_every_optimizer(optimizer: Optimizer, data: InMemoryDataset) -> None:
    lookups = [Lookup(field.name, field, 3, optimizer) for field in data.schema.fields]
    parts = []
    for make in (FusedEmbeddings, UnfusedEmbeddings):
        torch.manual_seed(1)
        parts.append(make(lookups))
    optimizers = [part.make_optimizer() for part in parts]
    for batch in list(data.train_batches(64, 0, 0))[:3]:
        rows = to_torch(batch, CPU)
        for part, own in zip(parts, optimizers, strict=True):
            own.zero_grad()
            (part(rows.inputs) * torch.linspace(-1, 1, 12)).square().sum().backward()
            own.step()
    # torch's SparseAdam adds its epsilon at another place
    tolerance = 1e-4 if isinstance(optimizer, Adam) else 2e-6
    for name, weight in parts[0].weights().items():
        torch.testing.assert_close(weight, parts[1].weights()[name], rtol=2e-5, atol=tolerance)


def test_weighted_bags_are_means(data: InMemoryDataset) -> None:
    field = Field("bag", 5, ragged=True)
    bags = Bags.from_lists([[1, 1, 4], [], [2]], [[0.5, 1.0, 0.25], [], [3.0]])
    for make in (FusedEmbeddings, UnfusedEmbeddings):
        part = make([Lookup("bag", field, 2, SGD(0.1), torch.arange(10.0).view(5, 2))])
        expected = torch.tensor([[(1.5 * 2 + 0.25 * 8) / 1.75, (1.5 * 3 + 0.25 * 9) / 1.75], [0, 0], [4, 5]])
        torch.testing.assert_close(part({"bag": bags}), expected)


def test_unfused_gradients_by_table() -> None:
    fields = [Field("small", 10), Field("large", 20_000)]
    part = UnfusedEmbeddings([Lookup(field.name, field, 1, Adagrad()) for field in fields])
    assert [table.sparse for table in part.tables.values()] == [False, True]
    assert len(part.make_optimizer().param_groups) == 2
    # a dense step of Adam would move all rows
    lazy = UnfusedEmbeddings([Lookup("small", fields[0], 1, Adam())], gradients="dense")
    assert lazy.tables["small"].sparse


CRITEO_LIKE = Schema(tuple(Field(f"C{k}", 10) for k in range(1, 27)), tuple(f"I{k}" for k in range(1, 14)))


def linear_sizes(module: torch.nn.Module) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, torch.nn.Linear)]


def test_dlrm_has_the_zoos_shape() -> None:
    model: Any = build_model("dlrm", CRITEO_LIKE)
    assert {tuple(w.shape) for w in model.embeddings.weights().values()} == {(10, 16)}
    assert linear_sizes(model.bottom) == [(13, 512), (512, 256), (256, 64), (64, 16)]
    # each layer is fed the one before it, and the first the bottom's output beside all rows
    assert linear_sizes(model.top) == [(416 + 16, 512), (512, 256), (256, 1)]
    assert len(list(model.embeddings.weights())) == 26


def test_dlrm_dot_is_every_pair(data: InMemoryDataset) -> None:
    torch.manual_seed(0)
    model: Any = build_model("dlrm", data.schema, ModelOptions(dim=4, shape=(("interaction", "dot"), ("top", (8,)))))
    seen: list[torch.Tensor] = []
    model.top.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    rows = to_torch(data.batch(data.train[:8]), CPU)
    model.eval()
    model(rows.inputs, rows.numeric)
    bottom = model.bottom(rows.numeric)
    vectors = [bottom, *model.embeddings(rows.inputs).split(4, 1)]
    products = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
    torch.testing.assert_close(seen[0], torch.cat([bottom, torch.stack(products, 1)], 1))


def test_deepfm_has_the_zoos_shape_and_second_order() -> None:
    model: Any = build_model("deepfm", CRITEO_LIKE)
    assert sorted({tuple(w.shape) for w in model.embeddings.weights().values()}) == [(10, 1), (10, 16)]
    assert linear_sizes(model.deep) == [(416 + 13, 1024), (1024, 256), (256, 32)]
    assert linear_sizes(model.final) == [(1 + 16 + 32, 128), (128, 64), (64, 1)]
    seen: list[torch.Tensor] = []
    model.final.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    ids = {field.name: torch.arange(2) for field in CRITEO_LIKE.fields}
    model.eval()
    model(ids, torch.zeros(2, 13))
    rows = [model.embeddings.weights()[field.name][:2] for field in CRITEO_LIKE.fields]
    pairs = sum(rows[i] * rows[j] for i in range(26) for j in range(i))
    torch.testing.assert_close(seen[0][:, 1:17], pairs, rtol=1e-4, atol=1e-4)


def test_wdl_has_the_zoos_shape_and_optimizers() -> None:
    model: Any = build_model("wdl", CRITEO_LIKE)
    shapes = [tuple(w.shape) for w in model.embeddings.weights().values()]
    assert [shapes.count((10, dim)) for dim in (64, 128, 1)] == [18, 8, 26]
    assert linear_sizes(model.deep) == [(2176 + 13, 1024), (1024, 512), (512, 256), (256, 1)]
    optimizer = model.embeddings.make_optimizer()
    assert sorted(group["optimizer"] for group in optimizer.param_groups) == ["Adagrad", "FTRL"]
    assert {group["lr"] for group in optimizer.param_groups if group["optimizer"] == "FTRL"} == {0.2}


def test_logistic_regression_is_linear(data: InMemoryDataset) -> None:
    model = LogisticRegression(data.schema)
    rows = to_torch(data.batch(data.train[:5]), CPU)
    assert torch.equal(model(rows.inputs, rows.numeric), torch.zeros(5))
    assert all(weight.shape[1] == 1 for weight in model.embeddings.weights().values())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("other", ModelOptions(), "`name` must be one of dlrm, deepfm, wdl, got 'other'"),
        ("dlrm", ModelOptions("both"), "`embedding` must be fused or unfused"),  # type: ignore[arg-type]
        ("dlrm", ModelOptions(shape=(("interaction", "sum"),)), "`interaction` must be one of cat, dot, got 'sum'"),
    ],
)
def test_models_refuse_nonsense(name: str, options: ModelOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, CRITEO_LIKE, options)


# --- metrics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_auc_counts_pairs(ties: bool) -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        labels = (random.random(50) < 0.4).astype(np.float32)
        scores = random.integers(0, 6, 50).astype(np.float32) if ties else random.random(50).astype(np.float32)
        pairs = [(p > n) + (p == n) / 2 for p in scores[labels > 0] for n in scores[labels == 0]]
        assert auc(labels, scores) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_auc_of_one_class_and_of_nan() -> None:
    assert np.isnan(auc(np.ones(3), np.arange(3.0)))
    with pytest.raises(DivergedError, match="the training has diverged, try a lower learning rate"):
        auc(np.array([0.0, 1.0]), np.array([np.nan, 1.0]))


def test_log_loss_is_cross_entropy_and_stays_finite() -> None:
    labels, logits = np.array([0.0, 1.0, 1.0]), np.array([-3.0, 0.5, 2.0])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(labels))
    assert log_loss(labels, logits) == pytest.approx(float(expected), rel=1e-12)
    assert log_loss(np.array([0.0]), np.array([800.0])) == 800.0


def test_evaluate_changes_nothing(data: InMemoryDataset) -> None:
    model = small("dlrm", data, "fused")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quality = evaluate(model, data.test_batches(100), CPU)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert quality == evaluate(model, data.test_batches(37), CPU) or abs(quality.auc - 0.5) < 0.2


# --- training ----------------------------------------------------------------------------------------------------


def settings(**changes: Any) -> Settings:
    return dataclasses.replace(
        Settings(
            data="synthetic", rows=3000, batch_size=64, dim=4, epochs=2, learning_rate=0.01, dropout=0.2,
            checkpoint_every=25, evaluations=3,
        ),
        **changes,
    )  # fmt: skip


def trainer(kind: Any, chosen: Settings, folder: Path, watch: Any = None) -> Trainer:
    torch.manual_seed(chosen.seed)
    data = load_dataset(chosen)
    options = ModelOptions(kind, chosen.table_optimizer, chosen.dim, chosen.dropout, shape=SMALL[chosen.model])
    return Trainer(build_model(chosen.model, data.schema, options), data, chosen, folder, watch)


def state_of(run: Trainer) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value.clone() for name, value in run.model.state_dict().items()}
    for kind, optimizer in run.optimizers.items():
        for path, value in flat(optimizer.state_dict()):
            found[f"{kind}{path}"] = value.clone()
    return found


def flat(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from flat(item, f"{path}.{number}")


@pytest.mark.parametrize("kind", ["fused", "unfused"])
@pytest.mark.parametrize("model", ["dlrm", "wdl"])
def test_resuming_is_bit_identical(model: str, kind: str, tmp_path: Path) -> None:
    chosen = settings(model=model)
    straight = trainer(kind, chosen, tmp_path / "straight")
    straight.train()

    def stop_at_53(report: Any) -> None:
        if report.step >= 53:
            raise KeyboardInterrupt

    broken = trainer(kind, chosen, tmp_path / "broken", stop_at_53)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    torch.manual_seed(12345)
    resumed = trainer(kind, dataclasses.replace(chosen), tmp_path / "broken")
    torch.manual_seed(54321)
    resumed.resume()
    assert resumed.parts.progress.step == 50
    resumed.train()
    first, second = state_of(straight), state_of(resumed)
    assert first.keys() == second.keys()
    assert len(first) > 20
    different = [name for name, value in first.items() if not torch.equal(value, second[name])]
    assert not different
    assert straight.parts.progress.curve == resumed.parts.progress.curve


def test_resuming_across_an_epoch_and_a_stream(tmp_path: Path) -> None:
    path = Path(__file__).parent / "data" / "clicks.tsv"
    chosen = settings(data="criteo", path=path, rows=50_000, buckets=50, batch_size=8, checkpoint_every=3, epochs=3)
    straight = trainer("fused", chosen, tmp_path / "straight")
    straight.train()

    def stop_in_second_epoch(report: Any) -> None:
        if report.step >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer("fused", chosen, tmp_path / "cut", stop_in_second_epoch).train()
    resumed = trainer("fused", chosen, tmp_path / "cut")
    resumed.resume()
    assert (resumed.parts.progress.epoch, resumed.parts.progress.position) == (1, 8)
    resumed.train()
    different = [name for name, value in state_of(straight).items() if not torch.equal(value, state_of(resumed)[name])]
    assert not different


def test_resume_refuses_other_settings(tmp_path: Path) -> None:
    chosen = settings(epochs=1, max_steps=5)
    trainer("fused", chosen, tmp_path).train()
    with pytest.raises(ResumeError, match=r"seed was 0, now 1; .*|.*seed was 0, now 1"):
        trainer("fused", dataclasses.replace(chosen, seed=1), tmp_path).resume()
    with pytest.raises(FileNotFoundError, match="must hold a checkpoint"):
        trainer("fused", chosen, tmp_path / "nothing").resume()


def test_interrupt_ends_the_step_and_saves(tmp_path: Path) -> None:
    # what is started in the background may have inherited another
    pressed, before = [], signal.getsignal(signal.SIGINT)

    def press(report: Any) -> None:
        if report.step == 20 and not pressed:
            pressed.append(report)
            signal.raise_signal(signal.SIGINT)

    run = trainer("fused", settings(checkpoint_every=0), tmp_path, press)
    with pytest.raises(Interrupted, match=r"stopped after step 2[01]; continue with --resume"):
        run.train()
    assert load(tmp_path / "checkpoint")["progress"]["step"] in (20, 21)
    assert signal.getsignal(signal.SIGINT) is before


def test_learning_rates_fall_to_zero(tmp_path: Path) -> None:
    run = trainer("fused", settings(max_steps=10), tmp_path)
    run.train()
    for optimizer, start in ((run.optimizers["dense"], 0.01), (run.optimizers["embeddings"], 0.05)):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * start)
    constant = trainer("fused", settings(max_steps=10, schedule="constant"), tmp_path)
    constant.train()
    assert constant.optimizers["dense"].param_groups[0]["lr"] == 0.01


def test_a_run_learns_what_was_planted(tmp_path: Path) -> None:
    chosen = settings(dropout=0.0)
    data = load_synthetic(SyntheticSize(rows=7000, fields=3, vocabulary_size=40, numeric=2))
    moves: list[int] = []
    baseline = train_baseline(data, chosen, lambda _text: None, moves.append)
    quality = Trainer(small("dlrm", data, "fused"), data, chosen, tmp_path).train()
    # the product that is planted is not linear
    assert quality.auc > baseline.auc + 0.02 > 0.6
    assert quality.log_loss < baseline.log_loss
    assert baseline.penalty in PENALTIES and moves == sorted(moves) and moves[-1] == baseline_steps(data, chosen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "`epochs` must be at least 1, got 0"),
        ({"model": "gbdt"}, "`model` must be one of dlrm, deepfm, wdl, got 'gbdt'"),
        ({"embedding_optimizer": "lamb"}, "`embedding_optimizer` must be one of adagrad, "),
        ({"data": "criteo"}, "`path` must name the file of data 'criteo'"),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\), got 1.0"),
        ({"model": "wdl", "interaction": "dot"}, "`interaction` is DLRM's, got it for 'wdl'"),
    ],
)
def test_settings_refuse_nonsense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_settings_are_json() -> None:
    assert json.loads(json.dumps(settings().describe()))["model"] == "dlrm"
