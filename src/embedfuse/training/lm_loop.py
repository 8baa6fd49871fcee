"""The training loop of one language model."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..data.python_text import Text
from ..torch.memory import SlotUse, record_usage
from .lm_model import Kind, bits_per_byte, differing_block, make_model, make_optimizers, next_byte_loss, rate_factor
from .lm_settings import LanguageSettings
from .metrics import DivergedError

REPORT_EVERY = 10


@dataclass(frozen=True)
class LanguageReport:
    """Sent every few steps; `bits` of the held-out text only after an evaluation."""

    step: int
    steps: int
    training_bits: float
    bytes_per_second: float
    bits: float | None = None


@dataclass
class LanguageResult:
    """Of one model. FLOPs are those of a forward pass, for each byte: of the block that differs, and of all."""

    kind: str
    bits_per_byte: float
    parameters: int
    block_flops: int
    flops: int
    milliseconds_per_step: float
    seconds: float
    curve: list[dict[str, float]] = field(default_factory=list)
    usage: dict[str, Any] | None = None


class LanguageTrainer:
    """Trains one of the models; equal settings give both the same text in the same order.

    Args:
        kind: which one.
        text: to train on and to be tested with.
        settings: all else.
        watch: called with a `LanguageReport` every few steps.
    """

    def __init__(
        self, kind: Kind, text: Text, settings: LanguageSettings, watch: Callable[[LanguageReport], None]
    ) -> None:
        self.kind, self.text, self.settings, self._watch = kind, text, settings, watch
        self.model = make_model(kind, settings)
        self.optimizers = make_optimizers(self.model, settings)
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self._dense = [parameter for group in self.optimizers[0].param_groups for parameter in group["params"]]
        self._recent: list[Tensor] = []
        self._seconds = 0.0
        self._curve: list[dict[str, float]] = []

    def train(self) -> tuple[LanguageResult, SlotUse | None]:
        """Makes all steps; returns what came of it, and which slots the held-out text read.

        Raises:
            DivergedError: the loss is not finite any more.
        """
        settings = self.settings
        every = max(1, settings.steps // settings.evaluations)
        self.model.train()
        for step in range(1, settings.steps + 1):
            began = time.perf_counter()
            self._step(step - 1)
            if step % REPORT_EVERY == 0 or step % every == 0:
                # waits for a GPU, so that its time is in
                self._training_bits(step)
            self._seconds += time.perf_counter() - began
            evaluated = step % every == 0 and step < settings.steps
            if evaluated:
                self._evaluate(step, max(1, settings.windows // 4))
            elif step % REPORT_EVERY == 0:
                self._watch(self._report(step, None))
        recorder: contextlib.AbstractContextManager[dict[str, SlotUse]]
        recorder = record_usage(self.model) if self.kind == "memory" else contextlib.nullcontext({})
        with recorder as uses:
            bits = self._evaluate(settings.steps, settings.windows)
        use = next(iter(uses.values()), None)
        return self._result(bits, use), use

    def _step(self, number: int) -> None:
        settings = self.settings
        factor = rate_factor(number, settings.steps)
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        window = torch.from_numpy(self.text.batch(settings.batch_size, settings.context, settings.seed, number))
        loss = next_byte_loss(self.model, window.to(settings.device))
        loss.backward()
        nn.utils.clip_grad_norm_(self._dense, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._recent = [*self._recent[1 - REPORT_EVERY :], loss.detach()]

    def _training_bits(self, step: int) -> float:
        bits = float(torch.stack(self._recent).mean()) / math.log(2)
        if not math.isfinite(bits):
            raise DivergedError(f"the loss of the {self.kind} model is {bits} at step {step}: try lower learning rates")
        return bits

    def _report(self, step: int, bits: float | None) -> LanguageReport:
        seen = step * self.settings.batch_size * self.settings.context
        return LanguageReport(
            step, self.settings.steps, self._training_bits(step), seen / max(self._seconds, 1e-9), bits
        )

    def _evaluate(self, step: int, windows: int) -> float:
        bits = bits_per_byte(self.model, self.text, self.settings, windows)
        report = self._report(step, bits)
        self._curve.append({"step": step, "bits_per_byte": bits, "training_bits": report.training_bits})
        self._watch(report)
        return bits

    def _result(self, bits: float, use: SlotUse | None) -> LanguageResult:
        settings = self.settings
        return LanguageResult(
            self.kind, bits, sum(parameter.numel() for parameter in self.model.parameters()),
            differing_block(self.model, settings).flops_per_token, self.model.flops_per_token(settings.context),
            round(1000 * self._seconds / settings.steps, 2), round(self._seconds, 2), self._curve,
            None if use is None else use.stats().describe(),
        )  # fmt: skip
