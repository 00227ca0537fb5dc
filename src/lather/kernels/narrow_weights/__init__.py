"""`change_`: the change of bf16 weights by an update,

    W <- (1 - decay) W - lr U

in fp32, rounded stochastically, or with remainders, which make the weights those of fp32
(`lather.kernels.stochastic_rounding`, `lather.kernels.remainder`).

On a GPU one kernel reads and writes memory once: 8 bytes per weight beside U's, or 12 with
remainders, where wide copies take 28 and 32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lather.kernels.backend import fastest
from lather.kernels.narrow_weights import reference
from lather.shapes import Float


@torch.no_grad()
def change_(
    w: Float[Tensor, "*dims"],
    u: Float[Tensor, "*dims"],
    r: Tensor | None,
    *,
    decay: float,
    lr: float,
    step: int,
) -> None:
    """Change the weights `w` (bf16) by `u` (fp32) in place.

    Args:
        r: remainders (int16), which change with the weights; None: the weights are rounded
            stochastically.
        step: t, for stochastic rounding.
    """
    tensors = [x for x in (w, u, r) if x is not None]
    has_kernel = all(x.is_contiguous() for x in tensors) and u.dtype == torch.float32
    operation = fastest(reference.change_, *tensors, in_reference=not has_kernel)
    operation(w, u, r, decay=decay, lr=lr, step=step)
    increment_version([x for x in (w, r) if x is not None])  # a Triton kernel does not tell torch
