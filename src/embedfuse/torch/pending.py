"""The gradients that wait in ledgers, as torch's tools see them: one parameter whose `.grad` stands for them all."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .ledger import Record


class _Standin(Tensor):
    """`[1, 0]`, or `[1, inf]` if a waiting gradient is not finite. Can be looked at, and unscaled by `GradScaler`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("__get__", "__repr__", "_amp_foreach_non_finite_check_and_unscale_"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise RuntimeError(
            f"{func.__name__} cannot see the gradients of fused tables, which are never there as a whole: clip them by "
            "`optimizer.clip_grad_norm_(max_norm, other_parameters)` of the FusedOptimizer, and leave its param_groups "
            "out of torch.nn.utils.clip_grad_norm_"
        )


class PendingGradient(nn.Parameter):
    """Stands for all gradients that wait in the ledgers, where something asks a parameter for its `.grad`.

    Whatever scales `.grad`, as `GradScaler.unscale_` does, scales the gradients that wait then by the same factor.
    """

    waiting: Callable[[], list[Record]]
    drop: Callable[[], None]
    _version: int
    marker: Tensor | None
    marked: Sequence[Record]

    @classmethod
    def of(cls, waiting: Callable[[], list[Record]], drop: Callable[[], None]) -> "PendingGradient":
        """Stands for what `waiting()` lists; `drop` is to forget it."""
        made = cls(torch.zeros(2, dtype=torch.float32, device="cpu"))
        made.waiting, made.drop, made.marker, made.marked = waiting, drop, None, []
        return made

    @property
    def grad(self) -> Tensor | None:
        marker = self.mark(self.waiting())
        return None if marker is None else marker.as_subclass(_Standin)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.drop()

    def mark(self, records: list[Record]) -> Tensor | None:
        """The marker of these records: their factor, and 0 or inf."""
        if not records:
            return None
        self.keep_factors(records)
        if self.marker is None:
            with torch.inference_mode(False), torch.no_grad():
                device = records[0].grad.device
                finite = [torch.isfinite(record.grad).all().to(device) for record in records]
                # 0 and inf are exact in any default type, a factor is not
                flag = torch.where(torch.stack(finite).all(), 0.0, float("inf")).float()
                self.marker = torch.stack([torch.ones_like(flag), flag])
            self.marked = list(records)
        return self.marker

    def keep_factors(self, records: list[Record]) -> None:
        """Leaves the marker's factor to the records it was made for, if `records` are others by now."""
        if self.marker is not None and self.marked != records:
            with torch.inference_mode(False), torch.no_grad():
                factor = self.marker[0].clone()
                for record in self.marked:
                    record.factor = factor if record.factor is None else record.factor * factor
            self.forget()

    def forget(self) -> None:
        """Drops the marker."""
        self.marker, self.marked = None, []
