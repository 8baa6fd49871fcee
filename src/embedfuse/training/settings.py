"""All choices of one training run, as plain data that a checkpoint can be compared with."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..models.zoo import MODELS
from ..optim import FTRL, SGD, Adagrad, AdagradMomentum, Adam, AdamW, Optimizer, RowWiseAdagrad

DATA = ("flights", "criteo", "synthetic")
SCHEDULES = ("linear", "constant")


def embedding_optimizers(learning_rate: float) -> dict[str, Optimizer]:
    """The optimizers the command line offers for tables, by word."""
    return {
        "adagrad": Adagrad(learning_rate),
        "rowwise-adagrad": RowWiseAdagrad(learning_rate),
        "adam": Adam(learning_rate, bias_correction=True, epsilon=1e-8),
        "adamw": AdamW(learning_rate),
        "sgd": SGD(learning_rate),
        "ftrl": FTRL(learning_rate),
        "adagrad-momentum": AdagradMomentum(learning_rate),
    }


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        model: "dlrm", "deepfm" or "wdl".
        data: "flights", "criteo" or "synthetic".
        path, test_path: files for "criteo".
        buckets: rows of each table for "criteo".
        rows: of "synthetic".
        epochs: passes over the training rows.
        max_steps: stop after this many steps, None for all.
        batch_size: rows a step.
        dim: width of the tables, None for the model's own.
        interaction: of DLRM, "cat" or "dot"; None for its own.
        layers: sizes of the model's largest MLP (DLRM's top, the others' deep part), None for its own.
        bottom: sizes of DLRM's bottom MLP before its last layer, None for its own.
        dropout: of the model's largest MLP.
        embedding_optimizer: a word of `embedding_optimizers`.
        embedding_learning_rate: of the tables at the start.
        learning_rate: of the dense layers (Adam) at the start.
        schedule: "linear" brings both to 0 by the last step, "constant" leaves them.
        gradients: of the unfused tables, "auto", "sparse" or "dense".
        seed: of weights, order and made-up data.
        device: "cpu", "cuda", ….
        compare: also train a logistic regression and the unfused model.
        checkpoint_every: steps between checkpoints, 0 for none but the last.
        evaluations: times the held-out rows are scored in a run, for the learning curve.
    """

    model: str = "dlrm"
    data: str = "flights"
    path: Path | None = None
    test_path: Path | None = None
    buckets: int = 10_000
    rows: int = 50_000
    epochs: int = 1
    max_steps: int | None = None
    batch_size: int = 2048
    dim: int | None = None
    interaction: str | None = None
    layers: tuple[int, ...] | None = None
    bottom: tuple[int, ...] | None = None
    dropout: float = 0.0
    embedding_optimizer: str = "adagrad"
    embedding_learning_rate: float = 0.05
    learning_rate: float = 0.001
    schedule: Literal["linear", "constant"] = "linear"
    gradients: Literal["auto", "sparse", "dense"] = "auto"
    seed: int = 0
    device: str = "cpu"
    compare: bool = True
    checkpoint_every: int = 200
    evaluations: int = 8

    def __post_init__(self) -> None:
        words = tuple(embedding_optimizers(0.1))
        for name, choices in (
            ("model", tuple(MODELS)),
            ("data", DATA),
            ("schedule", SCHEDULES),
            ("gradients", ("auto", "sparse", "dense")),
            ("embedding_optimizer", words),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, least in (
            ("epochs", 1), ("batch_size", 2), ("buckets", 1), ("rows", 7), ("checkpoint_every", 0), ("evaluations", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}")
        for name in ("max_steps", "dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        for name in ("learning_rate", "embedding_learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be in [0, 1), got {self.dropout}")
        if self.data == "criteo" and self.path is None:
            raise ValueError("`path` must name the file of data 'criteo', got none: give --path")
        for name in ("path", "test_path"):
            if getattr(self, name) is not None:
                check_is_of_data(name, self.data)
        for name in ("interaction", "bottom"):
            if getattr(self, name) is not None and self.model != "dlrm":
                raise ValueError(f"`{name}` is DLRM's, got it for {self.model!r}: leave it out")

    @property
    def table_optimizer(self) -> Optimizer:
        """The optimizer of the (deep) tables."""
        return embedding_optimizers(self.embedding_learning_rate)[self.embedding_optimizer]

    @property
    def shape(self) -> dict[str, Any]:
        """The model's own arguments that are set."""
        largest = "top" if self.model == "dlrm" else "deep"
        found = {"interaction": self.interaction, largest: self.layers, "bottom": self.bottom}
        return {name: value for name, value in found.items() if value is not None}

    def describe(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


OF_DATA = {"path": "criteo", "test_path": "criteo", "buckets": "criteo", "rows": "synthetic"}
"""Settings that mean something for one kind of data alone."""


def check_is_of_data(name: str, data: str) -> None:
    """Raises ValueError if the setting `name` says nothing of that data."""
    wanted = OF_DATA.get(name, data)
    if wanted != data:
        raise ValueError(f"`{name}` is of data {wanted!r}, got it for {data!r}: leave it out, or give --data {wanted}")


CHANGEABLE = frozenset({"compare", "checkpoint_every"})
"""Settings that a resumed run may have otherwise: they do not change its steps."""


def differences(saved: dict[str, Any], wanted: Settings) -> list[str]:
    """What of a saved run's settings differs in a way that would change its course, one text each."""
    now = wanted.describe()
    return [
        f"{field.name} was {saved.get(field.name)}, now {now[field.name]}"
        for field in fields(wanted)
        if field.name not in CHANGEABLE and saved.get(field.name) != now[field.name]
    ]
