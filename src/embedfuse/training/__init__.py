"""Training the reference models: the loop, its checkpoints, the baseline, and the report that compares them."""

from .checkpoints import ResumeError
from .compare import run
from .loop import Interrupted
from .metrics import DivergedError
from .settings import Settings

__all__ = ["DivergedError", "Interrupted", "ResumeError", "Settings", "run"]
