"""The dense layers that all three rankers are made of."""

from collections.abc import Sequence

from torch import nn


def stack(inputs: int, sizes: Sequence[int], batch_norm: bool = True, dropout: float = 0.0) -> nn.Sequential:
    """Linear, ReLU, and as asked batch normalisation and dropout, once for each of `sizes`."""
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        if batch_norm:
            layers.append(nn.BatchNorm1d(size))
        if dropout:
            layers.append(nn.Dropout(dropout))
        inputs = size
    return nn.Sequential(*layers)
