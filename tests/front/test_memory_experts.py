"""`PEER` and `UltraMem` are what plain compositions in float64 say."""

from typing import Any

import pytest
import torch
from memory_judge import check_against, peer, ultramem
from torch import Tensor, nn

from embedfuse.torch import FusedOptimizer, use_backend
from embedfuse.torch.memory import PEER, UltraMem, ValueTable

SIZES: dict[str, Any] = {"dim": 6, "num_keys": 6, "dim_key": 4, "heads": 2, "topk": 3}
ULTRA: dict[str, Any] = {**SIZES, "topk": 6, "blocks": 4, "slices": 2, "dim_value": 4}


def randomised(module: nn.Module) -> nn.Module:
    """In float64, with all parameters random."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, 6, dtype=torch.float64)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu", "identity"])
def test_peer_is_the_plain_composition(activation: Any, gated: bool, training: bool) -> None:
    module = randomised(PEER(**SIZES, activation=activation, gated=gated)).train(training)
    check_against(peer, module, tokens(7))
    check_against(peer, module, tokens(3, 4), torch.rand(3, 4) > 0.4)


@pytest.mark.parametrize(
    "options",
    [
        {"query_norm": "layer", "score_function": "relu", "shared_keys": False},
        {"query_norm": None, "qk_norm": True, "score_function": "sigmoid"},
        {"query_norm": "rms", "score_function": None, "heads": 1, "topk": 6},
    ],
    ids=["layer", "qk-norm", "rms"],
)
def test_peer_with_other_options(options: dict[str, Any]) -> None:
    module = randomised(PEER(**{**SIZES, **options}))
    check_against(peer, module, tokens(2, 1, 5))


def test_peer_on_every_backend(placement: tuple[str, str]) -> None:
    name, device = placement
    module = PEER(**SIZES, query_norm="layer").to(device)
    x = torch.randn(5, 6, device=device)
    with use_backend("eager"):
        expected = module(x)
    with use_backend(name):
        got = module(x)
        got.backward(torch.randn_like(got))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


def test_rows_of_experts_step_in_the_fused_optimizer() -> None:
    plain = randomised(PEER(**SIZES, query_norm="layer"))
    tables = [ValueTable(36, 6, update="step", optimizer="sgd", dtype="float64") for _ in range(2)]
    fused = PEER(**SIZES, query_norm="layer", down=tables[0], up=tables[1]).double()
    fused.load_state_dict(plain.state_dict())
    rows = FusedOptimizer(fused)
    rows.param_groups[0]["lr"] = 0.1
    x, upstream = tokens(5), tokens(5)
    for module in (plain, fused):
        module(x).backward(upstream)
    torch.optim.SGD([plain.down.weight, plain.up.weight], 0.1).step()  # type: ignore[union-attr]
    rows.step()
    torch.testing.assert_close(fused.down.weight, plain.down.weight)  # type: ignore[union-attr]
    torch.testing.assert_close(fused.up.weight, plain.up.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [{}, {"slices": 1}, {"blocks": 1}, {"rank": 1}, {"rank": 3, "heads": 1}, {"query_norm": "batch"}],
    ids=["default", "one-slice", "one-block", "rank-one", "rank-three", "batch"],
)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_ultramem_is_the_plain_composition(options: dict[str, Any], padded: bool) -> None:
    module = randomised(UltraMem(**{**ULTRA, **options}))
    check_against(ultramem, module, tokens(3, 4), torch.rand(3, 4) > 0.4 if padded else None)


def test_ultramem_with_few_candidates_is_exact_at_rank_one() -> None:
    """With one score a row and a column, the best products are products of the best, unless two negatives win."""
    module = UltraMem(**{**ULTRA, "dim_key": 16, "topk": 3, "rank": 1}).double()
    asked = module.query(tokens(20))
    half = module.query.half_width
    keys = torch.nn.functional.layer_norm(module.keys.keys, (half,))
    row, column = (torch.einsum("...hpd,hprnd->...hprn", asked, keys) / half**0.5).squeeze(-2).unbind(-2)
    core = module.keys.core.sum(0)[:, 0, 0]
    expected = (row[..., :, None] * column[..., None, :] * core[:, None, None]).flatten(-2).topk(3)
    clear = (row.topk(3).values > 0).all(-1) & (column.topk(3).values > 0).all(-1)
    clear &= expected.values[..., -1] > row.amin(-1) * column.amin(-1) * core
    assert clear.any()
    scores, ids = module.keys(asked)
    torch.testing.assert_close(scores.sum(0)[clear], expected.values[clear])
    assert torch.equal(ids[clear], expected.indices[clear])


# a fault elsewhere: a scatter that overwrites duplicates instead of adding them
def test_virtual_slots_of_one_row_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    module = randomised(UltraMem(**ULTRA))
    # row 2 of 9 in each of the four blocks, once twice
    ids = torch.tensor([[[2, 11, 20, 29, 29]]])
    monkeypatch.setattr(module.keys, "forward", lambda *_: (torch.ones(2, 1, 1, 5, dtype=torch.float64), ids))
    out, upstream = module(tokens(1)), tokens(1)
    project = module.project.detach()  # type: ignore[operator]
    whole = project.sum(0) + project[3]
    row = module.values.weight  # type: ignore[union-attr]
    torch.testing.assert_close(out[0], row[2] @ whole)
    out.backward(upstream)
    expected = torch.zeros(9, 4, dtype=torch.float64)
    expected[2] = whole @ upstream[0]
    torch.testing.assert_close(row.grad, expected)


def test_the_auxiliary_loss_is_of_the_other_singular_values() -> None:
    module = UltraMem(**{**ULTRA, "rank": 2, "slices": 1, "heads": 1})
    with torch.no_grad():
        module.keys.core.copy_(torch.diag(torch.tensor([2.0, 0.65])))
    loss = module.auxiliary_loss()
    torch.testing.assert_close(loss, torch.tensor(0.25))
    loss.backward()
    torch.testing.assert_close(module.keys.core.grad[0, 0], torch.diag(torch.tensor([0.0, 1.0])))  # type: ignore[index]
    assert UltraMem(**{**ULTRA, "rank": 1}).auxiliary_loss() == 0


@pytest.mark.parametrize("make", [PEER, UltraMem])
def test_one_graph_for_every_batch_size(make: Any) -> None:
    module = make(**SIZES, query_norm="layer") if make is PEER else make(**ULTRA)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (3, 5, 8):
            x = torch.randn(size, 6)
            torch.testing.assert_close(compiled(x), module(x))


def test_transforms() -> None:
    module = randomised(PEER(**SIZES, query_norm="layer"))
    x = tokens(3, 4)
    torch.testing.assert_close(torch.vmap(module)(x), module(x))
    p = {name: value.detach() for name, value in module.named_parameters()}
    grads = torch.func.grad(lambda p: torch.func.functional_call(module, p, (x,)).square().sum())(p)
    module(x).square().sum().backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(grads[name], value.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 5}, r"`blocks` must divide `num_keys \*\* 2`, 36, got 5"),
        ({"slices": 3}, "`slices` must divide `dim_value`, 4, got 3"),
        ({"topk": 7}, "`topk` must be at most `num_keys`"),
        ({"rank": 0}, "`rank` must be an int of at least 1"),
        ({"values": ValueTable(9, 5)}, "`values` must have 9 rows of width 4"),
    ],
)
def test_wrong_sizes_of_ultramem_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UltraMem(**{**ULTRA, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "tanh"}, "`activation` must be one of"),
        ({"dim_key": 3}, "`dim_key` must be even"),
        ({"topk": 7}, "`topk` must be at most `num_keys`"),
        ({"up": ValueTable(36, 5)}, "`up` must have 36 rows of width 6"),
    ],
)
def test_wrong_sizes_of_peer_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PEER(**{**SIZES, **options})
