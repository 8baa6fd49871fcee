"""The native module (`bind.cpp`). Addresses are plain integers, 0 for nothing; strides count elements.

`dtype` is the code of a float type: 0 float32, 1 float16, 2 bfloat16, 3 float64. `threads` is the most to use.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

has_threads: bool

def isa() -> str: ...
def isas() -> list[str]: ...
def rule_names() -> list[str]: ...
def prefer_large_pages(address: int, bytes: int) -> bool: ...

class Batch:
    def __init__(
        self, features: int, feature_count: int, ids: int, wide_ids: bool, id_count: int, offsets: int, weights: int,
        bags: int, records: int,
    ) -> None: ...  # fmt: skip

class Upstream:
    def __init__(self, scale: int, grad: int, dtype: int, row_stride: int, column_stride: int, width: int) -> None: ...

class Rows:
    def __init__(self, table: int, tables: int, table_count: int) -> None: ...

class Shards:
    def __init__(self, described: int, count: int, modulo: bool, stride: int) -> None: ...

class Prepared:
    def __init__(self, rows: int, starts: int, offsets: int, weights: int, places: int) -> None: ...

class Learner:
    def __init__(
        self, table: int, dtype: int, tables: int, table_count: int, rules: Sequence[int], slots: int, hyper: int,
        steps: int, grad_scale: float,
    ) -> None: ...  # fmt: skip

def pooled_lookup(
    batch: Batch, table: int, dtype: int, out: int, width: int, scale: int, checked: bool, threads: int
) -> int | None: ...
def max_lookup(
    batch: Batch, table: int, dtype: int, out: int, width: int, winners: int, checked: bool, threads: int
) -> int | None: ...
def max_grad(batch: Batch, upstream: Upstream, winners: int, out: int, dtype: int, threads: int) -> None: ...
def row_update(batch: Batch, upstream: Upstream, learner: Learner, threads: int) -> None: ...
def row_square_sum(batch: Batch, upstream: Upstream, learner: Learner, threads: int) -> float: ...
def collect_rows(
    batch: Batch, upstream: Upstream, learner: Learner, table: int, threads: int
) -> tuple[NDArray[np.int64], NDArray[Any]]: ...
def row_grad(batch: Batch, upstream: Upstream, rows: Rows, out: int, dtype: int, dots: int, threads: int) -> None: ...
def prepare_ids(
    batch: Batch, shards: Shards, dtype: int, prepared: Prepared, checked: bool, threads: int
) -> int | None: ...
def coefficient_grad(batch: Batch, upstream: Upstream, table: int, dtype: int, out: int, threads: int) -> None: ...
def product_topk(
    a: int, n: int, a_stride: int, b: int, m: int, b_stride: int, dtype: int, rows: int, k: int, ids: int, threads: int
) -> None: ...
