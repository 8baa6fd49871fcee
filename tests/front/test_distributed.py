"""Two processes: what drifts apart is refused, and the way out that the message names works."""

import os
import socket

import pytest
import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

import embedfuse
from embedfuse.torch import Bags, EmbeddingCollection, FusedOptimizer


def _collection(update):
    torch.manual_seed(0)
    table = embedfuse.TableConfig(5, 3, combiner="sum")
    return EmbeddingCollection({"x": embedfuse.FeatureConfig(table)}, optimizer=embedfuse.SGD(0.5), update=update)


def _process(rank, port, failures):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        bags = {"x": Bags.from_lists([[rank, 2]])}
        for update in ("step", "backward"):
            collection = _collection(update)
            FusedOptimizer(collection)
            with torch.no_grad():
                collection(bags)
            with pytest.raises(RuntimeError, match=r'2 processes hold copies.*update="autograd"'):
                collection(bags)
        collection = _collection("autograd")
        start = collection.tables["table_0"].detach().clone()
        model = torch.nn.parallel.DistributedDataParallel(collection)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        model(bags)["x"].sum().backward()
        optimizer.step()
        # the mean of both processes' gradients: rows 0 and 1 from one each, row 2 from both
        expected = start - 0.5 * torch.tensor([0.5, 0.5, 1.0, 0, 0])[:, None]
        torch.testing.assert_close(collection.tables["table_0"].detach(), expected)
    except BaseException as error:
        failures.put(f"rank {rank}: {error!r}")
        raise
    finally:
        distributed.destroy_process_group()


def test_copies_of_tables_must_not_drift_apart():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    failures = context.SimpleQueue()
    processes = [context.Process(target=_process, args=(rank, port, failures)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert failures.empty(), failures.get()
    assert [process.exitcode for process in processes] == [0, 0]
