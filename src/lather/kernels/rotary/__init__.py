"""Rotary position embedding: the rotation of each pair of a head's coordinates by the angle of its
position.

Source: RoPE (Su et al., arXiv:2104.09864). Letters: B sequences, S positions, H heads, R rotary
width of a head, P = R / 2 pairs.

Autograd keeps only the tables of cosines and sines: backward rotates the gradient by the negative
angles. On a GPU, forward and backward are one kernel each, which can read the heads as a slice of a
wider tensor.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import run
from lather.kernels.rotary import reference
from lather.shapes import Float


def rotate(
    x_BSHR: Float[Tensor, "b s h r"],
    cos_BSP: Float[Tensor, "#b s p"],
    sin_BSP: Float[Tensor, "#b s p"],
    *,
    halves: bool,
) -> Float[Tensor, "b s h r"]:
    """Rotate each pair of coordinates of a head by the angle of its position. The result has the
    dtype of x; the computation is in the wider of the dtypes of x and the tables.

    It can be differentiated once, for x. Raises ValueError for shapes that do not match.
    """
    # the compiler fuses the reference with the operations around it
    if torch.compiler.is_compiling():
        return reference.turn(x_BSHR, cos_BSP, sin_BSP, halves=halves)
    validate(x_BSHR, cos_BSP, sin_BSP)
    return _Turn.apply(x_BSHR, cos_BSP, sin_BSP, halves)  # type: ignore[no-untyped-call]


rotate_pairs = functools.partial(rotate, halves=False)
"""Rotates pairs of adjacent coordinates (x_2i, x_2i+1)."""
rotate_halves = functools.partial(rotate, halves=True)
"""Rotates pairs (x_i, x_P+i)."""


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHR: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, halves: bool) -> Tensor:
        ctx.save_for_backward(cos_BSP, sin_BSP)
        ctx.halves = halves
        return run(reference.turn, x_BSHR, cos_BSP, sin_BSP, halves=halves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHR: Tensor) -> tuple[Tensor, None, None, None]:
        tables = ctx.saved_tensors
        grad = run(reference.turn, grad_BSHR, *tables, halves=ctx.halves, back=True)
        return grad, None, None, None


def validate(x_BSHR: Tensor, cos_BSP: Tensor, sin_BSP: Tensor) -> None:
    """Raise ValueError for shapes that do not match."""
    fits = x_BSHR.dim() == 4 and cos_BSP.shape == sin_BSP.shape and x_BSHR.shape[-1] % 2 == 0
    if not fits or cos_BSP.shape not in {
        (batch, x_BSHR.shape[1], x_BSHR.shape[3] // 2) for batch in (1, len(x_BSHR))
    }:
        raise ValueError(
            f"x has shape {tuple(x_BSHR.shape)} with tables {tuple(cos_BSP.shape)} and "
            f"{tuple(sin_BSP.shape)}: x has to be (B, S, H, 2 P) "
            "and both tables (B or 1, S, P)"
        )
