"""The Triton backend: launches the kernels of `embedfuse/kernels` on CUDA tensors.

No op waits for the device, and the number of launches does not depend on the number of tables, features, bags or ids
(once for each distinct optimizer rule). Every sum is made in a fixed order, so results repeat bit for bit.

With TRITON_INTERPRET=1 in the environment before the first import, the same kernels run on CPU tensors, slowly, for
tests.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...kernels import configs
from ...kernels.join_offsets import join_offsets_kernel
from ...kernels.max_lookup import max_kernel
from ...kernels.prepare_ids import prepare_ids_kernel
from ...plan import FROZEN
from . import BadId, Csr, Policy, Prepared, Rows, Shards, Update, count, device_errors
from .absent_rows import zeros_come_later
from .coefficient_launch import CoefficientBatch, Coefficients
from .compact import compact_row_grad
from .descriptor_facts import TableFacts, alignment, feature_facts, rows_align, table_facts
from .join_bags import join_bags
from .launching import launch, on_device
from .lookup_launch import LookupBatch, Lookups
from .passes import Batch, passes_of, stepping
from .programs import MOST, run
from .summed_runs import SQUARE_SUMS, STEP_ROWS, STORE_SUMS, Target

try:
    import triton
except ImportError as error:
    raise ImportError(
        f"backend 'triton' needs Triton, which cannot be imported here ({error}): pip install 'embedfuse[triton]'"
    ) from error

INTERPRETED = not isinstance(max_kernel, triton.JITFunction)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
JOINED = 512
"""Bags of one program of `join_offsets`."""
PREPARED = 256
"""Ids, or bags, to a program of `kernels/prepare_ids.py`."""


class TritonBackend:
    """Fills in `Backend`. Tile sizes come from `configs.py`; the arguments replace them, for tests and benchmarks.

    Args:
        lookup: `(widest, whether bags are short) → LookupConfig`.
        update: `widest → UpdateConfig`.
    """

    name = "triton"

    def __init__(
        self,
        lookup: Callable[[int, bool], configs.LookupConfig] = configs.lookup_config,
        update: Callable[[int], configs.UpdateConfig] = configs.update_config,
    ) -> None:
        self._lookup_config, self._update_config = lookup, update

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """None if tables of this kind are served, else the reason why not."""
        if dtype not in DTYPES:
            return f"the Triton kernels serve float32, float16 and bfloat16 tables, not {dtype}"
        if INTERPRETED:
            if device.type == "cpu":
                return None
            return "TRITON_INTERPRET=1 is set, so the Triton kernels run in the interpreter, on CPU tensors only"
        if device.type != "cuda":
            return f"the Triton kernels run on CUDA GPUs, not on {device.type} (TRITON_INTERPRET=1 emulates one)"
        return None

    # --- lookups ---------------------------------------------------------------------------------------------------

    def pooled_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, normalised: bool, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """See `Backend`. On a GPU, `policy="raise"` reports at a later call, see `device_errors.py`."""
        if features.shape[0] == 0:
            return table.new_empty((csr.bags, width)), table.new_empty(0, dtype=torch.float32)
        lookups = self.lookups(features)
        # nearly always, and without all that follows
        found = lookups.again(table, features, csr, width, normalised, policy)
        if found is not None:
            return found
        out, scale = lookups.made(table, csr.bags, width, normalised)
        if csr.bags != 0:
            ids, offsets, weights, bags = _contiguous(csr)
            scales = scale if normalised else None
            with on_device(table.device), _checking(table.device, policy) as bad:
                lookups(LookupBatch(table, features, ids, offsets, weights, out, scales, bad, bags, width))
        return out, scale

    def lookups(self, features: Tensor) -> Lookups:
        """What launches lookups of these features."""
        facts = feature_facts(features)
        found: Lookups | None = facts.lookups.get(self._lookup_config)
        if found is None:
            found = facts.lookups[self._lookup_config] = Lookups(self._lookup_config, facts, features)
        return found

    def max_lookup(
        self, table: Tensor, features: Tensor, csr: Csr, width: int, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """`out[b, columns] = max_i w_i row(id_i)` elementwise `[B, width]`, and `winners`, the positions in `ids` they
        came from, int64 `[B, width]`; -1 in an empty bag, whose `out` is 0.

        The first of equal values wins, and the first NaN over all numbers.
        """
        count = features.shape[0]
        out = table.new_empty((csr.bags, width))
        winners = torch.empty((csr.bags, width), dtype=torch.int64, device=table.device)
        if csr.bags == 0 or count == 0:
            return out, winners
        csr = _contiguous(csr)
        facts = feature_facts(features)
        config = configs.max_config(facts.widest)
        if facts.clipped:
            config = configs.whole_rows(config, facts.widest)
        grid = (count * configs.ceil_div(csr.bags, config.lanes), configs.ceil_div(facts.widest, config.block_d))
        with on_device(table.device), _checking(table.device, policy) as bad:
            launch(
                max_kernel, grid, (
                    table, features, csr.ids, csr.offsets, csr.weights, out, winners, bad,
                ), (csr.bags, width), config.warps, {
                    "HAS_WEIGHTS": csr.weights is not None, "CHECK": bad is not None, "CLIPPED": facts.clipped,
                    "ALIGN": rows_align(facts.starts, table.dtype),
                    "OUT_ALIGN": rows_align(alignment(facts.columns, width), out.dtype),
                    "BAGS": config.lanes, "BLOCK_D": config.block_d,
                },
            )  # fmt: skip
        return out, winners

    def coefficient_grad(self, table: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        """See `Backend`."""
        ids, offsets, weights, bags = csr
        out = torch.empty(ids.shape[0], dtype=torch.float32, device=table.device)
        if ids.shape[0] == 0 or bags == 0 or features.shape[0] == 0:
            return out
        facts = feature_facts(features)
        coefficients: Coefficients | None = facts.lookups.get(Coefficients)
        if coefficients is None:
            coefficients = facts.lookups[Coefficients] = Coefficients(facts)
        scales = scale if scale.shape[0] != 0 else None
        if run(coefficients.programs, (table, features, ids, offsets, weights, scales, grad, out, bags)):
            return out
        ids, offsets, weights, bags = _contiguous(csr)
        with on_device(table.device):
            coefficients(CoefficientBatch(table, features, ids, offsets, weights, scales, grad, out, bags))
        return out

    def prepare_ids(self, features: Tensor, csr: Csr, shards: Shards | None, policy: Policy) -> Prepared:
        """See `Backend`. On a GPU, `policy="raise"` reports at a later call, see `device_errors.py`."""
        number, total, device = csr.ids.shape[0], csr.offsets.shape[0] - 1, csr.ids.device
        csr = _contiguous(csr)

        def empty(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int64, device=device)

        made = Prepared(
            rows=empty(number + total),
            starts=None if shards is None else empty(number + total),
            offsets=empty(total + 1),
            weights=None if csr.weights is None else csr.weights.new_empty(number + total),
            places=empty(number),
        )
        if total == 0:
            made.offsets.zero_()
            return made
        described = None if shards is None else shards.described.contiguous()
        programs = configs.ceil_div(number, PREPARED) + configs.ceil_div(total + 1, PREPARED)
        with on_device(device), _checking(device, policy) as bad:
            launch(
                prepare_ids_kernel, (programs,), (
                    features, csr.ids, csr.offsets, csr.weights, described, made.rows, made.starts, made.offsets,
                    made.weights, made.places, bad,
                ), (
                    number, csr.bags, total, features.shape[0], 0 if described is None else described.shape[0],
                    0 if shards is None else shards.stride,
                ), 4, {
                    "HAS_WEIGHTS": csr.weights is not None, "SHARDED": shards is not None,
                    "MODULO": shards is not None and shards.modulo, "CHECK": bad is not None, "BLOCK": PREPARED,
                },
            )  # fmt: skip
        return made

    def join_offsets(self, offsets: Tensor) -> Tensor:
        """See `Backend`."""
        count, bags = offsets.shape[0], offsets.shape[1] - 1
        out = torch.empty(count * bags + 1, dtype=torch.int64, device=offsets.device)
        if count == 0 or bags == 0:
            return out.zero_()
        with on_device(offsets.device):
            launch(
                join_offsets_kernel, (count * configs.ceil_div(bags, JOINED),), (offsets.contiguous(), out),
                (count, bags), 4, {"BAGS": JOINED, "AHEAD": 128},
            )  # fmt: skip
        return out

    def join_bags(self, ids: list[Tensor], offsets: list[Tensor | None], bags: int) -> tuple[Tensor, Tensor] | None:
        """Ids and offsets of features of as many bags, in one launch; None where only PyTorch can. See there."""
        return join_bags(ids, offsets, bags)

    # --- sums by row -----------------------------------------------------------------------------------------------

    def row_update(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> None:
        """See `Backend`."""
        if self.row_update_again(update, csr, scale, grad):
            return
        facts = table_facts(update.tables)
        if facts.rules == {FROZEN}:
            count(update)
            return
        target = Target(STEP_ROWS, update.table, facts.starts, update)
        self._sum_by_row(target, update.features, update.tables, csr, scale, grad, facts=facts)

    def row_update_again(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> bool:
        """`row_update`, if there was such a batch before; else False, and nothing is done."""
        return update.programs is not None and run(update.programs, stepping(update, csr, scale, grad))

    def row_grad(
        self, out: Tensor, features: Tensor, csr: Csr, scale: Tensor, grad: Tensor, rows: Rows | None = None,
        dots: Tensor | None = None, fill: bool = False,
    ) -> None:  # fmt: skip
        """See `Backend`."""
        if features.shape[0] == 0:
            if fill:
                out.zero_()
            return
        if rows is not None:
            facts = table_facts(rows.tables)
            target = Target(STORE_SUMS, out, facts.starts, source=rows.table, sources=facts.sources, fill=fill)
            self._sum_by_row(target, features, rows.tables, csr, scale, grad, dots=dots)
            return
        read = feature_facts(features)
        if read.clipped:
            raise ValueError("`rows` must be given where a feature has a MAX_NORM: the gradient depends on them")
        if dots is not None:
            raise ValueError("`rows` must be given with `dots`, which are made with them")
        self._sum_by_row(Target(STORE_SUMS, out, read.starts, fill=fill), features, read.tables, csr, scale, grad)

    def max_grad(self, out: Tensor, features: Tensor, csr: Csr, winners: Tensor, grad: Tensor) -> None:
        """`w * grad` of each element that won, summed into `out` at its element of the table; see `row_grad`."""
        if features.shape[0]:
            facts = feature_facts(features)
            target = Target(STORE_SUMS, out, facts.starts)
            no_scale = torch.empty(0, dtype=torch.float32, device=out.device)
            # contiguous, so that one offset serves both
            self._sum_by_row(target, features, facts.tables, csr, no_scale, grad.contiguous(), winners.contiguous())

    def sparse_row_grad(
        self, features: Tensor, tables: Tensor, source: Tensor, csr: Csr, scale: Tensor, grad: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """See `Backend`."""
        return compact_row_grad(self, features, tables, source, csr, scale, grad)

    def row_square_sum(self, update: Update, csr: Csr, scale: Tensor, grad: Tensor) -> Tensor:
        """See `Backend`; `grad_scale` and `skip` play no part."""
        squares = torch.zeros(csr.ids.shape[0], dtype=torch.float32, device=grad.device)
        facts = table_facts(update.tables)
        if facts.rules - {FROZEN}:
            target = Target(SQUARE_SUMS, squares, 1, source=update.table, sources=facts.starts)
            self._sum_by_row(target, update.features, update.tables, csr, scale, grad)
        return squares.sum()

    def _sum_by_row(
        self, target: Target, features: Tensor, tables: Tensor, csr: Csr, scale: Tensor, grad: Tensor,
        winners: Tensor | None = None, dots: Tensor | None = None, facts: TableFacts | None = None,
    ) -> None:  # fmt: skip
        if csr.ids.shape[0] == 0 or csr.bags == 0:
            if target.update is not None:
                count(target.update)
            if target.fill:
                target.out.zero_()
            return
        # launchers take addresses only, so types must be what they were told
        csr = _contiguous(csr)
        if scale.dtype is not torch.float32 or not scale.is_contiguous():
            scale = scale.to(torch.float32).contiguous()
        facts = facts or table_facts(tables)
        if target.fill:
            target = target._replace(fill=zeros_come_later(target.out, facts, csr.ids.shape[0]))
        config = self._update_config(facts.widest)
        if dots is not None:
            config = configs.dots_config(config)
        if target.source is not None and not (facts.clipped or dots is not None):
            target = target._replace(source=None)
        with on_device(grad.device):
            passes = passes_of(target, facts, config, features, csr, scale, grad, winners, dots)
            program = passes(Batch.of(target, features, tables, csr, scale, grad, winners, dots))
        programs = None if target.update is None else target.update.programs
        if program is not None and programs is not None and program not in programs:
            programs.insert(0, program)
            del programs[MOST:]


def _contiguous(csr: Csr) -> Csr:
    ids, offsets, weights, bags = csr
    # nearly always, and asked in every call
    if (
        offsets.dtype is torch.int64 and ids.is_contiguous() and offsets.is_contiguous()
        and (weights is None or (weights.dtype is torch.float32 and weights.is_contiguous()))
    ):  # fmt: skip
        return csr
    return Csr(
        ids.contiguous(),
        offsets.to(torch.int64).contiguous(),
        None if weights is None else weights.to(torch.float32).contiguous(),
        bags,
    )


def _checking(device: torch.device, policy: Policy) -> contextlib.AbstractContextManager[Tensor | None]:
    """The word that kernels write bad ids to, or None if nobody asks; on a GPU raises first what earlier ones wrote."""
    return _reporting(device) if policy == "raise" else _UNCHECKED


_UNCHECKED = contextlib.nullcontext()


@contextlib.contextmanager
def _reporting(device: torch.device) -> Iterator[Tensor]:
    if device.type == "cuda":
        yield device_errors.reported(device)
    else:
        word = torch.zeros(1, dtype=torch.int64, device=device)
        yield word
        found = device_errors.decode(int(word))
        if found is not None:
            raise BadId(found[0])


BACKEND = TritonBackend()
