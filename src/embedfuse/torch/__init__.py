"""embedfuse for PyTorch: embedding tables that are looked up in one launch and updated in one pass."""

from . import convert, feature_column
from .backends import backends, use_backend
from .bags import Bags, SparseIds
from .checkpoint import load, save
from .collection import EmbeddingCollection
from .embedding_bag import EmbeddingBag, embedding_bag
from .optimizer import FusedOptimizer
from .sparse_lookup import fused_embedding_lookup_sparse, fused_safe_embedding_lookup_sparse

__all__ = [
    "Bags",
    "EmbeddingBag",
    "EmbeddingCollection",
    "FusedOptimizer",
    "SparseIds",
    "backends",
    "convert",
    "embedding_bag",
    "feature_column",
    "fused_embedding_lookup_sparse",
    "fused_safe_embedding_lookup_sparse",
    "load",
    "save",
    "use_backend",
]
