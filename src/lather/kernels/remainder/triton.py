"""The two halves of fp32 weights in Triton: the formulas of `reference.py` in one pass over
contiguous tensors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

BLOCK = 1024


def join(w: Tensor, r: Tensor, x: Tensor) -> None:
    launch(_join_kernel, (triton.cdiv(x.numel(), BLOCK),), w, r, x, x.numel(), BLOCK=BLOCK)


def split(x: Tensor, w: Tensor, r: Tensor) -> None:
    launch(_split_kernel, (triton.cdiv(x.numel(), BLOCK),), x, w, r, x.numel(), BLOCK=BLOCK)


@triton.jit
def joined(w, r):
    """Return the fp32 weights with the halves w and r."""
    half, remainder = w.to(tl.int16, bitcast=True).to(tl.int32), r.to(tl.int32)
    remainder = tl.where((half & 0x7FFF) == 0, tl.maximum(remainder, 0), remainder)
    return ((half << 16) + remainder).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """Return the halves of fp32 weights, bf16 and int16."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits, 0x7FC00000)  # noqa: PLR0124 - NaN is not
    half = ((bits + 0x8000) >> 16).to(tl.int16)
    return half.to(tl.bfloat16, bitcast=True), bits.to(tl.int16)


@triton.jit
def _join_kernel(w, r, x, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    half, remainder = tl.load(w + at, mask=inside, other=0.0), tl.load(r + at, mask=inside, other=0)
    tl.store(x + at, joined(half, remainder), mask=inside)


@triton.jit
def _split_kernel(x, w, r, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    half, remainder = halves(tl.load(x + at, mask=inside, other=0.0))
    tl.store(w + at, half, mask=inside)
    tl.store(r + at, remainder, mask=inside)
