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
def _join_kernel(w, r, x, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    half = tl.load(w + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
    remainder = tl.load(r + at, mask=inside, other=0).to(tl.int32)
    remainder = tl.where((half & 0x7FFF) == 0, tl.maximum(remainder, 0), remainder)
    bits = (half << 16) + remainder
    tl.store(x + at, bits.to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def _split_kernel(x, w, r, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    value = tl.load(x + at, mask=inside, other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits, 0x7FC00000)  # noqa: PLR0124 - NaN is not
    half = ((bits + 0x8000) >> 16).to(tl.int16)
    tl.store(w + at, half.to(tl.bfloat16, bitcast=True), mask=inside)
    tl.store(r + at, bits.to(tl.int16), mask=inside)
