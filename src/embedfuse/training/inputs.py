"""NumPy batches as tensors, sharing their memory on the CPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..data.schema import Batch, Ragged
from ..models.embeddings import Inputs
from ..torch import Bags


class TorchBatch(NamedTuple):
    """A batch on its device."""

    inputs: Inputs
    numeric: Tensor  # [B, n]
    labels: Tensor  # [B]


def to_torch(batch: Batch, device: torch.device) -> TorchBatch:
    """The same rows as tensors and `Bags`."""
    inputs: dict[str, Tensor | Bags] = {}
    for name, ids in batch.ids.items():
        if isinstance(ids, Ragged):
            bags = Bags(torch.from_numpy(ids.ids), torch.from_numpy(ids.offsets), torch.from_numpy(ids.weights))
            inputs[name] = bags if device.type == "cpu" else bags.to(device)
        else:
            inputs[name] = torch.from_numpy(ids).to(device)
    return TorchBatch(inputs, torch.from_numpy(batch.numeric).to(device), torch.from_numpy(batch.labels).to(device))
