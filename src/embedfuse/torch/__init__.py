"""embedfuse for PyTorch: embedding tables that are looked up in one launch and updated in one pass."""

from . import convert, feature_column
from .backends import backends, use_backend
from .bags import Bags, SparseIds
from .checkpoint import load, save
from .collection import EmbeddingCollection
from .embedding_bag import EmbeddingBag, embedding_bag
from .exported import pack_tables
from .gather import (
    expert_lookup,
    gather_dot,
    gather_reduce_sum,
    grouped_gather_sum,
    product_topk,
    remap_indices,
    scatter_rows,
    virtual_rows,
)
from .joined_bags import JoinedBags
from .memory import (
    PEER,
    MemoryPlus,
    ProductKeyMemory,
    ProductKeys,
    UltraMem,
    UsageStats,
    ValueTable,
    load_memory,
    memory_positions,
    param_groups,
    place_memories,
    plot_usage,
    record_usage,
    usage_counts,
    usage_stats,
)
from .optimizer import FusedOptimizer
from .sparse_lookup import fused_embedding_lookup_sparse, fused_safe_embedding_lookup_sparse
from .warmup import Warmup, warmup

__all__ = [
    "PEER",
    "Bags",
    "EmbeddingBag",
    "EmbeddingCollection",
    "FusedOptimizer",
    "JoinedBags",
    "MemoryPlus",
    "ProductKeyMemory",
    "ProductKeys",
    "SparseIds",
    "UltraMem",
    "UsageStats",
    "ValueTable",
    "Warmup",
    "backends",
    "convert",
    "embedding_bag",
    "expert_lookup",
    "feature_column",
    "fused_embedding_lookup_sparse",
    "fused_safe_embedding_lookup_sparse",
    "gather_dot",
    "gather_reduce_sum",
    "grouped_gather_sum",
    "load",
    "load_memory",
    "memory_positions",
    "pack_tables",
    "param_groups",
    "place_memories",
    "plot_usage",
    "product_topk",
    "record_usage",
    "remap_indices",
    "save",
    "scatter_rows",
    "usage_counts",
    "usage_stats",
    "use_backend",
    "virtual_rows",
    "warmup",
]
