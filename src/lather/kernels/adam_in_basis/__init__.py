"""`adam_in_basis`: Adam's moments and step direction, in the coordinates of the gradient.

Source: Kingma and Ba, arXiv:1412.6980; its Nesterov form is NAdam's. On CUDA one kernel reads and
writes memory once; elsewhere torch's operations run one after the other. On a CPU the optimizer
passes chunks that stay in the cache, where that costs little.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.adam_in_basis import reference
from lather.kernels.backend import use_triton
from lather.shapes import Float


def adam_in_basis(
    g: Float[Tensor, "*dims"],
    exp_avg: Float[Tensor, "*dims"],
    exp_avg_sq: Float[Tensor, "*dims"],
    step: int,
    betas: tuple[float, float],
    eps: float | Float[Tensor, " b"],
    *,
    correct_bias: bool = True,
    nesterov: bool = False,
) -> Float[Tensor, "*dims"]:
    """Update both moments in place with `g`, and return the step direction u in the shape and dtype
    of `g`; the caller subtracts lr * u.

    Args:
        g: gradient of any shape, which is not changed.
        exp_avg, exp_avg_sq: first and second moment, in the dtype of `g` or a narrower dtype; u is
            computed before they are rounded.
        step: t, 1 for the first gradient.
        betas: decay rates of the first and second moment, each in [0, 1).
        eps: number added to the root of the second moment, or numbers (B,) for the matrices of `g`
            (B, ...), in its dtype.
        correct_bias: divide the moments by 1 - beta^t.
        nesterov: use Nesterov momentum.
    """
    operation = reference.adam_in_basis
    if (
        _has_kernel_for(g)
        and g.dtype == torch.float32
        and exp_avg.is_contiguous()
        and exp_avg_sq.is_contiguous()
    ):
        from lather.kernels.adam_in_basis import triton

        operation = triton.adam_in_basis
    return operation(
        g,
        exp_avg,
        exp_avg_sq,
        step,
        betas=betas,
        eps=eps,
        correct_bias=correct_bias,
        nesterov=nesterov,
    )


def _has_kernel_for(g: Tensor) -> bool:
    """Tell whether there is a Triton kernel for the device of this tensor."""
    return g.device.type != "cpu" and use_triton(g)
