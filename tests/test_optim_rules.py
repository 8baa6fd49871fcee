"""The Triton form of every rule against its array form, and that it compiles for a GPU.

Runs on the GPU if there is one, else in Triton's interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

triton = pytest.importorskip("triton")

from optim_oracles import OPTIMIZERS, Case  # noqa: E402
from triton import language as tl  # noqa: E402

from embedfuse.optim import HYPER_WIDTH, Adam, Optimizer  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
KINDS = {"none": 0, "element": 1, "row": 2}
HERE = Path(__file__).parent


@triton.jit
def one_tile_kernel(
    p_w, p_g, p_s0, p_s1, p_hyper, p_step, rows, dim,
    R: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr,
    KIND0: tl.constexpr, KIND1: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """One step of `rows <= R` rows; with MIXED every row has hyper-parameters, step and dim of its own."""
    row = tl.arange(0, R)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < dim)
    o_element = row * dim + column
    w = tl.load(p_w + o_element, mask=mask, other=0.0)
    g = tl.load(p_g + o_element, mask=mask, other=0.0)
    s0 = tl.zeros_like(w)
    s1 = tl.zeros_like(w)
    if KIND0 == 1:
        s0 = tl.load(p_s0 + o_element, mask=mask, other=0.0)
    if KIND0 == 2:
        s0 = tl.load(p_s0 + row, mask=row < rows, other=0.0)
    if KIND1 == 1:
        s1 = tl.load(p_s1 + o_element, mask=mask, other=0.0)
    if MIXED:
        last = tl.minimum(row, rows - 1)
        step = tl.load(p_step + last)
        widths = dim + 0 * row
        w, s0, s1 = RULE(w, g, s0, s1, p_hyper + last * 16, step, widths, mask)
    else:
        step = tl.load(p_step)
        w, s0, s1 = RULE(w, g, s0, s1, p_hyper, step, dim, mask)
    tl.store(p_w + o_element, w, mask=mask)
    if KIND0 == 1:
        tl.store(p_s0 + o_element, s0, mask=mask)
    if KIND0 == 2:
        tl.store(p_s0 + row, s0, mask=row < rows)
    if KIND1 == 1:
        tl.store(p_s1 + o_element, s1, mask=mask)


def kinds_of(rule: type[Optimizer]) -> list[int]:
    return [KINDS[kind] for kind in (*rule.slot_kinds, "none", "none")[:2]]


def both(
    optimizer: Optimizer, hyper: np.ndarray, steps: np.ndarray, mixed: bool, dim: int = 5, fresh: int = 1
) -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """New rows and slots by the rule and by `update`, from random ones; row 0 has gradient 0, `fresh` rows no past."""
    random = np.random.default_rng(dim)
    rule, rows = optimizer.kernel_class(), 3
    w, g = (random.normal(size=(rows, dim)).astype(np.float32) for _ in range(2))
    g[0] = 0
    slots = [
        (np.abs(random.normal(size=(rows, dim if slot.per == "element" else 1))) + slot.initial).astype(np.float32)
        for slot in optimizer.slots()
    ]
    for array, slot in zip(slots, optimizer.slots(), strict=True):
        array[:fresh] = slot.initial
    on_device = [torch.from_numpy(array.copy()).to(DEVICE) for array in (w, g, *slots)]
    spare = torch.zeros(1, device=DEVICE)
    states = (*on_device[2:], spare, spare)[:2]
    p_hyper, p_step = torch.from_numpy(hyper).to(DEVICE), torch.from_numpy(steps).to(DEVICE)
    one_tile_kernel[(1,)](
        on_device[0], on_device[1], *states, p_hyper, p_step, rows, dim, 4, triton.next_power_of_2(dim), rule.rule,
        *kinds_of(rule), mixed,
    )  # fmt: skip
    h = [hyper[:, k : k + 1] for k in range(HYPER_WIDTH)] if mixed else list(hyper[0])
    step = steps[:, None] if mixed else steps[0]
    expected = rule.update(w.astype(float), g.astype(float), tuple(s.astype(float) for s in slots), h, step, np)
    return [on_device[0], *on_device[2:]], [expected[0], *expected[1]]


def assert_same(found: list[torch.Tensor], expected: list[np.ndarray], floor: float = 1e-6) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.cpu().numpy(), theirs, rtol=3e-6, atol=floor)


CASES = [case for case in OPTIMIZERS if not case.id.endswith(("_all", "_one_by_one", "_dense"))]


@pytest.mark.parametrize("dim", [1, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rule_is_update(case: Case, dim: int) -> None:
    hyper = np.array([case.optimizer.hyper(0.1)])
    assert_same(*both(case.optimizer, hyper, np.array([3]), mixed=False, dim=dim))


@pytest.mark.parametrize("name", ["adam", "adam_corrected", "adagrad_momentum_nesterov"])
def test_first_means_are_exact(name: str) -> None:
    """They are `(1 - beta) * g²`, small numbers that a float32 `1 - 0.999` would spoil."""
    optimizer = next(case.optimizer for case in CASES if case.id == name)
    found, expected = both(optimizer, np.array([optimizer.hyper(0.1)]), np.array([1]), mixed=False, fresh=3)
    assert_same(found[1:], expected[1:], floor=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rule_with_rows_of_several_tables(case: Case) -> None:
    hyper = np.array([case.optimizer.hyper(rate) for rate in (0.1, 0.05, 0.2)])
    assert_same(*both(case.optimizer, hyper, np.array([1, 100, 7]), mixed=True))


def test_both_flavours_of_adam_in_one_tile() -> None:
    flavours = Adam(0.1), Adam(0.1, bias_correction=True), Adam(0.1, 0.8, 0.9, 1e-3, sum_inside_sqrt=False)
    hyper = np.array([flavour.hyper(0.1) for flavour in flavours])
    assert_same(*both(Adam(0.1), hyper, np.array([2, 2, 2]), mixed=True))


@pytest.mark.parametrize("step", [1, 2, 50, 600, 800, 20_000, 3_000_000])
def test_bias_correction_at_any_step(step: int) -> None:
    for beta_2 in (0.999, 0.99999):
        optimizer = Adam(0.1, 0.0, beta_2, 1e-8, bias_correction=True)
        assert_same(*both(optimizer, np.array([optimizer.hyper(0.1)]), np.array([step]), mixed=False))


def test_rules_compile_for_a_gpu_that_is_not_here() -> None:
    """In a process of its own: this one may have set up Triton to interpret."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, __file__], check=True, env=environment, cwd=HERE)


def compile_rules() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    seen = set()
    for case in CASES:
        rule = case.optimizer.kernel_class()
        if rule.rule in seen:
            continue
        seen.add(rule.rule)
        for mixed in (False, True):
            kind0, kind1 = kinds_of(rule)
            constants = {"R": 4, "BLOCK": 32, "RULE": rule.rule, "KIND0": kind0, "KIND1": kind1, "MIXED": mixed}
            floats = dict.fromkeys(("p_w", "p_g", "p_s0", "p_s1"), "*fp32")
            others = {"p_hyper": "*fp64", "p_step": "*i64", "rows": "i32", "dim": "i32"}
            signature = {**floats, **others, **dict.fromkeys(constants, "constexpr")}
            source = ASTSource(fn=one_tile_kernel, signature=signature, constexprs=constants)
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(seen) >= 9


if __name__ == "__main__":
    compile_rules()
