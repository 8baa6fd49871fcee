"""Times the primitives of memory layers beside PyTorch's own, and FBGEMM's where it is installed.

    python benchmarks/memory_layers.py --out memory.json [--device cuda] [--cases pkm_base,tiny] [--rounds 15]

Shapes are those of published models. Ids are uniform, Zipf 1.05, or those of a random product-key memory ("product
keys"). Timed, in turns in one process, medians of wall time (CUDA: with synchronisation), and of
the GPU's time (`device ms`), in which a slow host plays no part:

- `forward`: `gather_reduce_sum` against `torch.nn.functional.embedding_bag` with weights.
- `forward and backward`: gradients of table (dense) and weights; torch has no bf16 gradient of weights on CUDA, so
  there it is a gather and an einsum if that fits, else nothing.
- `step`: forward, backward and an Adam step: ours on the rows that were read (`update="step"`), torch's by a dense
  gradient and `torch.optim.Adam(fused=True)`.
- `fbgemm`: its table-batched lookup with weights, forward, and forward + backward with SGD inside.
- `top-k`: `product_topk` against `topk` of both halves, the full grid, and `topk` of that.
- `experts`: `expert_lookup` against gathers and einsums.

Before it is timed, each result is compared with PyTorch's. `GB/s` counts every row that is read, as the papers do.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from clocks import about, timed, timed_on_device
from torch import Tensor

import embedfuse
from embedfuse.torch import EmbeddingCollection, FusedOptimizer, expert_lookup, gather_reduce_sum, product_topk

Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """`tokens` bags of `references` rows of a table `[rows, dim]`."""

    name: str
    rows: int
    dim: int
    tokens: int
    references: int
    dtype: torch.dtype = torch.float32
    ids: str = "uniform"


PKM = Case("pkm_base", 512**2, 1024, 8192, 128)
CASES = [
    PKM,
    dataclasses.replace(PKM, name="pkm_base_zipf", ids="zipf"),
    dataclasses.replace(PKM, name="pkm_base_product_keys", ids="product keys"),
    dataclasses.replace(PKM, name="pkm_base_bf16", dtype=torch.bfloat16),
    dataclasses.replace(PKM, name="pkm_2048", tokens=2048),
    Case("mem_plus_373m", 1024**2, 1024, 32768, 128, torch.bfloat16),
    Case("mem_plus_7b", 1024**2, 4096, 8192, 128, torch.bfloat16),
    Case("umv2_kernel", 131072, 288, 8192, 128, torch.bfloat16),
    Case("sae", 131072, 4096, 4096, 32, torch.bfloat16),
    Case("tiny", 1000, 64, 16, 4),
]


def take_turns(runs: dict[str, Run], device: torch.device, rounds: int, what: str = "") -> dict[str, dict[str, float]]:
    """Median milliseconds of each, in turns, after two rounds to warm up: `what ms`, and on a GPU `what device ms`."""
    clocks: dict[str, Callable[[Run], float]] = {f"{what} ms".strip(): lambda run: timed(run, device)}
    if device.type == "cuda":
        clocks[f"{what} device ms".strip()] = timed_on_device
    times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in runs} for clock in clocks}
    for number in range(rounds + 2):
        for name, run in runs.items():
            for clock, spent in clocks.items():
                seconds = spent(run)
                if number >= 2:
                    times[clock][name].append(seconds)
    return {
        clock: {name: round(statistics.median(values) * 1e3, 4) for name, values in found.items()}
        for clock, found in times.items()
    }


def draw(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Table, ids `[T, K]`, weights `[T, K]` and upstream gradient `[T, D]`."""
    generator = torch.Generator(device).manual_seed(0)
    table = torch.randn(case.rows, case.dim, device=device, generator=generator, dtype=torch.float32).to(case.dtype)
    shape = (case.tokens, case.references)
    if case.ids == "product keys":
        half, heads, topk = int(case.rows**0.5), 4, case.references // 4
        halves = [torch.randn(case.tokens * heads, half, device=device, generator=generator) for _ in range(2)]
        ids = product_topk(*halves, topk)[1].view(shape)
    elif case.ids == "zipf":
        drawn = torch.rand(shape, device=device, generator=generator, dtype=torch.float64)
        top = float(case.rows) ** -0.05 - 1
        ids = ((top * drawn + 1) ** -20).long().clamp(1, case.rows) - 1
        ids = ids * 2_147_483_629 % case.rows
    else:
        ids = torch.randint(case.rows, shape, device=device, generator=generator)
    weights = torch.rand(shape, device=device, generator=generator).to(case.dtype)
    upstream = torch.randn(case.tokens, case.dim, device=device, generator=generator).to(case.dtype)
    return table, ids, weights, upstream


def by_torch(table: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same lookup by PyTorch's op."""
    return F.embedding_bag(ids, table, mode="sum", per_sample_weights=weights)


def gathered(table: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same by a gather and an einsum, for what the op refuses."""
    return torch.einsum("tk,tkd->td", weights, table[ids])


def both_ways(function: Callable[..., Tensor], table: Tensor, ids: Tensor, weights: Tensor, upstream: Tensor) -> Run:
    """Forward and backward with gradients of table and weights."""
    leaves = [table.detach().requires_grad_(), weights.detach().requires_grad_()]

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(leaves[0], ids, leaves[1]), leaves, upstream)

    return run


def alike(found: Tensor, expected: Tensor) -> None:
    """Raises unless both agree to the precision of their type."""
    loose = 2e-2 if found.dtype in (torch.bfloat16, torch.float16) else 1e-4
    scale = float(expected.abs().max()) + 1e-30
    worst = float((found.float() - expected.float()).abs().max()) / scale
    if not worst < loose:
        raise AssertionError(f"results differ by {worst:.2g} of the largest")


def stepped(case: Case, ours: bool, table: Tensor, ids: Tensor, weights: Tensor, upstream: Tensor) -> Run:
    """Forward, backward and an Adam step."""
    given = weights.detach().requires_grad_()
    if not ours:
        leaf = torch.nn.Parameter(table.clone())
        adam = torch.optim.Adam([leaf], 1e-3, fused=True)

        def run_torch() -> None:
            by_torch(leaf, ids, given.detach()).backward(upstream)
            adam.step()
            adam.zero_grad()

        return run_torch
    config = embedfuse.TableConfig(
        case.rows, case.dim, initializer=0.0, combiner="sum", dtype=str(case.dtype).removeprefix("torch.")
    )
    rule = embedfuse.Adam(1e-3, bias_correction=True, epsilon=1e-8)
    collection = EmbeddingCollection({"rows": embedfuse.FeatureConfig(config)}, rule, device=table.device)
    optimizer = FusedOptimizer(collection)

    def run_ours() -> None:
        gather_reduce_sum(collection, ids, given.detach()).backward(upstream)
        optimizer.step()

    return run_ours


def fbgemm(case: Case, table: Tensor, ids: Tensor, weights: Tensor, upstream: Tensor) -> dict[str, Run]:
    """FBGEMM's lookup, if it is installed and serves the type."""
    if table.device.type != "cuda" or case.dtype == torch.bfloat16:
        return {}
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return {}
    kind = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16}[case.dtype]
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(case.rows, case.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)], optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=0.0, weights_precision=kind, output_dtype=kind, pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE, stochastic_rounding=False,
    ).to(table.device)  # fmt: skip
    tbe.split_embedding_weights()[0].copy_(table)
    flat = ids.reshape(-1)
    offsets = torch.arange(0, flat.numel() + 1, case.references, device=table.device)
    given = weights.reshape(-1).float().requires_grad_()
    return {
        "forward": lambda: tbe(flat, offsets, given.detach()),
        "forward and backward": lambda: tbe(flat, offsets, given).backward(upstream),
    }


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """All timings of one case."""
    table, ids, weights, upstream = draw(case, device)
    size = case.tokens * case.references * case.dim * table.element_size()
    row: dict[str, Any] = {"case": case.name, "shape": f"{case.rows} x {case.dim}, {case.tokens} x {case.references}",
                           "dtype": str(case.dtype), "ids": case.ids}  # fmt: skip
    theirs = by_torch
    half_on_gpu = device.type == "cuda" and case.dtype == torch.bfloat16
    alike(gather_reduce_sum(table, ids, weights), theirs(table, ids, weights))
    extra = fbgemm(case, table, ids, weights, upstream)
    with torch.no_grad():
        runs = {"ours": lambda: gather_reduce_sum(table, ids, weights), "torch": lambda: theirs(table, ids, weights)}
        if extra:
            runs["fbgemm"] = extra["forward"]
        row |= take_turns(runs, device, rounds, "forward")
    row["forward GB/s"] = round(size / row["forward ms"]["ours"] / 1e6, 1)
    rival = gathered if half_on_gpu else by_torch
    runs = {"ours": both_ways(gather_reduce_sum, table, ids, weights, upstream)}
    if not (half_on_gpu and size > 40e9):
        runs["torch"] = both_ways(rival, table, ids, weights, upstream)
        for mine, other in zip(runs["ours"](), runs["torch"](), strict=True):
            alike(mine, other)
    if extra:
        runs["fbgemm"] = extra["forward and backward"]
    row |= take_turns(runs, device, rounds, "forward and backward")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runs["ours"]()
        row["peak bytes of forward and backward"] = torch.cuda.max_memory_allocated() - before
    del runs, extra
    if case.rows * case.dim < 1.2e9:
        arguments = (table, ids, weights, upstream)
        runs = {"ours": stepped(case, True, *arguments), "torch": stepped(case, False, *arguments)}
        row |= take_turns(runs, device, rounds, "step")
    return row


def top_k(device: torch.device, rounds: int) -> dict[str, Any]:
    """`product_topk` of 32,768 pairs of 512 scores, k 32 (2,048 pairs on a CPU)."""
    pairs, n, k = (32768 if device.type == "cuda" else 2048), 512, 32
    a, b = (torch.randn(pairs, n, device=device) for _ in range(2))

    def grid() -> tuple[Tensor, Tensor]:
        (left, i), (right, j) = a.topk(k), b.topk(k)
        best, place = (left[:, :, None] + right[:, None]).flatten(1).topk(k)
        return best, i.gather(1, place // k) * n + j.gather(1, place % k)

    torch.testing.assert_close(product_topk(a, b, k)[0], grid()[0])
    runs: dict[str, Run] = {"ours": lambda: product_topk(a, b, k), "torch": grid}
    return {"case": "product_topk", "shape": f"{pairs} x {n} x {n}, k {k}", **take_turns(runs, device, rounds)}


def experts(device: torch.device, rounds: int) -> dict[str, Any]:
    """`expert_lookup` of PEER: 1024² experts, 128 a token."""
    gpu = device.type == "cuda"
    rows, dim, tokens = (1024**2, 256, 8192) if gpu else (65536, 256, 512)
    down, up = (torch.randn(rows, dim, device=device) for _ in range(2))
    x, ids = torch.randn(tokens, dim, device=device), torch.randint(rows, (tokens, 128), device=device)
    scores = torch.rand(tokens, 128, device=device)

    def plain() -> Tensor:
        hidden = F.gelu(torch.einsum("tkd,td->tk", down[ids], x)) * scores
        return torch.einsum("tk,tkd->td", hidden, up[ids])

    alike(expert_lookup(x, down, up, ids, scores, "gelu"), plain())
    runs: dict[str, Run] = {"ours": lambda: expert_lookup(x, down, up, ids, scores, "gelu"), "torch": plain}
    return {"case": "experts", "shape": f"{rows} x {dim}, {tokens} x 128", **take_turns(runs, device, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", default="", help="names with commas between; pkm_2048,tiny on a CPU")
    options = parser.parse_args()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    default = ",".join(case.name for case in CASES) if gpu else "pkm_2048,tiny"
    chosen = (options.cases or default).split(",")
    result: dict[str, Any] = {
        **about(device), "cases": [],
    }  # fmt: skip

    def add(row: dict[str, Any]) -> None:
        result["cases"].append(row)
        print(row, flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    for case in CASES:
        if case.name in chosen:
            add(measure(case, device, options.rounds))
            if gpu:
                torch.cuda.empty_cache()
    add(top_k(device, options.rounds))
    add(experts(device, options.rounds))


if __name__ == "__main__":
    main()
