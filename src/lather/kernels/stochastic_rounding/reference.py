"""Stochastic rounding in torch: the specification.

    bits    = the 32 bits of x, as an integer
    rounded = (bits + noise) with the low 16 bits cleared

with noise from 0 to 65535, a hash of the bits and the step. The sum of integers is right for both
signs, for denormals and across binades, because neighbors in bf16 are 2^16 apart as integers."""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
SHIFTS = (16, 13, 16)


def key_of(step: int) -> int:
    """Return the hash of a step as a signed integer of 32 bits."""
    h = step & 0xFFFFFFFF
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        h = ((h ^ (h >> shift)) * multiplier) & 0xFFFFFFFF
    return signed(h)


def signed(number: int) -> int:
    """Return a number of 32 bits as the signed integer that has these bits."""
    return number - ((number & 0x80000000) << 1)


def noise(bits: Tensor, step: int, num_bits: int = 16) -> Tensor:
    """Return integers of `num_bits` bits, a hash of `bits` (int32) and the step: the upper bits of
    MurmurHash3's finalizer of (bits xor hash of the step)."""
    h = bits ^ key_of(step)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        h.bitwise_xor_((h >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(signed(multiplier))
    return h.bitwise_right_shift_(32 - num_bits).bitwise_and_((1 << num_bits) - 1)


def round_to_bf16(x: Tensor, step: int, out: Tensor) -> None:
    bits = x.view(torch.int32)
    rounded = noise(bits, step).add_(bits).bitwise_and_(-0x10000).view(torch.float32)
    out.copy_(torch.where(x == x, rounded, x))  # noqa: PLR0124 - NaN stays
