"""Training the reference models: the loop, its checkpoints, the baseline, and the report that compares them."""

from .checkpoints import ResumeError
from .compare import run
from .loop import Interrupted
from .settings import Settings

__all__ = ["Interrupted", "ResumeError", "Settings", "run"]
