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
def noise(bits, key):
    """Return the 32 bits (uint32) of which `reference.py` takes the upper ones."""
    h = bits ^ key.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    return (h ^ (h >> 13)) * 0xC2B2AE35


@triton.jit(do_not_specialize=["key"])
def _round(x_ptr, out_ptr, key, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numel, other=0.0)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.where(x == x, (bits + (noise(bits, key) >> 16)) >> 16, 0x7FC0)  # noqa: PLR0124
    tl.store(out_ptr + at, rounded.to(tl.int16), mask=at < numel)
