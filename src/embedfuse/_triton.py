"""Triton where it is installed; a stand-in where it is not, so that files holding kernels still import.

Importing Triton loads no tensor framework.
"""

from types import SimpleNamespace
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError as error:
    _reason = str(error)

    def _unavailable(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"this needs Triton, which cannot be imported here ({_reason})")

    def _jit(function: Any = None, **_options: Any) -> Any:
        return _unavailable if function is not None else lambda _function: _unavailable

    triton: Any = SimpleNamespace(jit=_jit, autotune=None, next_power_of_2=None, cdiv=None)  # type: ignore[no-redef]
    # numbers that kernels share are made with it, too
    tl: Any = SimpleNamespace(constexpr=int)  # type: ignore[no-redef]

__all__ = ["tl", "triton"]
