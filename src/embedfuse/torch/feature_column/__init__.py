"""TensorFlow's feature columns for PyTorch: the same names, ids and numbers, all lookups of a layer in one launch.

from embedfuse.torch import feature_column as fc

item = fc.embedding_column(fc.categorical_column_with_hash_bucket("item", 10_000), 16)
layer = fc.InputLayer([item, fc.numeric_column("price")], optimizer="adagrad")
layer({"item": [["apple", "pear"], []], "price": [1.5, 0.5]})  # [2, 17]
"""

from .categorical import (
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    weighted_categorical_column,
)
from .column import CategoricalColumn, DenseColumn, FeatureColumn
from .crossed import crossed_column
from .dense import bucketized_column, indicator_column, numeric_column
from .embedding import embedding_column, shared_embedding_columns
from .layer import InputLayer
from .linear import LinearModel, linear_model
from .sequence_column import (
    sequence_categorical_column_with_hash_bucket,
    sequence_categorical_column_with_identity,
    sequence_categorical_column_with_vocabulary_file,
    sequence_categorical_column_with_vocabulary_list,
)
from .sequence_layer import SequenceInputLayer
from .vocabulary import categorical_column_with_vocabulary_file, categorical_column_with_vocabulary_list

__all__ = [
    "CategoricalColumn",
    "DenseColumn",
    "FeatureColumn",
    "InputLayer",
    "LinearModel",
    "SequenceInputLayer",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "indicator_column",
    "linear_model",
    "numeric_column",
    "sequence_categorical_column_with_hash_bucket",
    "sequence_categorical_column_with_identity",
    "sequence_categorical_column_with_vocabulary_file",
    "sequence_categorical_column_with_vocabulary_list",
    "shared_embedding_columns",
    "weighted_categorical_column",
]
