"""`adam_in_basis`: Adam's moments and step direction, in whatever coordinates the gradient is in.

Source: Kingma and Ba, arXiv:1412.6980; its Nesterov form is NAdam's. On CUDA one pass over memory, elsewhere torch's operations: on a CPU
the optimizer calls it with pieces that stay in the cache, where passes cost little.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.adam_in_basis import reference
from lather.kernels.backend import use_triton
from lather.shapes import Float

__all__ = ["adam_in_basis"]


def adam_in_basis(
    g: Float[Tensor, "*dims"],
    exp_avg: Float[Tensor, "*dims"],
    exp_avg_sq: Float[Tensor, "*dims"],
    step: int,
    betas: tuple[float, float],
    eps: float,
    *,
    correct_bias: bool = True,
    nesterov: bool = False,
) -> Float[Tensor, "*dims"]:
    """Update both moments in place with `g` and return the step direction u, of its shape and dtype (the caller subtracts lr * u).

    Args:
        g: the gradient, any shape; it stays as it is.
        exp_avg, exp_avg_sq: of the dtype of `g`, or narrower: then u is computed before they are rounded.
        step: t, 1 for the first gradient.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        correct_bias: divide the moments by 1 - beta^t.
        nesterov: the momentum one step ahead.
    """
    implementation = reference.adam_in_basis
    if _has_kernel_for(g) and g.dtype == torch.float32 and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous():
        from lather.kernels.adam_in_basis import triton

        implementation = triton.adam_in_basis
    return implementation(g, exp_avg, exp_avg_sq, step, betas=betas, eps=eps, correct_bias=correct_bias, nesterov=nesterov)


def _has_kernel_for(g: Tensor) -> bool:
    """Whether Triton takes tensors of this one's device."""
    return g.device.type != "cpu" and use_triton(g)
