"""Tables of exported programs: parameters of their own names, which may come to lie apart."""

import warnings

import torch
from torch import nn


def warn_of_copies() -> None:
    """Warns of tables that lie apart, which lookups of an exported program copy together; Python shows it once."""
    warnings.warn(
        "the tables of an exported program lie apart, so that each lookup copies them together: call "
        "embedfuse.torch.pack_tables(program) once, after loading it and moving it to its device",
        stacklevel=2,
    )


def pack_tables(program: nn.Module) -> nn.Module:
    """Brings the tables of a loaded `torch.export` program into one buffer, as they were where it was exported.

    Lookups read all tables of a type from one buffer. Tables that lie apart, as they do after the program was moved to
    a device, are copied together in every call; after this once. Values and names stay, so `load_state_dict` works
    before and after.

    Args:
        program: what `torch.export.load(file).module()` gave, on the device where it is to run.

    Returns:
        The same program.

    Raises:
        TypeError: a module without a graph.
    """
    graph = getattr(program, "graph", None)
    if not isinstance(graph, torch.fx.Graph):
        raise TypeError(
            f"`program` must be the module of an exported program, got {type(program).__name__}: give what "
            "torch.export.load(file).module() returns"
        )
    for node in graph.nodes:
        if node.target is not torch.ops.embedfuse.pooled_lookup.default:
            continue
        sources, starts, size = node.args[:3]
        tables = [program.get_parameter(str(source.target)) for source in sources if source.op == "get_attr"]
        if len(tables) != len(sources):
            continue
        with torch.no_grad():
            buffer = tables[0].new_zeros(size)
            for table, start in zip(tables, starts, strict=True):
                place = buffer[start : start + table.numel()].view(table.shape)
                place.copy_(table)
                table.data = place
    return program
