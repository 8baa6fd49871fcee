"""The judge of memory layers: plain PyTorch in float64 that gathers all rows and sorts the whole grid of scores."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Parameters = dict[str, Tensor]


def best_of_grid(grid: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dimension; of equal ones the lowest id first."""
    order = grid.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return grid.gather(-1, order), order


def batch_norm(x: Tensor, mask: Tensor | None, p: Parameters, module: nn.Module, prefix: str) -> Tensor:
    """Over all tokens that are real, or by the running statistics."""
    flat = x.flatten(0, -2)
    if module.training:
        kept = flat if mask is None else flat[mask.flatten()]
        mean, variance = kept.mean(0), kept.var(0, unbiased=False)
    else:
        mean, variance = (module.get_buffer(prefix + name).double() for name in ("running_mean", "running_var"))
    out = (flat - mean) / (variance + 1e-5).sqrt() * p[f"{prefix}weight"] + p[f"{prefix}bias"]
    return out.view(x.shape)


def queries(module: Any, p: Parameters, x: Tensor, mask: Tensor | None) -> Tensor:
    """`[..., heads, 2, half]`."""
    made = x @ p["query.project.weight"].T + p["query.project.bias"]
    norm = module.query.norm
    if isinstance(norm, nn.BatchNorm1d):
        made = batch_norm(made, mask, p, module, "query.norm.")
    made = made.unflatten(-1, (module.query.heads, 2, module.query.half_width))
    if norm is None or isinstance(norm, nn.BatchNorm1d):
        return made
    if norm.kind == "layer":
        made = made - made.mean(-1, keepdim=True)
    made = made / (made.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["query.norm.weight"]
    return made + p["query.norm.bias"] if norm.kind == "layer" else made


def product_keys(module: Any, p: Parameters, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and ids `[..., heads, topk]` out of the whole grid."""
    keys = p["keys.keys"]
    if "keys.scale" in p:
        keys, asked = (t / t.square().sum(-1, keepdim=True).sqrt() for t in (keys, asked))
    parts = torch.stack(
        [
            torch.stack([asked[..., h, at, :] @ keys[h % keys.shape[0], at].T for at in (0, 1)], -2)
            for h in range(asked.shape[-3])
        ],
        -3,
    )
    if "keys.scale" in p:
        parts = parts * p["keys.scale"][:, None, None]
    grid = parts[..., 0, :, None] + parts[..., 1, None, :]
    best, ids = best_of_grid(grid.flatten(-2), module.keys.topk)
    function: dict[str | None, Callable[[Tensor], Tensor]] = {
        "softmax": lambda t: t.softmax(-1), "relu": torch.relu, "sigmoid": torch.sigmoid, None: lambda t: t,
    }  # fmt: skip
    return function[module.keys.score_function](best), ids


def product_key_memory(module: Any, p: Parameters, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ProductKeyMemory.forward` without dropout."""
    x = x if mask is None else torch.where(mask[..., None], x, 0)
    scores, ids = product_keys(module, p, queries(module, p, x, mask))
    rows = p["values.collection.tables.weight"][ids]
    out = (scores[..., None] * rows).sum((-3, -2))
    if module.gate is not None:
        out = out * functional.silu(x @ p["gate.weight"].T + p["gate.bias"])
    if module.out is not None:
        out = out @ p["out.weight"].T + p["out.bias"]
    return out if mask is None else torch.where(mask[..., None], out, 0)


def peer(module: Any, p: Parameters, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """`PEER.forward` without dropout."""
    x = x if mask is None else torch.where(mask[..., None], x, 0)
    scores, ids = product_keys(module, p, queries(module, p, x, mask))
    function = {
        "relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu, "identity": lambda t: t,
    }[module.activation]  # fmt: skip

    def dots(name: str) -> Tensor:
        return (p[f"{name}.collection.tables.weight"][ids] * x[..., None, None, :]).sum(-1)

    hidden = function(dots("down")) if module.gate is None else function(dots("gate")) * dots("down")
    out = ((hidden * scores)[..., None] * p["up.collection.tables.weight"][ids]).sum((-3, -2))
    return out if mask is None else torch.where(mask[..., None], out, 0)


def ultramem(module: Any, p: Parameters, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """`UltraMem.forward` without dropout, with every virtual row made: `topk` must be all rows and columns."""
    x = x if mask is None else torch.where(mask[..., None], x, 0)
    asked = queries(module, p, x, mask)
    half, keys = module.query.half_width, p["keys.keys"]
    keys = keys - keys.mean(-1, keepdim=True)
    keys = keys / (keys.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    row = torch.einsum("...hd,hrnd->...hrn", asked[..., 0, :], keys[:, 0]) / half**0.5
    column = torch.einsum("...hd,hrnd->...hrn", asked[..., 1, :], keys[:, 1]) / half**0.5
    grid = torch.einsum("...hra,shrq,...hqb->s...hab", row, p["keys.core"], column).flatten(-2)
    _, ids = best_of_grid(grid.sum(0), module.keys.topk)
    scores = grid.gather(-1, ids.expand(grid.shape[0], *ids.shape))
    rows, slices = p["values.collection.tables.weight"], module.slices
    # a projection belongs to a block; a slice of a row passes through its part of the projection
    parts = rows.unflatten(1, (slices, -1)), p["project"].unflatten(1, (slices, -1))
    virtual = torch.einsum("nsw,eswo->seno", *parts).flatten(1, 2)
    out = sum((scores[s][..., None] * virtual[s][ids]).sum((-3, -2)) for s in range(slices))
    assert isinstance(out, Tensor)
    return out if mask is None else torch.where(mask[..., None], out, 0)


def check_against(
    judge: Callable[..., Tensor], module: nn.Module, x: Tensor, mask: Tensor | None = None, tolerance: float = 1e-9
) -> None:
    """Raises unless output and all gradients of a float64 module are the judge's, for a random upstream gradient."""
    p = {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}
    plain, own = (x.detach().clone().requires_grad_() for _ in range(2))
    expected = judge(module, p, plain, mask)
    module.zero_grad()
    got = module(own, mask)
    assert got.shape == x.shape and got.dtype == x.dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(expected)
    got.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(own.grad, plain.grad, rtol=tolerance, atol=tolerance)
    for name, value in module.named_parameters():
        assert value.grad is not None and p[name].grad is not None, name
        torch.testing.assert_close(
            value.grad, p[name].grad, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
