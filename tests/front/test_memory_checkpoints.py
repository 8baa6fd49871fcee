"""Weights of other projects' memories give, in ours, what those projects' formulas give."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from embedfuse.torch.memory import MemoryPlus, ProductKeyMemory, load_memory

DIM, HEADS, KEYS, HALF, TOPK = 6, 2, 5, 3, 2


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def read(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What `query [T, H, 2, d]` reads with `keys [H, 2, n, d]`, over the grid of the best of both halves."""
    out = torch.zeros(query.shape[0], values.shape[1], dtype=torch.float64)
    for head in range(keys.shape[0]):
        first, a = (query[:, head, 0] @ keys[head, 0].T).topk(TOPK)
        second, b = (query[:, head, 1] @ keys[head, 1].T).topk(TOPK)
        best, place = (first[:, :, None] + second[:, None, :]).flatten(1).topk(TOPK)
        ids = (a[:, :, None] * keys.shape[2] + b[:, None, :]).flatten(1).gather(1, place)
        out += torch.einsum("tk,tkd->td", best.softmax(-1), values[ids])
    return out


def norm_state(width: int) -> dict[str, Tensor]:
    """Of a `BatchNorm1d`."""
    return {
        "weight": random(width), "bias": random(width), "running_mean": random(width),
        "running_var": torch.rand(width, dtype=torch.float64) + 0.5, "num_batches_tracked": torch.tensor(7),
    }  # fmt: skip


def normed(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    return functional.batch_norm(x, state["running_mean"], state["running_var"], state["weight"], state["bias"])


def memory(**options: Any) -> ProductKeyMemory:
    return ProductKeyMemory(DIM, KEYS, 2 * HALF, HEADS, TOPK, **options).double().eval()


@pytest.mark.parametrize("place", ["query_proj.query_mlps", "query_proj"])
@pytest.mark.parametrize("flat", [False, True], ids=["keys-4d", "keys-flat"])
def test_xlm_with_batch_norm(place: str, flat: bool) -> None:
    width = HEADS * 2 * HALF
    keys, values = random(HEADS, 2, KEYS, HALF), random(KEYS**2, DIM)
    weight, bias, norm = random(width, DIM), random(width), norm_state(width)
    state = {
        "transformer.memories.4.keys": keys.reshape(-1, HALF) if flat else keys,
        "transformer.memories.4.values.weight": values,
        f"transformer.memories.4.{place}.0.weight": weight,
        f"transformer.memories.4.{place}.0.bias": bias,
        **{f"transformer.memories.4.{place}.1.{name}": tensor for name, tensor in norm.items()},
        "transformer.embeddings.weight": random(3, 3),
    }
    ours = load_memory(memory(), state, "xlm", "transformer.memories.4.")
    x = random(7, DIM)
    query = normed(x @ weight.T + bias, norm).view(7, HEADS, 2, HALF)
    torch.testing.assert_close(ours(x), read(query, keys, values))


def test_xlm_with_one_set_of_keys_for_all() -> None:
    keys, values, weight = random(KEYS, HALF), random(KEYS**2, DIM), random(HEADS * 2 * HALF, DIM)
    state = {"keys": keys, "values.weight": values, "query_proj.query_mlps.0.weight": weight}
    ours = load_memory(memory(query_norm=None, bias=False), state, "xlm")
    x = random(7, DIM)
    expected = read((x @ weight.T).view(7, HEADS, 2, HALF), keys.expand(HEADS, 2, KEYS, HALF), values)
    torch.testing.assert_close(ours(x), expected)


@pytest.mark.parametrize("shared", [False, True], ids=["own-values", "shared-values"])
def test_meta_with_its_gate(shared: bool) -> None:
    width, wide = HEADS * 2 * HALF, 4
    keys, values = random(2 * HEADS * KEYS, HALF), random(KEYS**2, wide)
    weight, bias = random(width, DIM), random(width)
    gate, out = (random(wide, DIM), random(wide)), (random(DIM, wide), random(DIM))
    state = {
        "keys": keys, "query_proj.query_mlps.0.weight": weight, "query_proj.query_mlps.0.bias": bias,
        "swilu_projection.weight": gate[0], "swilu_projection.bias": gate[1],
        "value_proj.weight": out[0], "value_proj.bias": out[1],
    }  # fmt: skip
    ours = MemoryPlus(DIM, KEYS, dim_key=2 * HALF, heads=HEADS, topk=TOPK, dim_value=wide).double().eval()
    if shared:
        with torch.no_grad():
            ours.values.weight.copy_(values)
    else:
        state["values.weight"] = values
    load_memory(ours, state, "meta")
    x = random(7, DIM)
    query = (x @ weight.T + bias).view(7, HEADS, 2, HALF)
    gathered = read(query, keys.view(HEADS, 2, KEYS, HALF), values)
    expected = (gathered * functional.silu(x @ gate[0].T + gate[1])) @ out[0].T + out[1]
    torch.testing.assert_close(ours(x), expected)


@pytest.mark.parametrize("kind", ["layer", "batch"])
def test_lucidrains(kind: Any) -> None:
    keys, values, weight = random(HEADS, KEYS, 2, HALF), random(KEYS**2, DIM), random(2 * HEADS * HALF, DIM)
    state = {"keys": keys, "values.weight": values, "to_queries.weight": weight}
    x = random(7, DIM)
    # its queries are halves of heads, not heads of halves
    query = x @ weight.T
    if kind == "layer":
        norm = {"weight": random(HALF), "bias": random(HALF)}
        state |= {f"norm.{name}": tensor for name, tensor in norm.items()}
        query = functional.layer_norm(query.view(7, 2, HEADS, HALF), (HALF,), norm["weight"], norm["bias"])
    else:
        norm = norm_state(2 * HEADS * HALF)
        state |= {f"norm.fn.{name}": tensor for name, tensor in norm.items()}
        query = normed(query, norm).view(7, 2, HEADS, HALF)
    for bias in (True, False):
        ours = load_memory(memory(query_norm=kind, bias=bias), state, "lucidrains")
        torch.testing.assert_close(ours(x), read(query.transpose(1, 2), keys.transpose(1, 2), values))


def test_what_does_not_fit_is_named() -> None:
    state = {
        "keys": random(HEADS, 2, KEYS, HALF), "values.weight": random(KEYS**2, DIM),
        "query_proj.0.weight": random(HEADS * 2 * HALF, DIM), "query_proj.0.bias": random(HEADS * 2 * HALF),
    }  # fmt: skip
    plain = memory(query_norm=None)
    with pytest.raises(ValueError, match="`source` must be one of"):
        load_memory(plain, state, "keras")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`prefix` must begin the names of a layer in `state`, got 'layers\.1\.'"):
        load_memory(plain, state, "xlm", "layers.1.")
    with pytest.raises(ValueError, match=r"`state` holds gating\.weight, which `memory` has no place for"):
        load_memory(plain, {**state, "gating.weight": random(1, DIM)}, "meta")
    with pytest.raises(ValueError, match=r"`state` lacks what `memory` has as `query\.norm\.weight`"):
        load_memory(memory(), state, "xlm")
    with pytest.raises(ValueError, match=r"must have shape \(25, 6\) by the sizes of `memory`, got \(24, 6\)"):
        load_memory(plain, {**state, "values.weight": random(24, DIM)}, "xlm")
