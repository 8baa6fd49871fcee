"""What TensorFlow's feature columns answered (scripts/record_feature_columns.py), and its batch in our kinds."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from embedfuse.torch import Bags
from embedfuse.torch import feature_column as fc

RECORD = json.loads((Path(__file__).parent.parent / "data" / "feature_columns.json").read_text(encoding="utf-8"))
ARROW = {"string": pa.string(), "int64": pa.int64(), "float32": pa.float32()}


def feature(record: dict[str, Any]) -> Any:
    """A recorded feature: sparse ones as arrow lists, dense ones as lists of strings or as tensors."""
    if record["kind"] == "dense":
        return record["values"] if record["dtype"] == "string" else torch.tensor(record["values"])
    rows: list[list[Any]] = [[] for _ in range(record["shape"][0])]
    for (row, _), value in zip(record["indices"], record["values"], strict=True):
        rows[row].append(value)
    return pa.array(rows, pa.list_(ARROW[record["dtype"]]))


FEATURES = {name: feature(record) for name, record in RECORD["features"].items()}


def columns_of(text: str, file: Path, **options: Any) -> list[fc.FeatureColumn]:
    """The recorded columns, made by us."""
    made = {name: getattr(fc, name) for name in fc.__all__}
    if options:
        for name in ("embedding_column", "shared_embedding_columns"):
            made[name] = partial(made[name], **options)
    columns: list[fc.FeatureColumn] = eval(text, {**made, "FILE": str(file)})
    return columns


def fill(tables: dict[str, Tensor], variables: dict[str, Any]) -> None:
    """Gives our tables TensorFlow's values."""
    for name, values in variables.items():
        with torch.no_grad():
            tables[ours(name)].copy_(torch.tensor(values).reshape(tables[ours(name)].shape))


def ours(name: str) -> str:
    """Our name of a variable: `input_layer/words_embedding/embedding_weights` is `words_embedding`."""
    parts = name.split("/")
    return parts[-1] if parts[-1] == "bias_weights" else parts[-2]


def random_lists(bags: int, most: int, below: int, seed: int) -> list[list[int]]:
    """Lists of ids of random lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(0, below, n).tolist() for n in random.integers(0, most + 1, bags)]


__all__ = ["FEATURES", "RECORD", "Bags", "columns_of", "feature", "fill", "ours", "random_lists"]
