"""A small Transformer that predicts the next byte."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True)
class ByteShape:
    """Sizes of a `ByteLM`.

    Attributes:
        dim: width of a token.
        layers: how many.
        heads: of the attention; must divide `dim` into even parts.
        hidden: width of feed-forward blocks, as a multiple of `dim`.
    """

    dim: int = 128
    layers: int = 4
    heads: int = 4
    hidden: int = 4

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.heads):
            raise ValueError(f"`dim` must be a multiple of twice the heads, {2 * self.heads}, got {self.dim}")


class FeedForward(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of a forward pass; a multiplication and an addition count as two."""
        return 2 * (self.up.weight.numel() + self.down.weight.numel())


class Attention(nn.Module):
    """Causal attention over `[B, T, dim]` with rotary positions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(dim, 3 * dim, bias=False)
        self.outputs = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Of the same shape."""
        query, key, value = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        made = functional.scaled_dot_product_attention(turned(query, turns), turned(key, turns), value, is_causal=True)
        out: Tensor = self.outputs(made.transpose(1, 2).flatten(2))
        return out


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates pairs of columns of `[..., T, width]` by angles that grow with the position."""
    cosine, sine = turns
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1).to(x.dtype)


class Layer(nn.Module):
    """Attention, then a block, each behind a norm and beside a way past it."""

    def __init__(self, shape: ByteShape) -> None:
        super().__init__()
        self.attention_norm, self.block_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.attention = Attention(shape.dim, shape.heads)
        self.feed_forward: nn.Module = FeedForward(shape.dim, shape.hidden * shape.dim)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Of the same shape."""
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.feed_forward(self.block_norm(x))
        return out


class ByteLM(nn.Module):
    """Bytes `[B, T]` → logits of the bytes after them `[B, T, 256]`.

    Any block that maps `[..., dim]` to `[..., dim]` may take the place of a layer's `feed_forward`.

    Args:
        shape: sizes.
    """

    def __init__(self, shape: ByteShape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(BYTES, shape.dim)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.logits = nn.Linear(shape.dim, BYTES, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        half = self.shape.dim // self.shape.heads // 2
        speed = 10_000.0 ** (-torch.arange(half, device=ids.device) / half)
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * speed
        turns = angle.cos(), angle.sin()
        x = self.bytes(ids)
        for layer in self.layers:
            x = layer(x, turns)
        out: Tensor = self.logits(self.norm(x))
        return out

    def flops_per_token(self, context: int) -> int:
        """Floating-point operations of a forward pass over `context` bytes, for each of them."""
        shape = self.shape
        # each byte looks at half of the others on average
        attention = 2 * 4 * shape.dim**2 + 2 * context * shape.dim
        blocks: list[int] = [layer.feed_forward.flops_per_token for layer in self.layers]  # type: ignore[union-attr, misc]
        return shape.layers * attention + sum(blocks) + 2 * shape.dim * BYTES
