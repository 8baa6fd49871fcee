"""All choices of one run of `embedfuse lm`, and the presets it starts from."""

from dataclasses import asdict, dataclass
from typing import Any

from ..data.python_text import TEXTS
from ..models.byte_lm import ByteShape

PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "gpu": {
        "steps": 3000, "batch_size": 64, "context": 512, "dim": 512, "layers": 8, "heads": 8, "num_keys": 512,
        "memory_heads": 4, "topk": 32, "device": "cuda", "learning_rate": 1e-3, "text": "installed",
    },
}  # fmt: skip
"""By name: "cpu" takes a few minutes on two cores, "gpu" is for a GPU with 16 GiB or more."""


@dataclass(frozen=True)
class LanguageSettings:
    """One run: two models that differ in one block.

    Attributes:
        steps: of each model.
        batch_size: windows of text in a step.
        context: bytes of a window.
        dim, layers, heads: of the Transformer.
        memory_layer: which layer's block is the memory, from 0; the middle one if None.
        num_keys, dim_key, memory_heads, topk: of the memory; see `ProductKeyMemory`.
        learning_rate: of everything but the memory's rows, at its highest.
        value_learning_rate: of the rows.
        windows: held-out windows of the last evaluation.
        evaluations: how many there are on the way.
        text: one of `data.python_text.TEXTS`.
        seed: of the first weights and the order of the text.
        device: "cpu", "cuda", ….
    """

    steps: int = 400
    batch_size: int = 16
    context: int = 128
    dim: int = 128
    layers: int = 4
    heads: int = 4
    memory_layer: int | None = None
    num_keys: int = 128
    dim_key: int | None = None
    memory_heads: int = 2
    topk: int = 16
    learning_rate: float = 3e-3
    value_learning_rate: float = 3e-2
    windows: int = 512
    evaluations: int = 5
    text: str = "stdlib"
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1), ("batch_size", 1), ("context", 8), ("num_keys", 2), ("memory_heads", 1), ("topk", 1),
            ("windows", 1), ("evaluations", 1), ("layers", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}")
        for name in ("learning_rate", "value_learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)}")
        if self.text not in TEXTS:
            raise ValueError(f"`text` must be one of {', '.join(TEXTS)}, got {self.text!r}")
        if not 0 <= self.memory_position < self.layers:
            raise ValueError(f"`memory_layer` must be from 0 to {self.layers - 1}, got {self.memory_layer}")
        # raises what it finds wrong with the sizes
        assert self.shape

    @property
    def shape(self) -> ByteShape:
        """Of both models."""
        return ByteShape(self.dim, self.layers, self.heads)

    @property
    def memory_position(self) -> int:
        """The layer of the memory."""
        return self.layers // 2 if self.memory_layer is None else self.memory_layer

    def describe(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"memory_layer": self.memory_position}
