"""Launches of the Triton kernels of memory layers: `product_topk` and `expert_lookup`."""

import torch
from torch import Tensor

from ...kernels.configs import power_of_two
from ...kernels.expert import GELU, IDENTITY, RELU, SILU, expert_kernel
from ...kernels.product_topk import product_topk_kernel
from .descriptor_facts import alignment, rows_align
from .launching import launch, on_device

ACTIVATIONS = {"relu": RELU, "gelu": GELU, "silu": SILU, "identity": IDENTITY}

MOST = 256
"""The largest k that one program finds."""
WIDEST = 16384
"""The longest scores that one program sorts."""


def product_topk(scores_a: Tensor, scores_b: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """The k best sums of rows `[R, n]` and `[R, m]`, `[R, k]`, and their ids, int64; None if the kernel cannot."""
    (rows, n), m = scores_a.shape, scores_b.shape[1]
    if k > MOST or max(n, m) > WIDEST:
        return None
    scores_a, scores_b = (x if x.stride(1) == 1 else x.contiguous() for x in (scores_a, scores_b))
    # two at least: Triton 3.6 cannot sort for the best one
    k_a, k_b = (max(power_of_two(min(k, length)), 2) for length in (n, m))
    ids = torch.empty((rows, k), dtype=torch.int64, device=scores_a.device)
    scores = scores_a.new_empty((rows, k))
    # a few more than twice as many are nearly always enough
    rooms = [max(2 * wanted, 16) for wanted in (k_a, k_b)]
    found = torch.empty((rows, sum(rooms)), dtype=torch.int64, device=scores_a.device)
    values = torch.empty((rows, k_b), dtype=torch.float64, device=scores_a.device)
    places = torch.empty((rows, k_b), dtype=torch.int32, device=scores_a.device)
    # two rows to a warp take 10 % longer, two warps to a row 80 % (H200, k = 32 of 512 and 512, 2026-11)
    with on_device(scores_a.device):
        launch(
            product_topk_kernel, (rows,), (scores_a, scores_b, found, values, places, scores, ids),
            (n, m, scores_a.stride(0), scores_b.stride(0)), 1 if max(n, m) <= 1024 else 4, {
                "K": k, "K_A": k_a, "K_B": k_b, "K_OUT": power_of_two(k), "ROOM_A": rooms[0], "ROOM_B": rooms[1],
                "N": max(power_of_two(n), 2), "M": max(power_of_two(m), 2),
            },
        )  # fmt: skip
    return scores, ids


def expert_lookup(
    x: Tensor, down: Tensor, gate: Tensor | None, up: Tensor, ids: Tensor, scores: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`out [B, E]`, and the dot products of `x [B, D]` with rows of `down` and `gate`, float32 `[B, K]`.

    `ids` and float32 `scores` are `[B, K]`; ids outside of the tables are absent.
    """
    (bags, places), (rows, dim), out_dim = ids.shape, down.shape, up.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    down, up, ids, scores = (tensor.contiguous() for tensor in (down, up, ids, scores))
    out = up.new_empty((bags, out_dim))
    dots = torch.empty((bags, places), dtype=torch.float32, device=x.device)
    gates = None if gate is None else torch.empty_like(dots)
    block_d = min(max(power_of_two(dim), 4), 512)
    block_out = min(max(power_of_two(out_dim), 4), 512)
    if bags == 0:
        return out, dots, gates
    with on_device(x.device):
        launch(
            expert_kernel, (bags,), (
                x, down, None if gate is None else gate.contiguous(), up, ids, scores, dots, gates, out,
            ), (places, rows, dim, out_dim, x.stride(0)), 4, {
                "HAS_GATE": gate is not None, "ACTIVATION": ACTIVATIONS[activation],
                "ALIGN": min(
                    rows_align(alignment(dim), down.dtype), rows_align(alignment(dim, x.stride(0)), x.dtype)
                ),
                "OUT_ALIGN": rows_align(alignment(out_dim), up.dtype), "ROWS": max(2048 // block_d, 1),
                "BLOCK_D": block_d, "OUT_ROWS": max(2048 // block_out, 1), "BLOCK_OUT": block_out,
            },
        )  # fmt: skip
    return out, dots, gates
