"""Models by name, built for a schema with either kind of embeddings."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..data.schema import Schema
from ..optim import Adagrad, Optimizer
from .deepfm import DeepFM
from .dlrm import DLRM
from .embeddings import FusedEmbeddings, Gradients, UnfusedEmbeddings
from .wdl import WDL

MODELS: dict[str, type[DLRM] | type[DeepFM] | type[WDL]] = {"dlrm": DLRM, "deepfm": DeepFM, "wdl": WDL}


@dataclass(frozen=True)
class ModelOptions:
    """What may differ between two models of one name.

    Attributes:
        embedding: `"fused"` for an `EmbeddingCollection`, `"unfused"` for one `torch.nn.EmbeddingBag` a table.
        optimizer: of the (deep) tables.
        dim: their width, None for the model's own.
        dropout: of its largest MLP.
        gradients: of the unfused tables, "auto", "sparse" or "dense".
        shape: further arguments of the model, such as `top` and `interaction` of DLRM.
        device: where the tables live.
    """

    embedding: Literal["fused", "unfused"] = "fused"
    optimizer: Optimizer = field(default_factory=lambda: Adagrad(0.05))
    dim: int | None = None
    dropout: float = 0.0
    gradients: Gradients = "auto"
    shape: tuple[tuple[str, Any], ...] = ()
    device: torch.device | None = None


def build_model(name: str, schema: Schema, options: ModelOptions | None = None) -> nn.Module:
    """The model of that name. Its `embeddings` part has `make_optimizer()`; the rest is plain PyTorch.

    Drawn from torch's random state: seeded alike, a fused and an unfused model start from the same weights.

    Raises:
        ValueError: an unknown name or kind of embedding.
    """
    options = options or ModelOptions()
    if name not in MODELS:
        raise ValueError(f"`name` must be one of {', '.join(MODELS)}, got {name!r}")
    if options.embedding not in ("fused", "unfused"):
        raise ValueError(f"`embedding` must be fused or unfused, got {options.embedding!r}")
    model = MODELS[name]
    width = {} if options.dim is None else {"dim": options.dim}
    lookups = model.lookups(schema, options.optimizer, **width)
    embeddings: nn.Module
    if options.embedding == "fused":
        embeddings = FusedEmbeddings(lookups, options.device)
    else:
        embeddings = UnfusedEmbeddings(lookups, options.device, options.gradients)
    make: Callable[..., nn.Module] = model
    return make(embeddings, schema, dropout=options.dropout, **width, **dict(options.shape)).to(options.device)
