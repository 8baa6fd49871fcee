"""What the tests of the benchmarks share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from embedfuse.bench import (
    cases,
    runner,
)
from embedfuse.torch import use_backend
from embedfuse.torch.backends import why_not

CPU = torch.device("cpu")
SMALL = cases.Case("small", (40, 30, 9), (8, 4, 12), 6, ((1, 5), (2, 2), (1, 9)))
needs_engine = pytest.mark.skipif(why_not("cpu", CPU) is not None, reason="the C++ engine is not built")


@pytest.fixture(autouse=True)
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fastest backend of this machine, and wide tables on the screen."""
    # tables that are not broken into narrow columns
    monkeypatch.setenv("COLUMNS", "200")
    with use_backend("cpu" if why_not("cpu", CPU) is None else "eager"):
        yield


def options(**changes: Any) -> runner.Options:
    """Of a quick run."""
    given = {"suite": "cpu", "device": CPU, "threads": (1,), "scale": 0.004, "rounds": 2, "say": lambda _: None}
    return runner.Options(**{**given, **changes})
