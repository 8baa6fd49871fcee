"""embedfuse for PyTorch: embedding tables that are looked up in one launch and updated in one pass."""

from .backends import backends, use_backend
from .bags import Bags, SparseIds
from .checkpoint import load, save
from .collection import EmbeddingCollection
from .optimizer import FusedOptimizer

__all__ = [
    "Bags",
    "EmbeddingCollection",
    "FusedOptimizer",
    "SparseIds",
    "backends",
    "load",
    "save",
    "use_backend",
]
