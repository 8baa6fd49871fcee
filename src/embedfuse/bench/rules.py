"""The optimizers of the cases, with one set of constants that every provider can be given."""

from ..optim import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad

RATE, ADAM_RATE, INITIAL, EPSILON, BETAS = 0.05, 0.01, 0.1, 1e-8, (0.9, 0.999)
ADAM_EPSILON = 1e-15
"""Too small to matter: libraries add it at different places."""


def rule_of(name: str) -> Optimizer:
    """Ours of that name. Accumulators start at 0.1: from 0 a first step shows only the sign of a gradient."""
    if name == "sgd":
        return SGD(RATE)
    if name == "adam":
        return Adam(ADAM_RATE, *BETAS, ADAM_EPSILON, bias_correction=True)
    kind = {"adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad}[name]
    return kind(RATE, initial_accumulator_value=INITIAL, epsilon=EPSILON)
