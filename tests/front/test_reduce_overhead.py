"""`torch.compile(mode="reduce-overhead")`: inductor's own CUDA graphs of what is between the ops."""

import pytest
import torch
from torch import nn

import embedfuse
from embedfuse.torch import EmbeddingCollection, FusedOptimizer
from embedfuse.torch.memory import ProductKeyMemory

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("fresh_compiler"),
]  # fmt: skip
BATCH, DIM = 32, 8


class Model(nn.Module):
    """Dense layers before and after a lookup."""

    def __init__(self, update: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = embedfuse.TableConfig(20, DIM, combiner="sum")
        features = {name: embedfuse.FeatureConfig(table) for name in "ab"}
        self.tables = EmbeddingCollection(features, embedfuse.Adagrad(0.1), update=update)
        self.low, self.top = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.cuda()

    def forward(self, inputs, x):
        return self.top((self.tables.concatenated(inputs) * self.low(x).tanh()).sin()).square().mean()


def batches(count=8):
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(count):
        inputs = {name: torch.randint(20, (BATCH,), generator=generator, device="cuda") for name in "ab"}
        yield inputs, torch.randn(BATCH, DIM, generator=generator, device="cuda")


@pytest.mark.parametrize("update", ["step", "backward", "autograd"])
def test_training(update):
    losses = []
    for compiles in (False, True):
        model = Model(update)
        dense = [*model.low.parameters(), *model.top.parameters()]
        optimizers = [torch.optim.SGD([*dense, *(model.tables.parameters() if update == "autograd" else [])], 0.1)]
        if update != "autograd":
            fused = FusedOptimizer(model)
            optimizers += [fused] if update == "step" else []
        call = torch.compile(model, fullgraph=True, mode="reduce-overhead") if compiles else model
        losses.append([])
        for inputs, x in batches():
            loss = call(inputs, x)
            losses[-1].append(float(loss))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)
    assert losses[0][0] != losses[0][-1]


def test_inference():
    model = Model("step").eval()
    call = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for inputs, x in batches():
            torch.testing.assert_close(call(inputs, x), model(inputs, x))
        # a graph would read the old values from its own memory
        model.tables.tables["table_0"].mul_(3)
        for inputs, x in batches():
            torch.testing.assert_close(call(inputs, x), model(inputs, x))


def test_memory_layer():
    losses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        memory = nn.Sequential(nn.Linear(16, 16), ProductKeyMemory(16, 16, heads=2, topk=4), nn.Linear(16, 4)).cuda()
        optimizer = torch.optim.SGD(memory.parameters(), 0.1)
        call = torch.compile(memory, mode="reduce-overhead") if compiles else memory
        losses.append([])
        for _, x in batches():
            loss = call(torch.cat([x, x.square()], 1)).square().mean()
            losses[-1].append(float(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)
