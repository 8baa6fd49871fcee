"""`MemoryPlus`: gated memories that share a pool of rows, and where they go in a stack (Berges et al., 2024)."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from .checks import check_count
from .product_key import ProductKeyMemory
from .value_table import ValueTable


class MemoryPlus(ProductKeyMemory):
    """A `ProductKeyMemory` of the gated recipe: `(rows ⊙ silu(x W1)) W2`, with the rows of a pool that layers share.

    Each layer has its own queries and keys. Queries are not normalised over the batch, so that a token's output depends
    on no other token.

    Args:
        dim: width of the tokens.
        num_keys: keys of each half.
        values: the pool, a `ValueTable` of `num_keys ** 2` rows; one of its own if None.
        dim_key: width of a query; that of a row, if None, so that half a key is half as wide as a row.
        heads: queries of a token.
        topk: slots that each head reads.
        qk_norm: scores are cosines times a learned factor, for models that are unstable otherwise.
        others: further arguments of `ProductKeyMemory`.
    """

    def __init__(
        self, dim: int, num_keys: int = 128, values: ValueTable | None = None, dim_key: int | None = None,
        heads: int = 4, topk: int = 32, qk_norm: bool = False, **others: Any,
    ) -> None:  # fmt: skip
        check_count("dim", dim)
        if dim_key is None:
            width = others.get("dim_value") or (values.dim if isinstance(values, ValueTable) else dim)
            dim_key = max(2, width // 2 * 2)
        recipe = {"query_norm": None, "gating": "swilu", "qk_norm": qk_norm, **others}
        super().__init__(dim, num_keys, dim_key, heads, topk, values=values, **recipe)
        self._recipe = {"dim_key": dim_key, "heads": heads, "topk": topk, **recipe}

    def sibling(self) -> "MemoryPlus":
        """Another memory of the same options that reads the same pool, with queries and keys of its own."""
        made = MemoryPlus(self.dim, self.keys.num_keys, self.values, **self._recipe).train(self.training)
        like = self.keys.keys
        # not the whole: the pool stays as it is
        for part in (made.query, made.keys, made.gate, made.out):
            if part is not None:
                part.to(device=like.device, dtype=like.dtype)
        return made


def memory_positions(num_layers: int, count: int = 3, spacing: int | None = None) -> list[int]:
    """Where `count` memories go in a stack: around its middle, as far apart as there is room for.

    Of 24 layers, counted from 0: 4, 12 and 20.

    Raises:
        ValueError: more memories than layers, or a spacing that leaves the stack.
    """
    check_count("num_layers", num_layers)
    check_count("count", count)
    if count > num_layers:
        raise ValueError(f"`count` must be at most the number of layers, {num_layers}, got {count}")
    apart = max(1, num_layers // count) if spacing is None else spacing
    check_count("spacing", apart)
    first = num_layers // 2 - (count - 1) * apart // 2
    positions = [first + number * apart for number in range(count)]
    if positions[0] < 0 or positions[-1] >= num_layers:
        raise ValueError(
            f"`spacing` must keep {count} memories inside of {num_layers} layers, got {apart}, which gives layers "
            f"{positions}: use less, or leave it out"
        )
    return positions


def place_memories(
    layers: Sequence[nn.Module],
    memory: MemoryPlus,
    *,
    attribute: str = "feed_forward",
    positions: Sequence[int] | None = None,
) -> list[MemoryPlus]:
    """Puts memories that share the pool of `memory` in the place of feed-forward blocks.

    Equivalent, but that `memory` itself is the first, to

        for position in positions:
            layers[position].feed_forward = memory.sibling()

    Args:
        layers: the stack, such as an `nn.ModuleList`; changed in place.
        memory: goes to the first position, and what the others are like.
        attribute: the name, in each layer, of what is replaced.
        positions: which layers; those of `memory_positions(len(layers))` if None.

    Returns:
        The memories, in order.

    Raises:
        ValueError: a position outside of the stack, twice the same, or a layer without that attribute.
    """
    chosen = list(memory_positions(len(layers)) if positions is None else positions)
    if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= at < len(layers) for at in chosen):
        raise ValueError(f"`positions` must be different layers from 0 to {len(layers) - 1}, got {chosen}")
    for at in chosen:
        if not isinstance(getattr(layers[at], attribute, None), nn.Module):
            raise ValueError(
                f"`attribute` must name a module of each layer to replace, got {attribute!r}, which layer {at} "
                f"({type(layers[at]).__name__}) has not"
            )
    made = [memory, *(memory.sibling() for _ in chosen[1:])]
    for at, each in zip(chosen, made, strict=True):
        setattr(layers[at], attribute, each)
    return made
