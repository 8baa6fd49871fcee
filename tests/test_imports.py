"""Which file may import what, and what `import embedfuse` must not load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import embedfuse.plan

ROOT = Path(embedfuse.plan.__file__).parent
FRAMEWORKS = {"torch", "jax", "tensorflow", "keras", "triton", "flax"}
CORE = {"config", "plan", "combiners", "reference", "optim"}


class Import(NamedTuple):
    """One import: in which file, of which module."""

    file: str  # "torch/ops.py"
    line: int
    module: str  # in full: "embedfuse.torch.backends"

    @property
    def top(self) -> str:
        """`torch`, `numpy`, …"""
        return self.module.split(".")[0]

    @property
    def part(self) -> str:
        """The part of this package that is imported: `optim`, `torch`, …"""
        return self.module.split(".")[1] if "." in self.module else ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def _module_of(file: Path) -> list[str]:
    return ["embedfuse", *file.relative_to(ROOT).with_suffix("").parts]


def _imports_of(file: Path) -> Iterator[Import]:
    name = str(file.relative_to(ROOT))
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else _module_of(file)[: -node.level]
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import x` may import a module x
            for alias in node.names:
                yield Import(name, node.lineno, module if node.module else f"{module}.{alias.name}")


FILES = sorted(ROOT.rglob("*.py"))
IMPORTS = [found for file in FILES for found in _imports_of(file)]


def _outside(found: Import) -> bool:
    return found.top != "embedfuse" and found.top not in sys.stdlib_module_names


def _from(*places: str) -> list[Import]:
    """The imports of those files and folders."""
    return [found for found in IMPORTS if any(found.file == p or found.file.startswith(f"{p}/") for p in places)]


def _none(wrong: list[Import]) -> None:
    assert not wrong, "\n".join(map(str, wrong))


def test_the_walk_sees_relative_absolute_and_inner_imports() -> None:
    assert len(FILES) > 10
    seen = {(found.file, found.module) for found in IMPORTS}
    assert ("plan.py", "embedfuse.combiners") in seen
    assert ("optim/adagrad.py", "embedfuse._triton") in seen
    assert ("torch/backends/__init__.py", "embedfuse.optim.base") in seen
    assert ("torch/backends/__init__.py", "torch") in seen


def test_the_core_imports_numpy_and_itself() -> None:
    core = _from(*(f"{name}.py" for name in CORE))
    assert core
    _none([found for found in core if _outside(found) and found.top != "numpy"])
    _none([found for found in core if found.top == "embedfuse" and found.part not in CORE])


def test_optimizers_import_triton_through_the_stand_in_and_nothing_else() -> None:
    optim = _from("optim")
    assert optim
    _none([found for found in optim if _outside(found)])
    _none([found for found in optim if found.top == "embedfuse" and found.part not in {"optim", "_triton"}])


def test_kernels_import_triton_through_the_stand_in_and_nothing_else() -> None:
    kernels = _from("kernels")
    assert kernels
    _none([found for found in kernels if _outside(found)])
    _none([found for found in kernels if found.top == "embedfuse" and found.part not in {"kernels", "_triton"}])


def test_only_the_stand_in_and_the_torch_backend_import_triton() -> None:
    allowed = {"_triton.py", "torch/backends/triton.py", "torch/backends/launching.py", "torch/backends/cuda_source.py"}
    _none([found for found in IMPORTS if found.top == "triton" and found.file not in allowed])


def test_the_cpu_engine_knows_no_framework() -> None:
    cpu = _from("cpu")
    _none([found for found in cpu if _outside(found) and found.top != "numpy"])
    _none([found for found in cpu if found.top == "embedfuse" and found.part not in {"cpu", "plan"}])


def test_only_what_lies_above_imports_the_torch_front() -> None:
    below = [found for found in IMPORTS if found.file.split("/")[0].removesuffix(".py") in {
        *CORE, "_triton", "kernels", "cpu", "data", "__init__",
    }]  # fmt: skip
    _none([found for found in below if found.top in FRAMEWORKS - {"triton"}])
    _none([found for found in below if found.top == "embedfuse" and found.part in {"torch", "jax", "keras", "tf"}])


def test_fronts_never_meet() -> None:
    _none([found for found in _from("torch") if found.top in {"jax", "tensorflow", "keras"}])
    _none([found for found in _from("torch") if found.top == "embedfuse" and found.part in {"jax", "keras", "tf"}])


def test_only_the_registry_imports_a_backend() -> None:
    backends = {f"embedfuse.torch.backends.{name}" for name in ("eager", "cpu", "triton")}
    wrong = [found for found in IMPORTS if found.module in backends and not found.file.startswith("torch/backends/")]
    _none(wrong)


def test_one_file_talks_to_other_processes() -> None:
    files = {found.file for found in IMPORTS if found.module.startswith("torch.distributed")}
    assert len(files) <= 1, files


def _run(code: str) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path.insert(0, {str(ROOT.parent)!r})\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("module", ["embedfuse", "embedfuse.config", "embedfuse.optim", "embedfuse.plan"])
def test_importing_the_core_loads_no_framework(module: str) -> None:
    heavy = ["torch", "jax", "tensorflow", "keras", "pandas", "pyarrow", "matplotlib", "scipy", "rich", "typer"]
    done = _run(f"import {module}\nprint([name for name in {heavy} if name in sys.modules])")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_without_triton_all_imports_and_a_rule_says_why() -> None:
    done = _run(
        "sys.modules['triton'] = None\n"
        "import embedfuse, embedfuse.optim, embedfuse.kernels.pooled_lookup\n"
        "from embedfuse.optim.adagrad import adagrad_rule\n"
        "try:\n    adagrad_rule()\nexcept NotImplementedError as error:\n    print(error)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this needs Triton")


def test_without_torch_the_front_says_so_and_the_core_works() -> None:
    done = _run(
        "sys.modules['torch'] = None\nimport embedfuse, embedfuse.optim, embedfuse.reference\n"
        "try:\n    import embedfuse.torch.backends\nexcept ImportError as error:\n    print('refused')"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr
