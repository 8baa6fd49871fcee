"""Compiles the Triton kernels for a GPU on a machine without one, just as tests launch them in the interpreter.

The interpreter takes code that a compiler refuses, and Triton's releases differ in what they refuse. So:

    python scripts/compile_kernels.py record launches.json tests/test_ops.py tests/test_triton_updates.py -k triton
    python scripts/compile_kernels.py check launches.json [--capability 90] [--kernels segments_kernel,long_kernel]
    python scripts/compile_kernels.py sweep launches.json [--capability 90] [--python other/bin/python] [--dims 64 …]

`record` runs pytest with those arguments and notes every distinct launch: kernel, types, classes of numbers, constants.
`check` needs Triton and NumPy only, of any version, e.g. in an environment of its own with the one that GPUs have.
`sweep` notes what `embedfuse.torch.warmup` launches for tables of each width, type and optimizer, without running it,
and then checks it, in `--python` if that is given.
"""

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

TYPES = {
    "torch.float32": "*fp32", "torch.float16": "*fp16", "torch.bfloat16": "*bf16", "torch.float64": "*fp64",
    "torch.int64": "*i64", "torch.int32": "*i32",
}  # fmt: skip
SHARED = {80: 163, 90: 227, 100: 227}
"""KiB of shared memory that a program may have, by capability; 99 on others."""


DIMS = (1, 2, 3, 4, 5, 7, 8, 16, 24, 32, 48, 63, 64, 100, 128, 144, 256, 288, 512, 768, 1024, 2048, 4096)
FEW_DIMS = (3, 64, 768, 4096)
"""Those that every optimizer is tried with, and every other setting, so that a core needs 12 minutes and not 25."""
DTYPES = ("float32", "float16", "bfloat16")


class Recorder:
    """Notes launches; also a pytest plugin.

    Args:
        run: whether they are made, too.
    """

    def __init__(self, run: bool = True) -> None:
        self.launches: dict[str, str] = {}
        self.label = ""
        self._run = run
        self._replaced: Any = None

    def pytest_runtest_setup(self, item: Any) -> None:
        self.label = item.nodeid

    def pytest_collection_finish(self) -> None:
        self.install()

    def install(self) -> None:
        """From now on every launch is noted, under `label`."""
        launching = importlib.import_module("embedfuse.torch.backends.launching")

        called, recorder = launching.Launcher.__call__, self

        def noted(self: Any, grid: Any, pointers: Any, numbers: Any, device: int, stream: Any = None) -> None:
            classes = [class_of(number) for number in numbers]
            described = describe(self.kernel, self.dtypes, classes, self.options, self.constants)
            recorder.launches.setdefault(json.dumps(described), recorder.label)
            if recorder._run:
                called(self, grid, pointers, numbers, device, stream)

        self._replaced = launching.Launcher, called
        launching.Launcher.__call__ = noted

    def remove(self) -> None:
        """Undoes `install`."""
        launcher, launcher_call = self._replaced
        launcher.__call__ = launcher_call


def class_of(number: int) -> str:
    """Triton has kernels of their own for 1, for multiples of 16, and for numbers of 64 bits."""
    if not -(2**31) <= number < 2**31:
        return "wide multiple" if number & 15 == 0 else "wide"
    return "one" if number == 1 else "any" if number & 15 else "multiple"


def describe(kernel: Any, dtypes: Any, classes: list[str], options: dict[str, int], constants: Any) -> list[Any]:
    """All that a kernel is compiled for; what it does not look at is said alike."""
    function = getattr(kernel, "fn", kernel)
    # the interpreter keeps what it was given; the compiler has it as an attribute
    said = getattr(kernel, "kwargs", None) or vars(kernel)
    blind = said.get("do_not_specialize") or ()
    numbers = [
        ("wide" if found.startswith("wide") else "any") if name in blind else found
        for name, found in zip(kernel.arg_names[len(dtypes) :], classes, strict=False)
    ]
    return [
        function.__module__, function.__name__,
        [None if dtype is None else str(dtype) for dtype in dtypes],
        numbers, options, {name: _name_of(value) for name, value in constants.items()},
    ]  # fmt: skip


def _name_of(value: Any) -> Any:
    function = getattr(value, "fn", value)
    return ["function", function.__module__, function.__qualname__] if callable(function) else value


def _value_of(named: Any) -> Any:
    if not (isinstance(named, list) and named[:1] == ["function"]):
        return named
    found: Any = importlib.import_module(named[1])
    for part in named[2].split("."):
        found = getattr(found, part)
    return found


def record(path: Path, arguments: list[str]) -> int:
    """Runs tests and writes their launches."""
    os.environ["TRITON_INTERPRET"] = "1"
    import pytest

    recorder = Recorder()
    status = pytest.main(["-q", *arguments], plugins=[recorder])
    path.write_text(json.dumps(recorder.launches, indent=0))
    print(f"{len(recorder.launches)} launches")
    return int(status)


def compile_launch(described: list[Any], capability: int) -> None:
    """Compiles one launch; raises what Triton raises, and RuntimeError for one that no GPU of the kind could run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name, tensors, numbers, options, constants = described
    kernel = getattr(importlib.import_module(module), name)
    signature: dict[str, str] = {}
    values: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, parameter in enumerate(kernel.params):
        kind = "constexpr"
        if place < len(tensors):
            if tensors[place] is None:
                values[place,] = None
            else:
                kind = TYPES[tensors[place]]
                if not parameter.do_not_specialize and not parameter.do_not_specialize_on_alignment:
                    attributes[place,] = [["tt.divisibility", 16]]
        elif place < len(tensors) + len(numbers):
            number = numbers[place - len(tensors)]
            if number == "one" and not parameter.do_not_specialize:
                values[place,] = 1
            else:
                kind = "i64" if number.startswith("wide") else "i32"
                if "multiple" in number and not parameter.do_not_specialize:
                    attributes[place,] = [["tt.divisibility", 16]]
        else:
            values[place,] = _value_of(constants[parameter.name])
        signature[parameter.name] = kind
    source = ASTSource(kernel, signature, values, attributes)
    options = {**options, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    most = 1024 * SHARED.get(capability, 99)
    if compiled.metadata.shared > most:
        raise RuntimeError(f"{compiled.metadata.shared} bytes of shared memory, of {most} that there are")


def check(path: Path, capability: int, kernels: str) -> int:
    """Compiles what was recorded; prints what fails, with one that launches it, and the time of the others."""
    from triton.errors import TritonError

    chosen = set(kernels.split(",")) if kernels else None
    failed = 0
    seconds: dict[str, list[float]] = {}
    for text, label in json.loads(path.read_text()).items():
        described = json.loads(text)
        if chosen and described[1] not in chosen:
            continue
        start = cpu_time()
        try:
            compile_launch(described, capability)
            seconds.setdefault(described[1], []).append(cpu_time() - start)
        except (RuntimeError, TritonError) as error:
            failed += 1
            print(f"{described[1]}: {str(error).splitlines()[0]}, as launched by {label}: {described[2:]}", flush=True)
    for name, each in sorted(seconds.items(), key=lambda item: -sum(item[1])):
        print(f"{name:26}{len(each):6}{sum(each):9.1f} s")
    count, total = sum(map(len, seconds.values())), sum(map(sum, seconds.values()))
    print(f"{count} compiled in {total:.1f} s of one core, {failed} failed")
    return int(failed > 0)


def cpu_time() -> float:
    """Seconds of this process and of the programs it has run, such as the assembler."""
    return sum(os.times()[:4])


def rules() -> dict[str, Any]:
    """An optimizer for each row rule there is."""
    from embedfuse import optim

    plain = {name: optimizer() for name, optimizer in optim.OPTIMIZERS.items()}
    return {
        **plain, "SGD with momentum": optim.SGD(momentum=0.9), "FTRL of another power": optim.FTRL(
            learning_rate_power=-0.3
        ), "AdagradMomentum of another exponent": optim.AdagradMomentum(exponent=3.0),
    }  # fmt: skip


def settings(
    dims: Sequence[int], dtypes: Sequence[str], optimizers: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """A label, and arguments of the table, of the collection, and of `warmup`."""
    known = rules()
    for dim, dtype in itertools.product(dims, dtypes):
        table = {"dim": dim, "dtype": dtype}
        for name in optimizers or (known if dim in FEW_DIMS else ["Adagrad"]):
            yield f"dim {dim}, {dtype}, {name}", table, {"optimizer": known[name]}, {}
        if optimizers:
            continue
        yield f"dim {dim}, {dtype}, autograd", table, {"update": "autograd"}, {}
        if dim in FEW_DIMS:
            first = {"optimizer": known["Adagrad"]}
            cut = {**table, "max_norm": 1.0}
            yield f"dim {dim}, {dtype}, max_norm", cut, first, {}
            yield f"dim {dim}, {dtype}, max_norm, autograd", cut, {"update": "autograd"}, {}
            yield f"dim {dim}, {dtype}, clipping, GradScaler", table, first, {"clipping": True, "grad_scaler": True}
            yield f"dim {dim}, {dtype}, beside", table, first, {"beside": (13, 0)}
            yield f"dim {dim}, {dtype}, int32 ids", table, first, {"ids": "int32"}
            if dtype != "float32":
                yield f"dim {dim}, {dtype}, at random", {**table, "stochastic_rounding": True}, first, {}


class _NoSort:
    """A `RadixSort` that leaves all as it lies."""

    def words(self, number: int) -> int:
        return 0

    def __call__(self, number: int, keys: Any, beside: Any, *rest: Any) -> tuple[Any, Any]:
        return keys[0], beside[0]


def sweep(path: Path, options: argparse.Namespace) -> int:
    """Notes what `warmup` launches for many tables, and checks it in another process."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from embedfuse import FeatureConfig, TableConfig
    from embedfuse.torch import EmbeddingCollection, FusedOptimizer, use_backend, warmup

    # what comes after the sort is to be seen, though there is no GPU that sorts
    importlib.import_module("embedfuse.torch.backends.sorted_runs").radix_sort = lambda bits, device: _NoSort()
    recorder = Recorder(run=False)
    recorder.install()
    some = {"both": None, "with": True, "without": False}
    weights, single = some[options.weights], some[options.single]
    for label, table, collection, more in settings(options.dims, options.dtypes, options.optimizers):
        recorder.label = label
        # one combiner divides: then all kernels have a scale, but where batches are single
        features = [FeatureConfig(TableConfig(1, **table), combiner=combiner) for combiner in options.combiners]
        with use_backend("triton"):
            model = EmbeddingCollection(features, **collection)
            optimizer = None if model.update == "autograd" else FusedOptimizer(model)
            if "ids" in more:
                more = {**more, "ids": getattr(torch, more["ids"])}
            warmup(model, optimizer, weights=weights, single=single, **more)
    recorder.remove()
    path.write_text(json.dumps(recorder.launches, indent=0))
    print(f"{len(recorder.launches)} launches", flush=True)
    command = [options.python, __file__, "check", str(path), "--capability", str(options.capability)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([*command, "--kernels", options.kernels], env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run tests, note their launches")
    recording.add_argument("path", type=Path)
    recording.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest")
    checking = actions.add_parser("check", help="compile what was noted")
    sweeping = actions.add_parser("sweep", help="note what many tables need, compile it")
    for action in (checking, sweeping):
        action.add_argument("path", type=Path)
        action.add_argument("--capability", type=int, default=90, help="of the GPU, e.g. 90 for an H200")
        action.add_argument("--kernels", default="", help="only these, with commas between")
    sweeping.add_argument("--python", default=sys.executable, help="with the Triton to compile with")
    sweeping.add_argument("--dims", type=int, nargs="+", default=DIMS)
    sweeping.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    sweeping.add_argument("--optimizers", nargs="+", default=[], help="only these, and no other settings")
    sweeping.add_argument("--combiners", nargs="+", default=["mean", "sum"], help="of one feature each")
    for name in ("--weights", "--single"):
        sweeping.add_argument(name, default="both", choices=["both", "with", "without"], help="what batches are like")
    options = parser.parse_args()
    if options.action == "record":
        return record(options.path, options.arguments)
    if options.action == "sweep":
        return sweep(options.path, options)
    return check(options.path, options.capability, options.kernels)


if __name__ == "__main__":
    sys.exit(main())
