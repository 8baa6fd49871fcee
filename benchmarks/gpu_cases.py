"""The cases of `gpu_engine.py`: tables, batches, the two calls that are timed, and a check against PyTorch."""

import dataclasses
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from embedfuse.optim import RowWiseAdagrad
from embedfuse.plan import ALIGNMENT, ROW_BASE, T_RULE, T_SLOT0, PlannedFeature, plan_group
from embedfuse.torch.backends import Csr, Update
from embedfuse.torch.backends.triton import TritonBackend

BATCHES = 3
DEVICE = torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Shape:
    """`tables` tables of `rows` rows, each looked up by one feature with `bags` bags of `length` ids."""

    tables: int
    bags: int
    length: int
    rows: int
    dim: int
    zipf: float = 0.0
    hot: float = 0.0  # share of ids that are row 1
    dtype: str = "float32"

    def __str__(self) -> str:
        kind = f"zipf {self.zipf}" if self.zipf else f"{self.hot:.0%} one row" if self.hot else "uniform"
        suffix = "" if self.dtype == "float32" else f" {self.dtype}"
        return f"{self.tables}x{self.bags}x{self.length} {self.rows // 1000}k d{self.dim} {kind}{suffix}"


MAIN = [
    dataclasses.replace(shape, zipf=zipf)
    for shape in (
        Shape(10, 2048, 20, 1_000_000, 128),
        Shape(26, 65536, 1, 500_000, 128),
        Shape(8, 4096, 64, 2_000_000, 64),
        Shape(1, 8192, 128, 1_000_000, 512),
    )
    for zipf in (0.0, 1.05)
]
MORE = [
    Shape(1, 16384, 128, 1_000_000, 128, hot=0.5),
    Shape(10, 2048, 20, 1_000_000, 128, dtype="float16"),
    Shape(4, 512, 8, 10_000, 16),
]


class Case:
    """Tables, batches and the calls to time."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        group = plan_group([(shape.rows, shape.dim)] * shape.tables, [
            PlannedFeature(table, "sum") for table in range(shape.tables)
        ])  # fmt: skip
        self.group, self.width = group, group.width
        dtype = getattr(torch, shape.dtype)
        self.table = torch.empty(group.size, dtype=dtype, device=DEVICE).uniform_(-1, 1)
        self.features = torch.from_numpy(group.features).to(DEVICE)
        stride = -(-shape.rows // ALIGNMENT) * ALIGNMENT
        tables = group.tables.copy()
        tables[:, T_RULE] = 0
        tables[:, T_SLOT0] = range(0, stride * shape.tables, stride)
        self.slot_stride = stride
        self.optimizer = RowWiseAdagrad(0.01)
        self.update = Update(
            self.table, self.features, torch.from_numpy(tables).to(DEVICE), [RowWiseAdagrad],
            torch.zeros(stride * shape.tables, device=DEVICE),
            torch.tensor([self.optimizer.hyper(0.01)] * shape.tables, dtype=torch.float64, device=DEVICE),
            torch.ones(shape.tables, dtype=torch.int64, device=DEVICE), at_random=False,
        )  # fmt: skip
        self.batches = [self._batch(number) for number in range(BATCHES)]
        self.no_scale = torch.empty(0, device=DEVICE)
        unique = statistics.mean(len(self.keys(csr).unique()) for csr, _ in self.batches)
        size, count = self.table.element_size(), shape.tables * shape.bags * shape.length
        row, pooled = shape.dim * size, shape.tables * shape.bags * shape.dim * size
        self.ids, self.unique = count, unique
        self.forward_bytes = unique * row + pooled + count * 8
        self.logical_bytes = count * row + pooled + count * 8
        self.update_bytes = unique * (2 * row + 8) + pooled + count * 8

    def _batch(self, seed: int) -> tuple[Csr, Tensor]:
        shape = self.shape
        generator = torch.Generator(DEVICE).manual_seed(seed)
        count = shape.tables * shape.bags * shape.length
        if shape.zipf:
            weight = torch.arange(1, shape.rows + 1, dtype=torch.float64, device=DEVICE) ** -shape.zipf
            total = weight.cumsum(0)
            drawn = torch.rand(count, generator=generator, dtype=torch.float64, device=DEVICE) * total[-1]
            # spread the frequent rows over the table
            ids = torch.searchsorted(total, drawn).clamp(max=shape.rows - 1) * 2654435761 % shape.rows
        else:
            ids = torch.randint(shape.rows, (count,), generator=generator, device=DEVICE)
        if shape.hot:
            ids[torch.rand(count, generator=generator, device=DEVICE) < shape.hot] = 1
        offsets = torch.arange(0, count + 1, shape.length, device=DEVICE)
        grad = torch.empty(shape.bags, self.width, dtype=self.table.dtype, device=DEVICE)
        grad.normal_(generator=generator)
        return Csr(ids, offsets, None, shape.bags), grad

    def keys(self, csr: Csr) -> Tensor:
        """Each id's row among all tables."""
        return csr.ids.view(self.shape.tables, -1) + self.features[:, ROW_BASE, None]

    def forward(self, backend: TritonBackend, batch: int) -> Tensor:
        csr, _ = self.batches[batch]
        return backend.pooled_lookup(self.table, self.features, csr, self.width, False, "raise")[0]

    def step(self, backend: TritonBackend, batch: int) -> None:
        csr, grad = self.batches[batch]
        backend.row_update(self.update, csr, self.no_scale, grad)

    def check(self, backend: TritonBackend) -> dict[str, float]:
        """Largest error of both ops against PyTorch in float64, relative to the largest value."""
        shape = self.shape
        (csr, grad), errors = self.batches[0], {}
        out = self.forward(backend, 0)
        rounding = 2.0**-11 if shape.dtype == "float16" else 1e-6
        worst = 0.0
        for number in range(shape.tables):
            start = number * self._table_stride()
            table = self.table[start : start + shape.rows * shape.dim].view(shape.rows, shape.dim)
            ids = csr.ids.view(shape.tables, shape.bags, shape.length)[number]
            columns = slice(number * shape.dim, (number + 1) * shape.dim)
            for some in range(0, shape.bags, 4096):
                expected = table[ids[some : some + 4096]].double().sum(1)
                error = (out[some : some + 4096, columns].double() - expected).abs().max()
                worst = max(worst, float(error / expected.abs().max()))
        errors["forward"] = worst
        rows, inverse = self.keys(csr).reshape(-1).unique(return_inverse=True)
        bag = torch.arange(shape.bags, device=DEVICE).repeat_interleave(shape.length)
        before, slots = self.table.clone(), self.update.slots.clone()
        self.step(backend, 0)
        total = torch.zeros(len(rows), shape.dim, dtype=torch.float64, device=DEVICE)
        per = shape.bags * shape.length
        for number in range(shape.tables):
            columns = slice(number * shape.dim, (number + 1) * shape.dim)
            total.index_add_(0, inverse[number * per : (number + 1) * per], grad[:, columns].double()[bag])
        number, local = rows // shape.rows, rows % shape.rows
        place = number * self.slot_stride + local
        state = slots[place].double() + (total * total).mean(1)
        step = 0.01 / (state.sqrt() + self.optimizer.epsilon)
        at = number * self._table_stride() + local * shape.dim
        columns = torch.arange(shape.dim, device=DEVICE)
        for some in range(0, len(rows), 1 << 18):
            part = slice(some, some + (1 << 18))
            index = at[part, None] + columns
            before[index] = (before[index].double() - step[part, None] * total[part]).to(before.dtype)
        slots[place] = state.float()
        errors["update"] = float((self.table - before).abs().max())
        errors["state"] = float(((self.update.slots - slots).abs() / (slots.abs() + 1)).max())
        errors["allowed"] = 8 * rounding
        return errors

    def _table_stride(self) -> int:
        return -(-self.shape.rows * self.shape.dim // ALIGNMENT) * ALIGNMENT
