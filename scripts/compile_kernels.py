"""Compiles the Triton kernels for a GPU on a machine without one, just as tests launch them in the interpreter.

The interpreter takes code that a compiler refuses, and Triton's releases differ in what they refuse. So:

    python scripts/compile_kernels.py record launches.json tests/test_ops.py tests/test_triton_updates.py -k triton
    python scripts/compile_kernels.py check launches.json [--capability 90] [--kernels segments_kernel,long_kernel]

`record` runs pytest with those arguments and notes every distinct launch: kernel, types, classes of numbers, constants.
`check` needs Triton and NumPy only, of any version, e.g. in an environment of its own with the one that GPUs have.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

TYPES = {
    "torch.float32": "*fp32", "torch.float16": "*fp16", "torch.bfloat16": "*bf16", "torch.float64": "*fp64",
    "torch.int64": "*i64", "torch.int32": "*i32",
}  # fmt: skip
LAUNCHERS = ("triton", "triton_memory", "sorted_runs", "summed_runs")
"""The modules of the Triton backend that launch."""


class Recorder:
    """A pytest plugin that notes launches."""

    def __init__(self) -> None:
        self.launches: dict[str, str] = {}
        self._test = ""

    def pytest_runtest_setup(self, item: Any) -> None:
        self._test = item.nodeid

    def pytest_collection_finish(self) -> None:
        launching = importlib.import_module("embedfuse.torch.backends.launching")

        def launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, warps: int, constants: Any, *more: Any) -> None:
            function = getattr(kernel, "fn", kernel)
            described = [
                function.__module__, function.__name__,
                [None if tensor is None else str(tensor.dtype) for tensor in tensors],
                [launching._class_of(number) for number in numbers], warps,
                {name: _name_of(value) for name, value in constants.items()},
            ]  # fmt: skip
            self.launches.setdefault(json.dumps(described), self._test)
            launching.launch(kernel, grid, tensors, numbers, warps, constants, *more)

        for name in LAUNCHERS:
            module = importlib.import_module(f"embedfuse.torch.backends.{name}")
            if hasattr(module, "launch"):
                module.launch = launch  # type: ignore[attr-defined]


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
    """Compiles one launch; raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name, tensors, numbers, warps, constants = described
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
    options = {"num_warps": warps, "enable_fp_fusion": True}
    triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def check(path: Path, capability: int, kernels: str) -> int:
    """Compiles what was recorded; prints what fails, with a test that launches it."""
    chosen = set(kernels.split(",")) if kernels else None
    failed = compiled = 0
    for text, test in json.loads(path.read_text()).items():
        described = json.loads(text)
        if chosen and described[1] not in chosen:
            continue
        try:
            compile_launch(described, capability)
            compiled += 1
        except RuntimeError as error:
            failed += 1
            print(f"{described[1]}: {str(error).splitlines()[0]}, as launched by {test}: {described[2:]}", flush=True)
    print(f"{compiled} compiled, {failed} failed")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record", help="run tests, note their launches")
    recording.add_argument("path", type=Path)
    recording.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest")
    checking = actions.add_parser("check", help="compile what was noted")
    checking.add_argument("path", type=Path)
    checking.add_argument("--capability", type=int, default=90, help="of the GPU, e.g. 90 for an H200")
    checking.add_argument("--kernels", default="", help="only these, with commas between")
    options = parser.parse_args()
    if options.action == "record":
        return record(options.path, options.arguments)
    return check(options.path, options.capability, options.kernels)


if __name__ == "__main__":
    sys.exit(main())
