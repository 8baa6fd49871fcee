"""Mistakes that newcomers make, and what they are told."""

import pytest
import torch
from plain import three_features
from torch._dynamo.testing import CompileCounterWithBackend

import embedfuse
from embedfuse.torch import Bags, FusedOptimizer


def test_concatenated_compiles_once_for_all_batch_sizes():
    collection = three_features(update="autograd")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(collection.concatenated, fullgraph=True, backend=counter)
    for bags in range(2, 14):
        lists = [[number % 7] * (number % 3) for number in range(bags)]
        batch = {name: Bags.from_lists(lists) for name in collection.features}
        torch.testing.assert_close(compiled(batch), collection.concatenated(batch))
    assert counter.frame_count <= 2


def test_a_generator_of_parameters_is_no_module():
    with pytest.raises(TypeError, match=r"FusedOptimizer\(model\)"):
        FusedOptimizer(three_features().parameters())


def test_groups_cannot_be_added():
    optimizer = FusedOptimizer(three_features())
    with pytest.raises(NotImplementedError, match="torch optimizer"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    optimizer.state_dict()


def test_an_optimizer_of_torch_is_named_in_full():
    with pytest.raises(TypeError, match=r"got torch\.optim\.Adagrad.*Adagrad\("):
        embedfuse.TableConfig(3, 2, optimizer=torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))]))


def test_offsets_without_the_last_one():
    with pytest.raises(ValueError, match=r"append len\(ids\)"):
        Bags(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))


def test_a_pair_is_not_bags():
    collection = three_features()
    pair = (torch.tensor([1]), torch.tensor([0, 1]))
    with pytest.raises(TypeError, match=r"use Bags\(ids, offsets\)"):
        collection({"seen": pair, "bought": pair, "city": pair})
