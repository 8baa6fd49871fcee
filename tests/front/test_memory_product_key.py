"""`ProductKeyMemory` is what a plain composition in float64 says, in all its options, and says what is wrong."""

import copy
import pickle
from typing import Any

import pytest
import torch
from memory_judge import check_against, product_key_memory
from torch import Tensor, nn

from embedfuse.torch import FusedOptimizer, use_backend
from embedfuse.torch.memory import MemoryPlus, ProductKeyMemory, ValueTable, param_groups

SIZES: dict[str, Any] = {"dim": 6, "num_keys": 7, "dim_key": 4, "heads": 2, "topk": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "layer": {"query_norm": "layer"},
    "rms": {"query_norm": "rms"},
    "no-norm": {"query_norm": None},
    "relu-silu": {"score_function": "relu", "gating": "silu"},
    "sigmoid-swilu": {"score_function": "sigmoid", "gating": "swilu", "query_norm": "layer"},
    "no-score-function": {"score_function": None, "output_projection": True},
    "shared-keys": {"shared_keys": True, "dim_value": 5},
    "qk-norm": {"qk_norm": True, "query_norm": None, "heads": 1},
    "all-slots": {"topk": 7, "heads": 3, "shared_keys": True, "qk_norm": True},
}


def make(**options: Any) -> ProductKeyMemory:
    """A small memory in float64 whose parameters are all random."""
    memory = ProductKeyMemory(**{**SIZES, **options}).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for buffer in memory.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    return memory


def tokens(*shape: int, dim: int = 6) -> Tensor:
    return torch.randn(*shape, dim, dtype=torch.float64)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", OPTIONS)
def test_is_the_plain_composition(name: str, padded: bool, training: bool) -> None:
    memory = make(**OPTIONS[name]).train(training)
    x = tokens(4, 5)
    mask = torch.rand(4, 5) > 0.4 if padded else None
    check_against(product_key_memory, memory, x, mask)


@pytest.mark.parametrize("shape", [(), (1,), (9,), (2, 1, 4)], ids=str)
def test_any_leading_dimensions(shape: tuple[int, ...], placement: tuple[str, str]) -> None:
    name, device = placement
    memory = make(query_norm="layer", gating="swilu")
    if name == "triton":
        # it has no float64
        memory = memory.float()
    memory = memory.to(device)
    x = tokens(*shape).to(memory.out.weight).requires_grad_()  # type: ignore[union-attr]
    with use_backend(name):
        out = memory(x)
        upstream = torch.randn_like(out)
        out.backward(upstream)
    grads = {key: value.grad.clone() for key, value in memory.named_parameters() if value.grad is not None}
    p = {key: value.detach().double().cpu().requires_grad_() for key, value in memory.named_parameters()}
    expected = product_key_memory(memory, p, x.detach().double().cpu().reshape(-1, 6)).view(out.shape)
    expected.backward(upstream.double().cpu())
    close = {"rtol": 1e-9, "atol": 1e-9} if x.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out.detach().cpu().double(), expected.detach(), **close)
    assert set(grads) == set(p)
    for key, grad in grads.items():
        torch.testing.assert_close(grad.cpu().double(), p[key].grad, **close)


@pytest.mark.parametrize("norm", ["batch", "layer", None])
def test_no_tokens(norm: Any) -> None:
    memory = make(query_norm=norm)
    out = memory(tokens(0, 3))
    assert out.shape == (0, 3, 6)
    out.sum().backward()


def test_equal_scores_give_the_lowest_slots() -> None:
    memory = make(query_norm="layer")
    with torch.no_grad():
        memory.keys.keys[:, :, 1:4] = memory.keys.keys[:, :, :1]
    check_against(product_key_memory, memory, tokens(8))
    with torch.no_grad():
        memory.keys.keys.zero_()
    _, ids = memory.keys(memory.query(tokens(3)))
    assert ids.tolist() == [[[0, 1, 2]] * 2] * 3


def test_softmax_scores_sum_to_one_and_heads_add_up() -> None:
    memory = make(query_norm=None)
    x = tokens(5)
    scores, ids = memory.keys(memory.query(x))
    torch.testing.assert_close(scores.sum(-1), torch.ones(5, 2, dtype=torch.float64))
    each = [memory.values(ids[:, head], scores[:, head]) for head in range(2)]
    torch.testing.assert_close(memory(x), each[0] + each[1])


# a fault elsewhere: in one mode of lucidrains' layer keys and queries get no gradient
@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_learns(name: str) -> None:
    memory = make(**OPTIONS[name])
    memory(tokens(30)).backward(tokens(30))
    for key, parameter in memory.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


# a fault elsewhere: batch norm with a mask fails in lucidrains' layer, and XLM's has no mask
@pytest.mark.parametrize("norm", ["batch", "layer", "rms", None])
def test_padding_reads_and_trains_nothing(norm: Any) -> None:
    memory = make(query_norm=norm, gating="swilu").train()
    other = copy.deepcopy(memory)
    x, mask = tokens(3, 4), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    x[~mask] = torch.nan
    x.requires_grad_()
    out = memory(x, mask)
    alone = other(x.detach()[mask])
    upstream = torch.randn_like(out)
    out.backward(upstream)
    alone.backward(upstream[mask])
    torch.testing.assert_close(out[mask], alone)
    assert torch.equal(out[~mask], torch.zeros(6, 6, dtype=torch.float64))
    assert x.grad is not None and torch.equal(x.grad[~mask], torch.zeros(6, 6, dtype=torch.float64))
    for (name, a), b in zip(memory.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")
    for a, b in zip(memory.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_only_padding_leaves_the_statistics_alone() -> None:
    memory = make()
    before = [buffer.clone() for buffer in memory.buffers()]
    out = memory(tokens(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))
    for a, b in zip(memory.buffers(), before, strict=True):
        assert torch.equal(a, b)


# a fault elsewhere: Meta's kernel gives wrong gradients unless the upstream is contiguous
def test_expanded_and_transposed_upstreams() -> None:
    memory = make()
    x = tokens(6)
    grads = []
    for backward in (
        lambda out: out.sum().backward(),
        lambda out: out.backward(torch.ones_like(out)),
        lambda out: out.backward(torch.ones(6, 6, dtype=torch.float64).t()),
    ):
        memory.zero_grad()
        backward(memory(x))
        grads.append([parameter.grad.clone() for parameter in memory.parameters() if parameter.grad is not None])
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0])


def test_columns_on_two_machines() -> None:
    memory = make(query_norm="layer")
    x, upstream = tokens(5), tokens(5)
    memory(x).backward(upstream)
    whole = memory.values.weight.detach()
    total: dict[str, Tensor] = {}
    for at in (0, 3):
        part = copy.deepcopy(memory)
        part.zero_grad()
        part.values = ValueTable(49, 3, initializer=whole[:, at : at + 3].clone(), dtype="float64")
        part(x).backward(upstream[:, at : at + 3])
        for name in ("keys.keys", "query.project.weight"):
            total[name] = total.get(name, 0) + part.get_parameter(name).grad
    for name, grad in total.items():
        torch.testing.assert_close(grad, memory.get_parameter(name).grad)


# a fault elsewhere: torch's bag and lucidrains' layer refuse weights of another type than the table
def test_under_autocast_and_in_bfloat16() -> None:
    memory = ProductKeyMemory(**SIZES, gating="swilu")
    x = torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out = memory(x)
    out.float().sum().backward()
    assert memory.values.weight.grad is not None and memory.values.weight.grad.dtype == torch.float32
    small = memory.bfloat16()
    got = small(x.bfloat16())
    assert got.dtype == torch.bfloat16 and torch.isfinite(got).all()


def test_dropouts_only_while_training() -> None:
    memory = make(input_dropout=0.5, query_dropout=0.5, score_dropout=0.5, value_dropout=0.5, query_norm="layer")
    x = tokens(20)
    assert not torch.equal(memory(x), memory(x))
    memory.eval()
    assert torch.equal(memory(x), memory(x))


def test_a_function_and_its_state_survive_copies() -> None:
    memory, x = make(gating="swilu").eval(), tokens(5)
    expected = memory(x)
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert torch.equal(other(x), expected)
    fresh = make(gating="swilu").eval()
    fresh.load_state_dict(memory.state_dict())
    assert torch.equal(fresh(x), expected)


def test_one_graph_for_every_batch_size() -> None:
    memory = ProductKeyMemory(**SIZES, gating="swilu").eval()
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (3, 5, 8, 13, 4):
            x = torch.randn(size, 6)
            torch.testing.assert_close(compiled(x), memory(x))


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    memory = MemoryPlus(8, 6, heads=2, topk=3)
    with FlopCounterMode(display=False) as counter:
        memory(torch.randn(10, 8))
    # torch does not know the lookup: 2 heads of 3 rows
    assert memory.flops_per_token == counter.get_total_flops() // 10 + 2 * 2 * 3 * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": 8}, r"`topk` must be at most `num_keys`.* 7, got 8: use more keys"),
        ({"dim_key": 5}, r"`dim_key` must be even.*got 5: use 6"),
        ({"heads": 0}, "`heads` must be an int of at least 1, got 0"),
        ({"num_keys": 2.5}, "`num_keys` must be an int"),
        ({"query_norm": "none"}, "`query_norm` must be one of 'batch', 'layer', 'rms', None, got 'none'"),
        ({"score_function": "max"}, "`score_function` must be one of"),
        ({"gating": "glu"}, "`gating` must be one of"),
        ({"value_dropout": 1.0}, r"`value_dropout` must be in \[0, 1\), got 1.0"),
        ({"dim_value": 5, "output_projection": False}, "`output_projection` must not be False"),
        ({"values": ValueTable(48, 6)}, "`values` must have 49 rows of width 6.*got 48 rows"),
    ],
)
def test_wrong_sizes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProductKeyMemory(**{**SIZES, **options})


def test_wrong_inputs_are_named() -> None:
    memory = ProductKeyMemory(**SIZES)
    with pytest.raises(ValueError, match=r"`x` must be \[..., 6\].*got shape \(2, 5\)"):
        memory(torch.randn(2, 5))
    with pytest.raises(ValueError, match=r"`mask` must have one entry a vector of `x`, shape \(2,\), got \(3,\)"):
        memory(torch.randn(2, 6), torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match="`mask` must be bool"):
        memory(torch.randn(2, 6), torch.ones(2))
    with pytest.raises(TypeError, match="`values` must be a ValueTable"):
        ProductKeyMemory(**SIZES, values=nn.EmbeddingBag(49, 6))  # type: ignore[arg-type]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_rows_step_like_those_of_torch(update: Any) -> None:
    plain = make(query_norm="layer")
    fused = make(query_norm="layer", values=ValueTable(49, 6, update=update, optimizer="sgd", dtype="float64"))
    fused.load_state_dict(plain.state_dict())
    rows = FusedOptimizer(fused)
    rows.param_groups[0]["lr"] = 0.1
    x, upstream = tokens(5), tokens(5)
    plain(x).backward(upstream)
    torch.optim.SGD([plain.values.weight], 0.1).step()
    fused(x).backward(upstream)
    rows.step()
    torch.testing.assert_close(fused.values.weight, plain.values.weight)
    assert len(param_groups(fused, 0.1, 0.2)) == 1
