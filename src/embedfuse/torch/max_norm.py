"""`max_norm`: rows that are about to be looked up are shortened in place, outside autograd."""

from typing import Any

import torch
from torch import Tensor

from .compiling import EVERY_TIME

_lib: Any = torch.library.Library("embedfuse", "FRAGMENT")
_lib.define("shorten_rows(Tensor(a!) table, Tensor ids, float max_norm, float norm_type) -> ()", tags=EVERY_TIME)

MARGIN = 1e-7
"""Added to a norm before dividing by it, as torch does."""


def shorten_rows(table: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> None:
    """Scales each row named by `ids` whose norm exceeds `max_norm` to that norm, in place; other rows keep their bits.

    Equivalent to `torch.embedding_renorm_(table, ids, max_norm, norm_type)`, but ids outside of the table are passed
    over: the lookup reports them. The distinct rows are counted on the host, so this waits for a GPU, as torch's does.
    """
    with torch.no_grad():
        rows = torch.unique(ids)
        rows = rows[(rows >= 0) & (rows < table.shape[0])].long()
        values = table.index_select(0, rows).to(torch.promote_types(table.dtype, torch.float32))
        norms = torch.linalg.vector_norm(values, norm_type, 1)
        long = (norms > max_norm).nonzero().squeeze(1)
        factor = max_norm / (norms[long] + MARGIN)
        table.index_copy_(0, rows[long], (values[long] * factor[:, None]).to(table.dtype))


_lib.impl("shorten_rows", shorten_rows, "CompositeExplicitAutograd")


@torch.library.register_fake("embedfuse::shorten_rows", lib=_lib)  # type: ignore[untyped-decorator]
def _(table: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> None:
    return None
