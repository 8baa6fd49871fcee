"""The native engine for CPU tensors (`embedfuse.cpu`): vector code for this processor, PyTorch's threads."""

import torch
from torch import Tensor

from ... import cpu
from ...optim.base import apply_rule
from ...plan import FROZEN, T_OFFSET, T_RULE, T_SLOT0
from . import BadId, Csr, Policy, Prepared, Rows, Shards, Update, accumulation_dtype, count
from .eager_sums import join_offsets, view_of_table
from .rounding import rounded


def _packed(csr: Csr) -> Csr:
    weights = None if csr.weights is None else csr.weights.contiguous()
    return Csr(csr.ids.contiguous(), csr.offsets.contiguous(), weights, csr.bags)


def _is_skipped(update: Update) -> bool:
    return update.skip is not None and float(update.skip) != 0


class CpuBackend:
    """See `Backend`."""

    name = "cpu"

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"the native engine reads the memory of the CPU, not of {device.type}"
        if str(dtype).removeprefix("torch.") not in cpu.DTYPES:
            return f"the native engine knows {', '.join(cpu.DTYPES)}, not {dtype}"
        return None

    def pooled_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, normalised: bool, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        out = table.new_empty((csr.bags, width))
        places = features.shape[0] * csr.bags if normalised else 0
        scale = table.new_empty(places, dtype=accumulation_dtype(table.dtype))
        bad = cpu.pooled_lookup(
            table, features, _packed(csr), out, scale, checked=policy == "raise", threads=torch.get_num_threads()
        )
        if bad is not None:
            raise BadId(bad)
        return out, scale

    def max_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """Max pooling and the position each element came from, see `embedfuse.cpu.max_lookup`."""
        out = table.new_empty((csr.bags, width))
        winners = table.new_empty((csr.bags, width), dtype=torch.int64)
        bad = cpu.max_lookup(
            table, features, _packed(csr), out, winners, checked=policy == "raise", threads=torch.get_num_threads()
        )
        if bad is not None:
            raise BadId(bad)
        return out, winners

    def max_grad(self, out: Tensor, features: Tensor, csr: Csr, winners: Tensor, grad: Tensor) -> None:
        """The gradient of `max_lookup`, see `embedfuse.cpu.max_grad`."""
        cpu.max_grad(out, features, _packed(csr), winners.contiguous(), grad, threads=torch.get_num_threads())

    @torch.no_grad()
    def row_update(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> None:
        count(update)
        if _is_skipped(update):
            return
        grad_scale = 1.0 if update.grad_scale is None else float(update.grad_scale)
        rules = [cpu.rule_number(rule.native) for rule in update.rules]
        csr = _packed(csr)
        cpu.row_update(
            update, csr, scale.contiguous(), grad, rules, grad_scale=grad_scale, threads=torch.get_num_threads()
        )
        if min(rules, default=0) < 0:
            for number, rule in enumerate(update.tables[:, T_RULE].tolist()):
                if rule != FROZEN and rules[rule] < 0:
                    self._update_in_torch(update, csr, scale, grad, number, grad_scale)

    def sparse_row_grad(
        self, features: Tensor, tables: Tensor, source: Tensor, csr: Csr, scale: Tensor, grad: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """See `Backend`."""
        none = source.new_empty(0, dtype=torch.float64)
        slots = source.new_empty(0, dtype=accumulation_dtype(source.dtype))
        update = Update(source, features, tables, (), slots, none, csr.offsets[:0])
        csr, scale = _packed(csr), scale.contiguous()
        return [
            (torch.from_numpy(rows), torch.from_numpy(sums))
            for rows, sums in (
                cpu.collect_rows(update, csr, scale, grad, number, threads=torch.get_num_threads())
                for number in range(tables.shape[0])
            )
        ]

    def join_offsets(self, offsets: Tensor) -> Tensor:
        """See `Backend`."""
        return join_offsets(offsets)

    def _update_in_torch(
        self, update: Update, csr: Csr, scale: Tensor, grad: Tensor, number: int, grad_scale: float
    ) -> None:
        """Steps one table whose rule the engine does not have: sums natively, the rule in PyTorch."""
        rows, sums = map(
            torch.from_numpy,
            cpu.collect_rows(update, csr, scale.contiguous(), grad, number, threads=torch.get_num_threads()),
        )
        described = update.tables[number].tolist()
        rule = update.rules[described[T_RULE]]
        weights = view_of_table(update.table, described, T_OFFSET, "element")
        slots = [view_of_table(update.slots, described, T_SLOT0 + i, kind) for i, kind in enumerate(rule.slot_kinds)]
        w = weights[rows].to(sums.dtype)
        state = tuple(slot[rows] for slot in slots)
        w, state = apply_rule(rule, w, sums * grad_scale, state, update.hyper[number], update.steps[number], torch)
        weights[rows] = rounded(w, weights.dtype, update.hyper[number], update.steps[number], rows)
        for slot, value in zip(slots, state, strict=True):
            slot[rows] = value

    def row_grad(
        self, out: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor, rows: Rows | None = None,
        dots: Tensor | None = None, fill: bool = False,
    ) -> None:  # fmt: skip
        if fill:
            out.zero_()
        csr, threads = _packed(csr), torch.get_num_threads()
        cpu.row_grad(out, features, csr, scale.contiguous(), grad, rows, dots, threads=threads)

    def prepare_ids(self, features: Tensor, csr: Csr, shards: Shards | None, policy: Policy) -> Prepared:
        csr = _packed(csr)
        if shards is not None:
            shards = shards._replace(described=shards.described.contiguous())
        ids = csr.ids.shape[0]
        places = ids + csr.offsets.shape[0] - 1
        prepared = Prepared(
            rows=csr.offsets.new_empty(places),
            starts=None if shards is None else csr.offsets.new_empty(places),
            offsets=torch.empty_like(csr.offsets),
            weights=None if csr.weights is None else csr.weights.new_empty(places),
            places=csr.offsets.new_empty(ids),
        )
        bad = cpu.prepare_ids(
            features, csr, shards, prepared, checked=policy == "raise", threads=torch.get_num_threads()
        )
        if bad is not None:
            raise BadId(bad)
        return prepared

    def row_square_sum(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        total = cpu.row_square_sum(update, _packed(csr), scale.contiguous(), grad, threads=torch.get_num_threads())
        return torch.tensor(total, dtype=accumulation_dtype(update.table.dtype), device=update.table.device)

    def coefficient_grad(self, table: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        out = table.new_empty(csr.ids.shape[0], dtype=accumulation_dtype(table.dtype))
        cpu.coefficient_grad(
            table, features, _packed(csr), scale.contiguous(), grad, out, threads=torch.get_num_threads()
        )
        return out


BACKEND = CpuBackend()
