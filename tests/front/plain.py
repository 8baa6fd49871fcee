"""The judge of the PyTorch front: the same model, one `torch.nn.functional.embedding_bag` per feature."""

from typing import Any

import torch
from torch import Tensor

import embedfuse
from embedfuse.torch import Bags, EmbeddingCollection


def random_bags(
    vocabulary: int, bags: int, generator: torch.Generator, *, most: int = 4, weighted: bool = False,
    dtype: torch.dtype = torch.int64,
) -> Bags:  # fmt: skip
    """Bags of 0 to `most` ids with duplicates; weights in (0, 1]."""
    lengths = torch.randint(0, most + 1, (bags,), generator=generator)
    ids = torch.randint(0, vocabulary, (int(lengths.sum()),), generator=generator).to(dtype)
    weights = 1 - torch.rand(ids.shape[0], generator=generator) if weighted else None
    return Bags.from_lengths(ids, lengths, weights)


def plain_pool(
    table: Tensor, bags: Bags, combiner: str, max_norm: float | None = None, default_id: int | None = None
) -> Tensor:
    """What one feature means, differentiable in table and weights."""
    weights = torch.ones(bags.ids.shape[0], dtype=table.dtype) if bags.weights is None else bags.weights.to(table.dtype)
    bag, ids = torch.repeat_interleave(torch.arange(len(bags)), bags.lengths()), bags.ids.long()
    kept = (ids >= 0) & ((weights > 0) | (combiner == "sum"))
    bag, ids, weights = bag[kept], ids[kept], weights[kept]
    if default_id is not None:
        empty = (torch.bincount(bag, minlength=len(bags)) == 0).nonzero()[:, 0]
        bag, ids = torch.cat([bag, empty]), torch.cat([ids, torch.full_like(empty, default_id)])
        weights = torch.cat([weights, weights.new_ones(len(empty))])
    rows = table[ids]
    if max_norm is not None:
        length = rows.norm(dim=1, keepdim=True)
        rows = torch.where(length > max_norm, rows * (max_norm / length), rows)
    total = table.new_zeros(len(bags), table.shape[1]).index_add(0, bag, rows * weights[:, None])
    if combiner == "sum":
        return total
    power = 1 if combiner == "mean" else 2
    moment = table.new_zeros(len(bags)).index_add(0, bag, weights**power)
    divisor = moment if combiner == "mean" else moment.sqrt()
    return total / torch.where(divisor == 0, 1, divisor)[:, None]


class Plain:
    """Ordinary leaves with the values of a collection's tables, looked up feature by feature."""

    def __init__(self, collection: EmbeddingCollection) -> None:
        self.features = dict(collection.features.items())
        self.tables = {name: table.detach().clone().requires_grad_() for name, table in collection.tables.items()}

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        return {
            name: plain_pool(
                self.tables[config.table.name], inputs[name], config.effective_combiner, config.table.max_norm,
                config.default_id,
            )
            for name, config in self.features.items()
        }  # fmt: skip

    def check(self, collection: EmbeddingCollection, **tolerance: float) -> None:
        """Raises unless the collection's tables have these values."""
        for name, table in self.tables.items():
            torch.testing.assert_close(collection.tables[name].detach(), table.detach(), **tolerance)


def three_features(**options: Any) -> EmbeddingCollection:
    """Two features on one table with different combiners, and one on another of odd width.

    `default_id` is that of the first and the last, `max_norm` that of the first table.
    """
    default, most = options.pop("default_id", None), options.pop("max_norm", None)
    items = embedfuse.TableConfig(
        30, 8, name="items", optimizer=options.pop("items", embedfuse.SGD(0.1)), max_norm=most
    )
    cities = embedfuse.TableConfig(
        7, 3, name="cities", combiner="sum", optimizer=options.pop("cities", embedfuse.SGD(0.1))
    )
    features = {
        "seen": embedfuse.FeatureConfig(items, default_id=default),
        "bought": embedfuse.FeatureConfig(items, combiner="sqrtn"),
        "city": embedfuse.FeatureConfig(cities, default_id=default),
    }
    return EmbeddingCollection(features, **options)


def batch_for(collection: EmbeddingCollection, bags: int, seed: int, weighted: bool = False) -> dict[str, Bags]:
    """A random batch for any flat collection."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: random_bags(config.table.vocabulary_size, bags, generator, weighted=weighted)
        for name, config in collection.features.items()
    }


def upstream(outputs: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Random gradients of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(out.shape, generator=generator).to(out.dtype) for name, out in outputs.items()}


def loss_of(outputs: dict[str, Tensor], gradients: dict[str, Tensor]) -> Tensor:
    """A scalar whose gradient is `gradients`."""
    return sum(((outputs[name] * gradients[name]).sum() for name in outputs), torch.zeros(()))


__all__ = ["Plain", "batch_for", "loss_of", "plain_pool", "random_bags", "three_features", "upstream"]
