"""RMSNorm over the last dim: y = weight * x / rms(x), and its backward pass.

Source: Zhang and Sennrich (arXiv:1910.07467). Letters: D width of a row; `...` the dims of the
rows.

Autograd keeps x, the weight and an fp32 number per row, 1 / rms. On a GPU, forward and backward
each read and write a row once; the gradient of the weight is summed in two passes in a fixed order,
without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import fastest
from lather.kernels.rms_norm import reference
from lather.shapes import Float

WIDEST = 16384
"""Largest number of columns for the kernels, whose programs hold a whole row; the reference handles
wider rows."""


def rms_norm(
    x: Float[Tensor, "*rows d"], weight: Float[Tensor, " d"], eps: float
) -> Float[Tensor, "*rows d"]:
    """Return weight * (x / sqrt(mean(x^2) + eps)). The quotient is computed in fp32 (fp64 for fp64)
    and rounded to the dtype of x; the product has the wider of the two dtypes.

    It can be differentiated once. Raises ValueError for shapes that do not match, TypeError for a
    dtype that is not floating point."""
    validate(x, weight)
    return _RMSNormFunction.apply(x, weight, eps)  # type: ignore[no-untyped-call]


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y, inverse_rms = fastest(
            reference.forward, x, weight_D, in_reference=_in_reference(weight_D)
        )(x, weight_D, eps)
        ctx.save_for_backward(x, weight_D, inverse_rms)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, inverse_rms = ctx.saved_tensors
        operation = fastest(reference.backward, x, weight_D, in_reference=_in_reference(weight_D))
        return *operation(grad, x, weight_D, inverse_rms), None


def _in_reference(weight_D: Tensor) -> bool:
    """Tell whether the reference runs, as it does if torch compiles the caller, because torch fuses
    the reference with the operations around it."""
    return torch.compiler.is_compiling() or len(weight_D) > WIDEST


def validate(x: Tensor, weight_D: Tensor) -> None:
    """Raise ValueError for shapes that do not match, TypeError for a dtype that is not floating
    point."""
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: has to be floating point")
    if x.dim() == 0 or weight_D.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight_D.shape)} with x {tuple(x.shape)}: has to be one "
            "number for each column of x"
        )
