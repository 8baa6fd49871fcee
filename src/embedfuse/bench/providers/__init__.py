"""The contestants: each module makes a `Provider` of a workload, or says why it cannot."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..batches import Batch, Workload

PHASES = ("forward", "backward", "train")
"""Forward without gradients; backward with the optimizer's step; both."""
LIBRARY_ERRORS = (
    RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError, NotImplementedError, ImportError,
    OSError, ArithmeticError, LookupError,
)  # fmt: skip
"""What other people's code raises when it cannot: recorded as a reason, and the run goes on."""

Shared = dict[str, Any]
"""What providers of one workload may leave for each other, such as tables."""


class Unsupported(Exception):
    """This provider cannot run this case; the message is the reason."""


@dataclass(frozen=True)
class Phase:
    """A call to time, and what must be there before it, made anew for each call and not timed."""

    run: Callable[[Any, Any], Any]
    prepare: Callable[[Any], Any] = lambda _batch: None


class Provider(Protocol):
    """Tables, an optimizer, and calls on the batches of one workload. All start from the workload's weights.

    Attributes:
        capturable: whether recording its calls in a CUDA graph may be tried.
        phases: of `PHASES` those it has, and perhaps more of its own.
    """

    capturable: bool
    phases: Mapping[str, Phase]

    def reset(self) -> None:
        """Back to the first weights and a fresh optimizer."""

    def output(self, batch: Batch) -> Tensor:
        """The lookup, `[B, width]`."""

    def train(self, batch: Batch) -> None:
        """One step."""

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """Rows of a table as they are now."""

    def weight_grad(self) -> Tensor | None:
        """Of the last step, the gradient of the ids' weights `[N]`, if they ask for it."""


@dataclass(frozen=True)
class Entry:
    """Where a provider is found: `make(work, shared)` in a module, called with `option` if there is one."""

    module: str
    title: str
    option: str = ""

    def load(self) -> Any:
        """Its module."""
        return importlib.import_module(f"{__name__}.{self.module}")


REGISTRY = {
    "embedfuse": Entry("ours", "EmbeddingCollection and FusedOptimizer", "collection"),
    "embedfuse-backward": Entry("ours", "the same with update='backward', where fbgemm-gpu updates, too", "backward"),
    "embedfuse-engine": Entry("ours", "the ops without modules and autograd", "engine"),
    "torch": Entry("torch_bags", "one nn.EmbeddingBag(sparse=True) per table, torch optimizers", "eager"),
    "torch-compiled": Entry("torch_bags", "the same under torch.compile, dense gradients", "compiled"),
    "fbgemm": Entry("fbgemm", "SplitTableBatchedEmbeddingBagsCodegen", "v1"),
    "fbgemm-v2": Entry("fbgemm", "the same with FBGEMM_EXPERIMENTAL_TBE", "v2"),
    "tensorflow": Entry("tensorflow", "tf.nn.embedding_lookup_sparse per table, tf.function"),
    "jax": Entry("jax", "take and segment_sum per table, jitted"),
}
OURS = ("embedfuse", "embedfuse-backward", "embedfuse-engine")
BY_NAME = ("embedfuse-backward",)
"""Those that run if they are asked for by name."""


def version_of(name: str) -> str:
    """Of the library behind a provider."""
    version: str = REGISTRY[name].load().version()
    return version


def why_not(name: str, device: torch.device) -> str | None:
    """None if the provider can be tried on this device, else the reason why not."""
    entry = REGISTRY[name]
    reason: str | None = entry.load().why_not(device, entry.option)
    return reason


def make(name: str, work: Workload, shared: Shared) -> Provider:
    """The provider, ready; raises Unsupported with the reason if it cannot run this case."""
    entry = REGISTRY[name]
    provider: Provider = entry.load().make(work, entry.option, shared)
    return provider


def not_importable(module: str) -> str | None:
    """None if a module can be imported, else why not."""
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    try:
        importlib.import_module(module)
    except LIBRARY_ERRORS as error:
        return f"{module} is installed but cannot be imported: {error}"
    return None
