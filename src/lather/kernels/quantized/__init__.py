"""`quantize_` and `dequantize`: tensors in 8 bits, with one scale for each block of at most 128
elements of the last dim.

A code is a small float in units of its block, with subnormal numbers (the microscaling formats of
the Open Compute Project are of this kind). With k octaves of 2^m codes, elements near zero are
multiples of unit / 2^m, and larger ones have a relative precision of 2^-m to 2^-m-1. The unit of a
block is a power of two, so that what is decoded is encoded to the same codes again.

    SIGNED     moments: sign, 3 bits of exponent, 4 of mantissa (k = 8, m = 4)
    POSITIVE   second moments: 4 bits of exponent, 4 of mantissa (k = 16, m = 4); no element becomes
               zero that is not zero
    BASIS      sign, 2 bits of exponent, 5 of mantissa (k = 4, m = 5): the least error for elements
               of one size

Adam divides moments by their size, which differs by decades among the coordinates of an eigenbasis.
These are in the order of their eigenvalues, so that the elements of a block differ by less, and the
error of Adam's update is about 6 % from the one and 3 % from the other. An element that is far
smaller than its block's largest has a noise that is bounded, because its second moment is not
smaller than a 2^19th of the largest.

Stochastic rounding keeps the expectation of each element (`lather.kernels.stochastic_rounding`), so
that an exponential average, however slow, follows that in fp32 on average.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lather.kernels.backend import fastest
from lather.kernels.quantized import reference
from lather.kernels.quantized.reference import BLOCK, Code
from lather.shapes import Float, Int

__all__ = ["BASIS", "BLOCK", "POSITIVE", "SIGNED", "Code", "dequantize", "num_blocks", "quantize_"]

SIGNED = Code(octaves=8, is_signed=True)
POSITIVE = Code(octaves=16, is_signed=False)
BASIS = Code(octaves=4, is_signed=True)


def num_blocks(n: int) -> int:
    """Return the number of scales for a last dim of n elements."""
    return -(-n // BLOCK)


@torch.no_grad()
def quantize_(
    x: Float[Tensor, "*dims n"],
    codes: Int[Tensor, "*dims n"],
    scales: Float[Tensor, "*dims blocks"],
    step: int,
    *,
    code: Code = SIGNED,
    stochastic: bool = True,
) -> None:
    """Encode `x` (fp32) in `codes` (int8) and `scales` (fp32, the unit of each block), both
    contiguous.

    A block with an infinity or NaN is decoded as NaN. POSITIVE encodes the magnitudes of negative
    elements. Raises TypeError for another dtype than fp32.

    Args:
        step: any integer; equal elements are rounded alike in one step, and independently in
            another.
        stochastic: round up or down with the probabilities that keep the expectation; otherwise to
            the nearest code.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"x is {x.dtype}: has to be torch.float32 (convert it first)")
    fastest(reference.quantize_, x, codes, in_reference=not x.is_contiguous())(
        x, codes, scales, step, code, stochastic
    )
    if not codes.is_inference():
        increment_version((codes, scales))  # a Triton kernel does not tell torch


@torch.no_grad()
def dequantize(
    codes: Int[Tensor, "*dims n"],
    scales: Float[Tensor, "*dims blocks"],
    *,
    code: Code = SIGNED,
    out: Tensor | None = None,
) -> Float[Tensor, "*dims n"]:
    """Return what `quantize_` encoded, in fp32; `out` is a contiguous tensor that takes it."""
    if out is None:
        out = torch.empty_like(codes, dtype=torch.float32)
    fastest(reference.dequantize, codes, out)(codes, scales, out, code)
    return out
