"""Lookups keep what they work with in registers: with more than they may have, every round waits for memory once more.

On an H200 spilled registers made lookups with checked ids 10 % slower (2026-11), which no other test here can see. The
kernels are compiled for a GPU that need not be here, in a process of its own: this one may have set up Triton to
interpret.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton") if __name__ != "__main__" else __import__("triton")
DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MOST = {"plain": 16, "weighted": 48, "scaled": 16, "checked": 16, "all": 128}
"""Bytes for each thread."""


@pytest.mark.skipif(not DUMP.exists(), reason="this Triton brings no tool that reads what it compiled")
def test_lookups_spill_few_registers() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, __file__],
        check=True,
        env=environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    found = [line.rsplit(": ", 1) for line in done.stdout.splitlines()]
    assert len(found) == 30
    for what, spilled in found:
        assert int(spilled) <= MOST[what.split(", ")[0]], (what, spilled)


def spilled(kind: str, dim: int, weighted: bool, scaled: bool, checked: bool) -> int:
    """Bytes of memory that a thread of the kernel for long bags has because registers are wanting."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from embedfuse.kernels import configs
    from embedfuse.kernels.pooled_lookup import pooled_long_kernel as kernel

    config = configs.lookup_config(dim, False)
    align = 4 if kind == "float32" else 8
    constants = {
        "HAS_WEIGHTS": weighted, "NORMALISED": scaled, "CHECK": checked, "CLIPPED": False, "ALIGN": align,
        "OUT_ALIGN": align, "ROWS": config.lanes, "TURNS": config.turns,
        "GROUP": config.group, "SHORT": configs.SHORT_BAG,
        "NARROW": 1, "NARROW_ALIGN": align, "NARROW_OUT_ALIGN": align, "BLOCK_D": config.block_d,
    }  # fmt: skip
    for name, given in (("p_weights", weighted), ("p_scale", scaled), ("p_bad", checked)):
        if not given:
            constants[name] = None
    word = {"float32": "*fp32", "float16": "*fp16"}[kind]
    signature = {
        name: "constexpr" if name in constants else "i32" if name in ("bags", "width") else
        word if name in ("p_table", "p_out") else "*fp32" if name in ("p_weights", "p_scale") else "*i64"
        for name in kernel.arg_names
    }  # fmt: skip
    place = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel, signature, {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in ("p_table", "p_out", "p_ids")},
    )  # fmt: skip
    options = {"num_warps": config.warps, "maxnreg": config.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([DUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return int(re.findall(r"STACK:(\d+)", said)[0])


KINDS = {
    "plain": (False, False, False), "weighted": (True, False, False), "scaled": (False, True, False),
    "checked": (False, False, True), "all": (True, True, True),
}  # fmt: skip


if __name__ == "__main__":
    for what, given in KINDS.items():
        for kind in ("float32", "float16"):
            for dim in (32, 64, 128):
                print(f"{what}, {kind}, dim {dim}: {spilled(kind, dim, *given)}")
