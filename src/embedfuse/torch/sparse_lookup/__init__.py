"""TensorFlow's sparse lookups: one table or its shards, ids as SparseTensors, one gather."""

from .lookups import fused_embedding_lookup_sparse, fused_safe_embedding_lookup_sparse

__all__ = ["fused_embedding_lookup_sparse", "fused_safe_embedding_lookup_sparse"]
