"""`warmup` compiles all that real batches will need, and changes nothing.

What a kernel is compiled for is compared as `scripts/compile_kernels.py` notes it. Mostly kernels are not run then: the
host decides what is launched, so batches may be large although the interpreter is slow.
"""

import contextlib
import importlib.util
import itertools
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from triton_cases import DEVICE, needs_kernels, small_update

import embedfuse
from embedfuse import FeatureConfig, TableConfig
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer, Warmup, use_backend, warmup
from embedfuse.torch.backends import device_errors, launching, load, summed_runs

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_kernels.py"
SIZES = (1, 7, 300, 700, 5000, 9000, 40_000, 150_000)
pytestmark = needs_kernels
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")


def script():
    if "compile_kernels" not in sys.modules:
        spec = importlib.util.spec_from_file_location("compile_kernels", SCRIPT)
        sys.modules["compile_kernels"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["compile_kernels"])
    return sys.modules["compile_kernels"]


@contextlib.contextmanager
def recorded(run=False):
    """Notes what is launched: a dict whose keys are descriptions."""
    recorder = script().Recorder(run)
    recorder.install()
    try:
        with use_backend("triton"):
            yield recorder.launches
    finally:
        recorder.remove()


@pytest.fixture
def small(monkeypatch):
    """Limits of a few ids, so that kernels can be run on all sides of them."""
    monkeypatch.setattr(load("triton"), "_update_config", small_update)
    monkeypatch.setattr(summed_runs, "FEW", 20)


def collection(
    dims=(8, 12), *, combiners=("mean", "sum", "sqrtn"), dtypes=("float32",), rules=(), feature=None, **given
):
    """One table for each width, with a feature for each combiner."""
    options = {key: given.pop(key) for key in ("max_norm", "stochastic_rounding") if key in given}
    features = {}
    for number, (dim, dtype) in enumerate(itertools.product(dims, dtypes)):
        rule = rules[number % len(rules)] if rules else None
        table = TableConfig(50 + number, dim, dtype=dtype, name=f"t{number}", optimizer=rule, **options)
        for combiner in combiners:
            features[f"{number}{combiner}"] = FeatureConfig(table, combiner=combiner, **(feature or {}))
    return EmbeddingCollection(features, given.pop("optimizer", None), device=DEVICE, **given)


def batch(model, total, weighted=False, learned=False, ids=torch.int64, mean=3.0, seed=0):
    """About `total` ids by Zipf's law, so that some rows have long runs."""
    rng = np.random.default_rng(seed)
    names = list(model.features)
    bags = max(round(total / len(names) / mean), 1)
    made = {}
    for name in names:
        lengths = rng.poisson(mean, bags)
        lengths[0] = max(total // len(names), 1) if bags == 1 else lengths[0]
        rows = model.features[name].table.vocabulary_size
        values = torch.from_numpy(np.minimum(rng.zipf(1.3, lengths.sum()) - 1, rows - 1)).to(ids)
        weights = torch.from_numpy(rng.uniform(0.5, 2, len(values))).float() if weighted else None
        made[name] = Bags.from_lengths(values, torch.from_numpy(lengths), weights).to(DEVICE)
        if learned and weighted:
            made[name].weights.requires_grad_()
    return made


def single(model, total, ids=torch.int64):
    """The same with one id in each bag."""
    rng = np.random.default_rng(0)
    names = list(model.features)
    made = {}
    for name in names:
        rows = model.features[name].table.vocabulary_size
        values = np.minimum(rng.zipf(1.3, max(total // len(names), 1)) - 1, rows - 1)
        made[name] = torch.from_numpy(values).to(DEVICE, ids)
    return made


def train(model, optimizer, inputs, *, clipping=False, scaler=False, beside=None):
    """One step as users make it."""
    if beside is None:
        loss = sum((out.float() * (number + 1)).square().mean() for number, out in enumerate(model(inputs).values()))
    else:
        rows = model.concatenated(inputs)
        sides = [rows.new_ones(rows.shape[0], columns) for columns in beside]
        loss = torch.cat([sides[0], rows, sides[1]], 1).float().square().mean()
    scaler = torch.amp.GradScaler(DEVICE.type) if scaler else None
    (loss if scaler is None else scaler.scale(loss)).backward()
    if optimizer is None or model.update == "backward":
        return
    if clipping:
        if scaler is not None:
            scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)


def launches_of_training(
    model, optimizer, sizes=SIZES, means=(1.5, 8.0), run=False, ids=torch.int64, weights=(False, True),
    singles=(False, True), **how
):  # fmt: skip
    with recorded(run) as real:
        for total, weighted, mean in itertools.product(sizes, weights if False in singles else (), means):
            for learned in (False, True)[: 1 + weighted]:
                train(model, optimizer, batch(model, total, weighted, learned, ids, mean), **how)
        for total in sizes if True in singles else ():
            train(model, optimizer, single(model, total, ids), **how)
        with torch.no_grad():
            model(batch(model, sizes[0], ids=ids) if False in singles else single(model, sizes[0], ids))
    return set(real)


ADAGRAD = embedfuse.Adagrad(0.1)
RULES = [embedfuse.SGD(0.1), ADAGRAD, embedfuse.Adam(0.01), embedfuse.RowWiseAdagrad(0.1)]
CASES = {
    "adagrad": ({"optimizer": ADAGRAD}, {}, {}),
    "one feature": ({"dims": (24,), "combiners": ("mean",), "optimizer": ADAGRAD}, {}, {}),
    "sums": ({"combiners": ("sum",), "optimizer": "sgd"}, {}, {}),
    "float16": ({"dtypes": ("float16",), "optimizer": embedfuse.Adam(0.01)}, {}, {}),
    "two types": ({"dtypes": ("float32", "bfloat16"), "optimizer": ADAGRAD}, {}, {}),
    "two types, narrow": ({"dtypes": ("float32", "float16"), "dims": (7,), "optimizer": "ftrl"}, {}, {}),
    "several rules": ({"dims": (4, 6, 9, 70), "rules": RULES}, {}, {}),
    "int32": ({"optimizer": ADAGRAD}, {"ids": torch.int32}, {"ids": torch.int32}),
    "no check": ({"optimizer": ADAGRAD, "out_of_range": "drop"}, {}, {}),
    "max norm": ({"optimizer": ADAGRAD, "max_norm": 0.5}, {}, {}),
    "at random": ({"dtypes": ("bfloat16",), "optimizer": ADAGRAD, "stochastic_rounding": True}, {}, {}),
    "momentum": ({"optimizer": embedfuse.AdagradMomentum(0.1)}, {}, {}),
    "backward": ({"optimizer": embedfuse.AdamW(0.1), "update": "backward"}, {}, {}),
    "autograd": ({"update": "autograd"}, {}, {}),
    "autograd, max norm": ({"update": "autograd", "max_norm": 0.5}, {}, {}),
    "clipping": ({"optimizer": ADAGRAD}, {"clipping": True}, {"clipping": True}),
    "scaler": ({"optimizer": ADAGRAD, "dtypes": ("float16",)}, {"grad_scaler": True}, {"scaler": True}),
    "both": ({"optimizer": ADAGRAD}, {"clipping": True, "grad_scaler": True}, {"clipping": True, "scaler": True}),
    "beside": ({"optimizer": ADAGRAD}, {"beside": (13, 2)}, {"beside": (13, 2)}),
    "single": ({"optimizer": ADAGRAD, "dtypes": ("float32", "bfloat16")}, {"single": True}, {"singles": (True,)}),
    "single sums": ({"optimizer": ADAGRAD, "combiners": ("sum",)}, {"single": True}, {"singles": (True,)}),
    "bags": ({"optimizer": ADAGRAD}, {"single": False}, {"singles": (False,)}),
    "unweighted": ({"optimizer": ADAGRAD}, {"weights": False}, {"weights": (False,)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_batches_need_no_kernel_that_warmup_did_not_make(name):
    options, wanted, how = CASES[name]
    model = collection(**options)
    optimizer = None if model.update == "autograd" else FusedOptimizer(model)
    with recorded() as warm:
        warmup(model, optimizer, **wanted)
    real = launches_of_training(model, optimizer, **how)
    assert real
    assert not real - set(warm)
    # nor is any of them in vain
    assert not set(warm) - real


def test_several_batches_to_a_step_need_none_either():
    model = collection(optimizer=ADAGRAD)
    optimizer = FusedOptimizer(model)
    with recorded() as warm:
        warmup(model, weights=False)
    with recorded() as real:
        for total, mean in itertools.product(SIZES, (1.5, 8.0)):
            # of several sizes
            model.concatenated(batch(model, 2 * total, mean=mean)).square().sum().backward()
            train(model, optimizer, batch(model, total, mean=mean))
        for total in SIZES:
            train(model, optimizer, single(model, total))
    assert set(real) == set(warm)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_tables_are_no_surprise(frozen):
    model = collection(optimizer=ADAGRAD)
    model.tables[f"t{frozen}"].requires_grad_(False)
    optimizer = FusedOptimizer(model)
    with recorded() as warm:
        warmup(model)
    assert launches_of_training(model, optimizer) == set(warm)


RUN = {
    "default": {"optimizer": ADAGRAD, "feature": {"default_id": 3}, "dims": (4,)},
    "one by one": {"optimizer": embedfuse.Adagrad(0.1, use_gradient_accumulation=False), "dims": (4,)},
    "all rows": {"optimizer": embedfuse.Adam(0.01, lazy_adam=False, bias_correction=True), "dims": (4,)},
    "all rows, float16": {"optimizer": embedfuse.Adam(0.01, lazy_adam=False), "dims": (6,), "dtypes": ("float16",)},
    "sparse": {"update": "autograd", "grad": "sparse", "dims": (4, 3)},
    "sparse, max norm": {"update": "autograd", "grad": "sparse", "dims": (4,), "max_norm": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", RUN)
def test_steps_that_read_what_kernels_wrote(name, small):
    model = collection(combiners=("mean",), **RUN[name])
    optimizer = None if model.update == "autograd" else FusedOptimizer(model)
    with recorded(run=True) as warm:
        warmup(model, optimizer)
    real = launches_of_training(model, optimizer, sizes=(12,), means=(3.0,), run=True)
    assert not real - set(warm)


def test_sequences_and_places():
    table = TableConfig(50, 8, name="t")
    features = {"s": FeatureConfig(table, max_sequence_length=5), "p": FeatureConfig(table, output_shape=(2, 3))}
    for chosen in (features, {"s": features["s"]}, {"p": features["p"]}):
        model = EmbeddingCollection(chosen, ADAGRAD, device=DEVICE)
        optimizer = FusedOptimizer(model)
        with recorded() as warm:
            warmup(model)
        with recorded() as real:
            for bags, length in ((6, 1), (3, 2), (6, 100), (6, 1500), (2, 3000)):
                for inputs in (Bags.from_lists([[1] * length] * bags, device=DEVICE),):
                    train(model, optimizer, dict.fromkeys(chosen, inputs))
        assert real
        assert not set(real) - set(warm)


def test_rows_beyond_int32_have_keys_of_their_own():
    model = collection(optimizer=ADAGRAD)
    optimizer = FusedOptimizer(model)
    model._groups[0].arena.shapes[0] = (2**31, 8)
    with recorded() as warm:
        warmup(model, optimizer)
    found = [description for description in map(script().json.loads, warm) if description[1] == "key_kernel"]
    assert found
    for description in found:
        assert description[2][6] == "torch.int64"
        assert "wide" in description[3]


# --- what stays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update, policy", [("step", "raise"), ("backward", "drop"), ("autograd", "raise")])
def test_nothing_changes(update, policy, small):
    calls = []

    def rate():
        calls.append(1)
        return 0.1

    def made():
        torch.manual_seed(3)
        rules = [embedfuse.Adam(rate), embedfuse.Adagrad(0.1)] if update != "autograd" else ()
        model = collection((4, 6), combiners=("mean",), rules=rules, update=update, out_of_range=policy)
        return model, None if update == "autograd" else FusedOptimizer(model)

    def facts_of(ledger):
        return set(ledger.waiting), set(ledger.current), ledger.warned, ledger.optimizer(), len(ledger.records)

    def parts(model, optimizer):
        ledger = model._ledger
        state = {} if optimizer is None else optimizer.state_dict()["state"]
        slots = {f"{name} {slot}": value for name, mine in state.items() for slot, value in mine.items()}
        grads = {f"{name} grad": table.grad for name, table in model.tables.items() if table.grad is not None}
        tables = dict(model.tables.items())
        records = {f"record {n}": record.grad for n, record in enumerate(ledger.records)}
        tensors = {**tables, **slots, **grads, **records, "random": torch.get_rng_state()}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    model, optimizer = made()
    twin, twins_optimizer = made()
    with use_backend("triton"):
        for one, its in ((model, optimizer), (twin, twins_optimizer)):
            train(one, its, batch(one, 8))
            # this one's gradient waits
            if update != "backward":
                one.concatenated(batch(one, 8, seed=1)).sum().backward()
        before, facts, asked = parts(model, optimizer), facts_of(model._ledger), len(calls)
        assert warmup(model, optimizer, weights=True, clipping=True).seconds > 0
        assert len(calls) == asked
        after = parts(model, optimizer)
        assert facts == facts_of(model._ledger)
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert torch.equal(value, after[name]), name
        for one, its in ((model, optimizer), (twin, twins_optimizer)):
            if update == "step":
                its.step()
            train(one, its, batch(one, 8, seed=2))
        after, expected = parts(model, optimizer), parts(twin, twins_optimizer)
        assert after.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(value, after[name]), name


def test_tables_on_a_cpu_have_nothing_to_compile(monkeypatch):
    monkeypatch.setattr(sys.modules["embedfuse.torch.warmup"], "_double", None)
    model = EmbeddingCollection({"f": FeatureConfig(TableConfig(9, 4))}, "sgd")
    with use_backend("cpu"):
        done = warmup(torch.nn.Sequential(model), FusedOptimizer(model))
    assert done.kernels == 0 and done.seconds < 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_the_caller_do_not_matter(mode):
    model = collection(optimizer=ADAGRAD)
    FusedOptimizer(model)
    with recorded() as plain:
        warmup(model)
    with recorded() as inside, mode():
        warmup(model)
    assert set(plain) == set(inside)


def test_without_an_optimizer_lookups_only():
    model = collection(optimizer=ADAGRAD)
    with recorded() as found:
        warmup(model)
    names = {script().json.loads(text)[1] for text in found}
    assert names == {"join_offsets_kernel", "pooled_short_kernel", "pooled_long_kernel"}


def test_the_optimizer_is_found_in_a_model_of_several():
    model = torch.nn.ModuleList([collection(dims=(4,)), torch.nn.Linear(2, 2), collection(dims=(20,))])
    optimizer = FusedOptimizer(model, default=ADAGRAD)
    with recorded() as found:
        warmup(model)
    with recorded() as given:
        warmup(model, optimizer)
    assert set(found) == set(given)
    stepped = [script().json.loads(text) for text in found if "segments_kernel" in text]
    assert {description[5]["BLOCK_D"] for description in stepped} == {4, 32}


def test_refusals():
    model = collection(optimizer=ADAGRAD)
    with pytest.raises(ValueError, match="`model` must contain at least one EmbeddingCollection"):
        warmup(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"`ids` must be torch.int32 or torch.int64"):
        warmup(model, ids=torch.float32)
    with pytest.raises(ValueError, match="`optimizer` must step the tables of `model`"):
        warmup(model, FusedOptimizer(collection(optimizer=ADAGRAD)))


def test_what_it_says():
    assert str(Warmup(14, 21.34)) == "14 kernels in 21.3 s"


# --- on a GPU ------------------------------------------------------------------------------------------------------


def compiled(function):
    """How many kernels Triton compiles meanwhile, or finds on disk."""
    counts = []
    for run in (lambda: None, function):
        run()
        torch.cuda.synchronize()
        kernels = {launcher.kernel for launcher in launching._launchers.values()}
        counts.append(sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()))
    return counts[1] - counts[0]


@pytest.mark.parametrize("update", ["step", "backward", "autograd"])
@pytest.mark.parametrize("total", [5, 700, 20_000])
@pytest.mark.gpu
@needs_gpu
def test_the_first_step_does_not_wait_for_a_compiler(total, update):
    dims = {"step": (44, 52), "backward": (36, 76), "autograd": (28, 20)}[update]
    model = collection(dims, optimizer=None if update == "autograd" else ADAGRAD, update=update)
    optimizer = None if update == "autograd" else FusedOptimizer(model)
    warmup(model, optimizer)
    assert warmup(model, optimizer).kernels == 0
    inputs = batch(model, total, weighted=True, learned=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    assert compiled(lambda: train(model, optimizer, inputs)) == 0
    assert time.perf_counter() - start < 0.3


@pytest.mark.gpu
@needs_gpu
def test_reports_of_bad_ids_wait():
    model = collection(optimizer=ADAGRAD)
    FusedOptimizer(model)
    inputs = batch(model, 20)
    name = next(iter(inputs))
    inputs[name] = Bags.from_lists([[10**6]] * len(inputs[name]), device=DEVICE)
    with torch.no_grad():
        model(inputs)
    torch.cuda.synchronize()
    warmup(model)
    with pytest.raises(device_errors.LateBadId):
        device_errors.report(DEVICE, wait=True)
    warmup(model)
    device_errors.report(DEVICE, wait=True)
