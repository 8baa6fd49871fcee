"""Optimizers that update rows where they lie: each a frozen set of hyper-parameters and one rule per row."""

from .adagrad import Adagrad
from .adagrad_momentum import AdagradMomentum
from .adam import Adam
from .adamw import AdamW
from .base import HYPER_WIDTH, MAX_SLOTS, OWN_HYPER, Optimizer, Slot, apply_rule
from .ftrl import FTRL
from .registry import OPTIMIZERS, from_description, resolve
from .rowwise_adagrad import RowWiseAdagrad
from .sgd import SGD

__all__ = [
    "FTRL",
    "HYPER_WIDTH",
    "MAX_SLOTS",
    "OPTIMIZERS",
    "OWN_HYPER",
    "SGD",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "AdamW",
    "Optimizer",
    "RowWiseAdagrad",
    "Slot",
    "apply_rule",
    "from_description",
    "resolve",
]
