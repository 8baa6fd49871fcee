"""Gather rows, weigh them, sum them, and the two products that its gradients are: what memory layers are made of.

No function here holds the gathered rows in memory. `primitives.py` has the three that close under differentiation;
`grouped.py`, `expert.py`, `product_topk.py` and `remap.py` what is built beside them.
"""

from .expert import expert_lookup
from .grouped import grouped_gather_sum
from .primitives import gather_dot, gather_reduce_sum, scatter_rows
from .product_topk import product_topk
from .remap import remap_indices, virtual_rows

__all__ = [
    "expert_lookup",
    "gather_dot",
    "gather_reduce_sum",
    "grouped_gather_sum",
    "product_topk",
    "remap_indices",
    "scatter_rows",
    "virtual_rows",
]
