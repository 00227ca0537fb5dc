"""Tensors in 8 bits in torch: the specification.

For a block with largest magnitude a:

    unit  = the smallest power of two for which a / unit is at most the largest code's y
    y     = |x| / unit, below 2^(k-1)
    code  = (bits of y + max(1, y), less those of 1, plus half of 2^shift and noise), without the
            last `shift` bits; the highest of 8 bits is the sign of x

Here y + max(1, y) joins the octaves to the multiples of 2^-m below 1, because the bits of a float
count its neighbors. They are linear between powers of two, so noise that is uniform from -2^shift /
2 on rounds without bias; without noise, to the nearest code. `scales` holds the units, which are at
least 2^-126. A code is also a number in fp16 without its last bits, in units of 2^-14.

A few rows are processed at a time, which stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.kernels.backend import blocks
from lather.kernels.stochastic_rounding.reference import noise

BLOCK = 128
"""Largest number of elements of the last dim that share a scale."""
CHUNK = 2**17
"""Number of elements that are processed at a time."""

ONE, INFINITE = 0x3F800000, 0x7F800000
"""The bits of 1 and of infinity, which are those of an exponent."""


@dataclass(frozen=True)
class Code:
    """The meaning of 8 bits."""

    octaves: int
    """Number k of intervals with equally many codes, a power of two up to 16: octaves, and the
    interval from 0 to 1."""
    is_signed: bool

    @property
    def shift(self) -> int:
        """Number of bits of an fp32 mantissa that a code does not keep: 23 - m."""
        return 24 - ((128 if self.is_signed else 256) // self.octaves).bit_length()


def quantize_(
    x: Tensor, codes: Tensor, scales: Tensor, step: int, code: Code, stochastic: bool
) -> None:
    shift = code.shift
    for x_, codes_, scales_ in _in_chunks(x, codes, scales):
        elements = _in_blocks(x_)
        bits, y = elements.view(torch.int32), elements.abs()
        top = y.amax(-1, keepdim=True)
        # a mantissa above the largest code's belongs to the next power of two
        unit = (top.view(torch.int32) + ((1 << shift) - 1)).bitwise_and_(INFINITE)
        unit.sub_(code.octaves - 2 << 23).clamp_(min=1 << 23)
        unit = unit.view(torch.float32)
        torch.add(unit, top - top, out=scales_.unsqueeze(-1))  # NaN for infinities and NaN

        q = y.mul_(unit.reciprocal_()).add_(y.clamp(min=1.0)).view(torch.int32)
        q.add_((1 << shift - 1) - ONE)
        if stochastic:
            q.add_(noise(bits, step, shift))
        q.bitwise_right_shift_(shift)
        if code.is_signed:
            q.bitwise_or_((bits >> 24).bitwise_and_(0x80))
        else:
            q = q.maximum(bits.clamp(0, 1))
        codes_.view(torch.uint8).copy_(q.flatten(-2)[:, : codes_.shape[1]])


def dequantize(codes: Tensor, scales: Tensor, out: Tensor, code: Code) -> None:
    shift = code.shift - 13
    for codes_, scales_, out_ in _in_chunks(codes, scales, out):
        bits = _in_blocks(codes_ if code.is_signed else codes_.view(torch.uint8)).to(torch.int16)
        bits.bitwise_left_shift_(shift)
        if code.is_signed:
            bits.bitwise_and_((0x7F << shift) - 0x8000)
        y = bits.view(torch.float16).float().mul_(2.0**14).mul_(scales_.unsqueeze(-1))
        out_.copy_(y.flatten(-2)[:, : codes_.shape[1]])


def _in_chunks(x: Tensor, *results: Tensor) -> Iterator[list[Tensor]]:
    """Yield the tensors (..., n) as matrices of a few rows."""
    if x.numel():
        matrices = [x.flatten(0, -2) if x.dim() > 1 else x[None]]
        matrices += [result.view(len(matrices[0]), -1) for result in results]
        for rows in blocks(matrices[0], CHUNK):
            yield [matrix[rows] for matrix in matrices]


def _in_blocks(x: Tensor) -> Tensor:
    """Return x (rows, n) as (rows, blocks, elements): a view, unless the last block is shorter than
    the others."""
    width = min(BLOCK, x.shape[1])
    padding = -x.shape[1] % width
    return (F.pad(x, (0, padding)) if padding else x).unflatten(-1, (-1, width))
