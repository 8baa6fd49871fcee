"""`embedfuse info`: versions, devices, and which backends serve here."""

import platform

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..torch import backends


def show_info(console: Console) -> None:
    """Prints what this machine offers."""
    console.print(
        f"embedfuse {__version__}, Python {platform.python_version()}, torch {torch.__version__}", highlight=False
    )
    console.print(
        f"cpu: {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads", highlight=False
    )
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        console.print(f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB", highlight=False)
    if not torch.cuda.is_available():
        console.print("no CUDA GPU that torch can use", highlight=False)
    usable = backends()
    if torch.cuda.is_available() and usable["triton"] is None:
        # imported here, since it needs Triton
        from ..torch.backends.radix_sort import why_not

        for index in range(torch.cuda.device_count()):
            if (reason := why_not(index)) is not None:
                console.print(f"cuda:{index}: many ids are sorted by torch.sort, which is slower: {reason}")
    table = Table(title="Backends", title_justify="left")
    table.add_column("name")
    table.add_column("usable here")
    table.add_column("reason if not")
    for name, reason in usable.items():
        table.add_row(name, "yes" if reason is None else "no", reason or "")
    console.print(table)
