"""`quantize_` and `dequantize`: tensors in 8 bits, with one scale for each block of at most 256
elements of the last dim.

A code is a small float in units of its block, with subnormal numbers (the microscaling formats of
the Open Compute Project are of this kind). With k octaves of 2^m codes, elements near zero are
multiples of unit / 2^m, and larger ones have a relative precision of 2^-m to 2^-m-1. The unit of a
block is a power of two, so that what is decoded is encoded to the same codes again.

    SIGNED     moments: sign, 4 bits of exponent, 3 of mantissa (k = 16, m = 3)
    POSITIVE   second moments: 5 bits of exponent, 3 of mantissa (k = 32, m = 3); no element becomes
               zero that is not zero
    BASIS      sign, 2 bits of exponent, 5 of mantissa (k = 4, m = 5): the least error for elements
               of one size

In the coordinates of an eigenbasis the moments of a row span decades, and Adam divides by their
size. In a linear code, elements a thousand times smaller than the block's largest become noise that
is four times the update; in SIGNED, the noise is a ninth of the update, however small they are.

Stochastic rounding keeps the expectation of each element (`lather.kernels.stochastic_rounding`), so
that an exponential average, however slow, follows that in fp32 on average.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import fastest
from lather.kernels.quantized import reference
from lather.kernels.quantized.reference import BLOCK, Code
from lather.shapes import Float, Int

__all__ = ["BASIS", "BLOCK", "POSITIVE", "SIGNED", "Code", "dequantize", "num_blocks", "quantize_"]

SIGNED = Code(octaves=16, is_signed=True)
POSITIVE = Code(octaves=32, is_signed=False)
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
