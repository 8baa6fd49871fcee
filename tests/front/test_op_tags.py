"""What compilers are told of every op."""

import torch

import embedfuse.torch
import embedfuse.torch.memory  # noqa: F401


def test_no_op_is_recorded_in_inductors_cuda_graphs():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("embedfuse::")]
    assert len(names) > 10
    for name in names:
        op, _, overload = name.removeprefix("embedfuse::").partition(".")
        assert torch.Tag.cudagraph_unsafe in getattr(getattr(torch.ops.embedfuse, op), overload or "default").tags, op
