"""What all tests share: seeds, poisoned fresh memory, and the backends and devices of this machine."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tolerance
import torch

# without a GPU the kernels run in Triton's interpreter, which must be known before anything imports Triton
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from embedfuse.torch.backends import Backend, load, use_backend, why_not

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HAS_GPU = torch.cuda.is_available()
ON_GPU = _HAS_GPU and not INTERPRETED
PLACEMENTS = [
    ("eager", "cpu"),
    ("cpu", "cpu"),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu) if ON_GPU else ("triton", "cpu"),
    *([pytest.param(("eager", "cuda"), marks=pytest.mark.gpu)] if _HAS_GPU else []),
]
"""Every backend with the device it is tried on."""


@pytest.fixture(params=PLACEMENTS, ids=lambda placement: "-".join(placement))
def placement(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A backend that serves this machine, and a device."""
    name, device = request.param
    reason = why_not(name, torch.device(device))
    if reason:
        pytest.skip(f"{name} on {device}: {reason}")
    return name, device


@pytest.fixture
def backend(placement: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Each backend in turn."""
    if placement[0] == "triton" and INTERPRETED:
        # Triton's interpreter (3.9) cuts float32 off to bfloat16, where a GPU rounds
        monkeypatch.setitem(tolerance.UNIT, "bfloat16", 2 * tolerance.UNIT["bfloat16"])
    return load(placement[0])


@pytest.fixture
def device(placement: tuple[str, str]) -> str:
    """The device of `backend`."""
    return placement[1]


@pytest.fixture
def place(placement: tuple[str, str]) -> Iterator[str]:
    """A device, with each backend in turn chosen for the whole test."""
    with use_backend(placement[0]):  # type: ignore[arg-type]
        yield placement[1]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """`torch.compile` without the graphs of other tests, of which it keeps a few for each function, or of yesterday."""
    # here, since they take seconds
    import torch._dynamo
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def interpreted(placement: tuple[str, str]) -> bool:
    """Whether kernels run in Triton's interpreter, thousands of times slower: give it small work."""
    return placement[0] == "triton" and INTERPRETED


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only cost time in tests this small; those that are about threads set their own number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, but fresh memory holds NaN, or the largest integer, instead of whatever was there."""

    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = make(*args, **kwargs)
        if torch.compiler.is_compiling() or out.is_meta or out.is_sparse or out.is_quantized or out.is_nested:
            return out
        with torch.no_grad():
            if out.is_floating_point() or out.is_complex():
                out.fill_(torch.nan)
            elif out.dtype != torch.bool:
                out.fill_(torch.iinfo(out.dtype).max)
        return out

    return wrapper


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An output that a kernel forgets to write shows up as NaN; not where launches are counted."""
    if request.node.get_closest_marker("plain_memory"):
        yield
        return
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of kernels run on the GPU where there is one, so there they need it."""
    if ON_GPU:
        for item in items:
            if item.path.name.startswith("test_triton_") or item.path.name == "test_optim_rules.py":
                item.add_marker(pytest.mark.gpu)
