"""The two models of `embedfuse lm`, their optimizers, and how both are judged."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.python_text import Text
from ..models.byte_lm import ByteLM
from ..optim import Adam
from ..torch.memory import ProductKeyMemory, ValueTable, param_groups
from ..torch.optimizer import FusedOptimizer
from .lm_settings import LanguageSettings

Kind = Literal["feed-forward", "memory"]
KINDS: tuple[Kind, ...] = ("feed-forward", "memory")
WINDOWS_AT_ONCE = 32


def make_model(kind: Kind, settings: LanguageSettings) -> ByteLM:
    """A fresh model; both kinds have the same first weights but for the block in which they differ."""
    torch.manual_seed(settings.seed)
    model = ByteLM(settings.shape)
    if kind == "memory":
        layer: Any = model.layers[settings.memory_position]
        layer.feed_forward = memory_block(settings.dim, settings)
    return model.to(settings.device)


def memory_block(dim: int, settings: LanguageSettings) -> ProductKeyMemory:
    """The memory, whose rows our fused Adam steps: only those that a batch reads."""
    rule = Adam(settings.value_learning_rate, bias_correction=True, epsilon=1e-8)
    values = ValueTable(settings.num_keys**2, dim, update="step", optimizer=rule)
    return ProductKeyMemory(
        dim, settings.num_keys, settings.dim_key, settings.memory_heads, settings.topk, gating="swilu", values=values
    )


def differing_block(model: ByteLM, settings: LanguageSettings) -> Any:
    """The block in which the models differ."""
    return model.layers[settings.memory_position].feed_forward


def make_optimizers(model: ByteLM, settings: LanguageSettings) -> list[torch.optim.Optimizer]:
    """AdamW of all that is dense, and the fused optimizer of the memory's rows if there are any."""
    rates = settings.learning_rate, settings.value_learning_rate
    dense = torch.optim.AdamW(param_groups(model, *rates, weight_decay=0.01), betas=(0.9, 0.95))
    has_rows = any(isinstance(module, ValueTable) for module in model.modules())
    return [dense, FusedOptimizer(model)] if has_rows else [dense]


def rate_factor(step: int, steps: int) -> float:
    """Rises over the first twentieth, then falls along a cosine to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def next_byte_loss(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross entropy of each byte of `[B, T + 1]` given those before it, in nats."""
    with torch.autocast(window.device.type, torch.bfloat16, enabled=window.is_cuda):
        logits = model(window[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Text, settings: LanguageSettings, windows: int) -> float:
    """Mean bits that the model needs for a held-out byte, in evaluation mode."""
    was_training = model.training
    model.eval()
    chosen = torch.from_numpy(text.held_out_windows(windows, settings.context)).to(settings.device)
    total = sum(float(next_byte_loss(model, part)) * part.shape[0] for part in chosen.split(WINDOWS_AT_ONCE))
    model.train(was_training)
    bits: float = total / chosen.shape[0] / math.log(2)
    return bits
