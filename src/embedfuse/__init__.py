"""embedfuse: sparse embeddings as fast as the memory bus. This package loads no tensor framework; its fronts do."""

from .config import FeatureConfig, TableConfig
from .optim import FTRL, SGD, Adagrad, AdagradMomentum, Adam, AdamW, Optimizer, RowWiseAdagrad

__version__ = "0.1.0"

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "AdamW",
    "FeatureConfig",
    "Optimizer",
    "RowWiseAdagrad",
    "TableConfig",
    "__version__",
]
