"""The sum of several parts in a fixed order: what ranks have of the same gradients.

Letters: C parts, N elements of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import run
from lather.kernels.sum_in_order import reference
from lather.shapes import Float


@torch.no_grad()
def sum_in_order(parts_CN: Float[Tensor, "c n"]) -> Float[Tensor, " n"]:
    """Return the sum of the parts, from the first to the last, in fp32 (fp64 for fp64), rounded
    once to their dtype; without autograd."""
    return run(reference.sum_in_order, parts_CN)
