"""Sources of `kernels/cuda/` compiled for the CPU: `cuda_on_cpu` gives them what a GPU would."""

import ctypes
import subprocess
from pathlib import Path

from embedfuse.kernels import configs

HERE = Path(__file__).parent / "cuda_on_cpu"
SOURCES = Path(configs.__file__).parent / "cuda"


def library(folder: Path, name: str, **constants: int) -> ctypes.CDLL:
    """`cuda_on_cpu/<name>.cpp`, whose `launch` takes arguments as CUDA's driver does."""
    made = folder / "_".join([name, *map(str, constants.values())])
    subprocess.run(
        [
            "g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-fno-gnu-unique", "-pthread", "-Wall", "-Wextra",
            "-Wno-unknown-pragmas", f"-I{SOURCES}", *(f"-D{key}={value}" for key, value in constants.items()),
            HERE / f"{name}.cpp", "-o", made,
        ],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(made))
