"""Stochastic rounding in Triton: one pass, 4 bytes read and 2 written per element, with the bits of
`reference.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch
from lather.kernels.stochastic_rounding.reference import key_of

BLOCK = 1024


def round_to_bf16(x: Tensor, step: int, out: Tensor) -> None:
    grid = (triton.cdiv(x.numel(), BLOCK),)
    launch(_round, grid, x, out.view(torch.int16), key_of(step), x.numel(), BLOCK=BLOCK)


@triton.jit
def noise(bits, key, NUM_BITS: tl.constexpr):
    """Do the same as in `reference.py`."""
    h = (bits ^ key) * 0x7FEB352D
    return ((h ^ (h >> 15)) * -0x7B935975) >> (32 - NUM_BITS)


@triton.jit
def rounded(x, key):
    """Return the bits in bf16 of fp32 values, as int16."""
    bits = x.to(tl.int32, bitcast=True)
    half = tl.where(x == x, (bits + 0x8000 + noise(bits, key, 16)) >> 16, 0x7FC0)  # noqa: PLR0124
    return half.to(tl.int16)


@triton.jit(do_not_specialize=["key"])
def _round(x_ptr, out_ptr, key, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numel, other=0.0)
    tl.store(out_ptr + at, rounded(x, key), mask=at < numel)
