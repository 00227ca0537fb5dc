"""Stochastic rounding in torch: the specification.

    bits    = the 32 bits of x, as an integer
    rounded = (bits + 2^15 + noise) with the low 16 bits cleared

with noise from -2^15 to 2^15 - 1, a hash of the bits and the step. The sum of integers is right for
both signs, for denormals and across binades, because neighbors in bf16 are 2^16 apart as
integers."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2**17
"""Number of elements that are rounded at a time, which stay in the cache."""

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def key_of(step: int) -> int:
    """Return the hash of a step (lowbias32) as a signed integer of 32 bits."""
    h = step & 0xFFFFFFFF
    for shift, multiplier in zip((16, 15, 16), (*MULTIPLIERS, 1), strict=True):
        h = ((h ^ (h >> shift)) * multiplier) & 0xFFFFFFFF
    return signed(h)


def signed(number: int) -> int:
    """Return a number of 32 bits as the signed integer that has these bits."""
    return number - ((number & 0x80000000) << 1)


def noise(bits: Tensor, step: int, num_bits: int = 16) -> Tensor:
    """Return signed integers of `num_bits` bits: the upper bits of the hash of `bits` (int32) and
    the step. Shifts keep the sign, which saves passes."""
    first, second = map(signed, MULTIPLIERS)
    h = (bits ^ key_of(step)).mul_(first)
    return h.bitwise_xor_(h >> 15).mul_(second).bitwise_right_shift_(32 - num_bits)


def round_to_bf16(x: Tensor, step: int, out: Tensor) -> None:
    pairs = [(x, out)]
    if x.is_contiguous() and out.is_contiguous():
        parts = (tensor.view(-1).split(CHUNK) for tensor in (x, out))
        pairs = list(zip(*parts, strict=True))
    for x_, out_ in pairs:
        bits = x_.view(torch.int32)
        rounded = noise(bits, step).add_(bits).add_(0x8000).bitwise_and_(-0x10000)
        out_.copy_(torch.where(x_ == x_, rounded.view(torch.float32), x_))  # noqa: PLR0124 - NaN
