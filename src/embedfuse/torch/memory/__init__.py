"""Memory layers: in place of a feed-forward block, rows of a large table that each token looks up for itself."""

from .addressing import Addressing, ProductKeys
from .checkpoints import load_memory
from .memory_plus import MemoryPlus, memory_positions, place_memories
from .param_groups import param_groups
from .peer import PEER
from .product_key import ProductKeyMemory
from .tucker import TuckerKeys
from .ultramem import UltraMem
from .usage import SlotUse, UsageStats, plot_usage, record_usage, usage_counts, usage_stats
from .value_table import ValueTable

__all__ = [
    "PEER",
    "Addressing",
    "MemoryPlus",
    "ProductKeyMemory",
    "ProductKeys",
    "SlotUse",
    "TuckerKeys",
    "UltraMem",
    "UsageStats",
    "ValueTable",
    "load_memory",
    "memory_positions",
    "param_groups",
    "place_memories",
    "plot_usage",
    "record_usage",
    "usage_counts",
    "usage_stats",
]
