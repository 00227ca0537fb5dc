"""`change_by_`: the change of fp32 weights by an update in bf16,

    W <- W - lr (U + (decay / lr) W)

Newton-Schulz on a GPU computes U in bf16. One kernel reads W and U and writes W, 10 bytes per
weight; a wide copy of U, and torch's kernel for it (`torch.optim.SGD(fused=True)`), move 18. The
result has the bits of that kernel, which takes updates that come from other ranks in fp32: both
calculate in fp32 (torch since 2.11), by a fused multiply-add for the inner sum and one for W.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lather.kernels.backend import fastest
from lather.kernels.narrow_updates import reference
from lather.shapes import Float


@torch.no_grad()
def change_by_(
    w: Float[Tensor, "*dims"], u: Float[Tensor, "*dims"], decay: float, lr: float
) -> None:
    """Change the weights `w` (fp32) by `u` (bf16) in place; `lr` is not 0."""
    has_kernel = (
        (w.dtype, u.dtype) == (torch.float32, torch.bfloat16)
        and w.is_contiguous()
        and u.is_contiguous()
    )
    fastest(reference.change_by_, w, u, in_reference=not has_kernel)(w, u, decay, lr)
    increment_version(w)  # a kernel of Triton does not tell torch
