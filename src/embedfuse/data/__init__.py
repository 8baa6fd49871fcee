"""Data sets in batches of NumPy arrays: flights, Criteo's click logs, and made-up ones. Loads no tensor framework."""

from .flights import load_flights
from .memory import InMemoryDataset
from .schema import Batch, DataError, Dataset, Field, Ragged, Schema
from .synthetic import SyntheticSize, load_synthetic

__all__ = [
    "Batch",
    "DataError",
    "Dataset",
    "Field",
    "InMemoryDataset",
    "Ragged",
    "Schema",
    "SyntheticSize",
    "load_flights",
    "load_synthetic",
]
