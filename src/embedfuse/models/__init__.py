"""Reference rankers: DLRM, DeepFM and Wide & Deep, with our embeddings or one `nn.EmbeddingBag` a table."""

from .deepfm import DeepFM
from .dlrm import DLRM
from .embeddings import FusedEmbeddings, Lookup, UnfusedEmbeddings
from .logistic import LogisticRegression
from .wdl import WDL
from .zoo import MODELS, ModelOptions, build_model

__all__ = [
    "DLRM",
    "MODELS",
    "WDL",
    "DeepFM",
    "FusedEmbeddings",
    "LogisticRegression",
    "Lookup",
    "ModelOptions",
    "UnfusedEmbeddings",
    "build_model",
]
