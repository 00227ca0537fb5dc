"""The change of fp32 weights by bf16 updates in Triton, in one pass over contiguous tensors."""

from __future__ import annotations

from ctypes import c_float

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

BLOCK = 2048


def change_by_(w: Tensor, u: Tensor, decay: float, lr: float) -> None:
    grid = (triton.cdiv(w.numel(), BLOCK),)
    launch(_change, grid, w, u, *_thirds(decay / lr), *_thirds(-lr), w.numel(), BLOCK=BLOCK)


def _thirds(x: float) -> tuple[float, float, float]:
    """Return three numbers in fp32, as which Triton passes numbers, whose sum in fp64 is x."""
    high = c_float(x).value
    middle = c_float(x - high).value
    return high, middle, c_float(x - high - middle).value


@triton.jit
def _sum(high, middle, low, BLOCK: tl.constexpr):
    x = tl.full((BLOCK,), high, tl.float64) + tl.full((BLOCK,), middle, tl.float64)
    return x + tl.full((BLOCK,), low, tl.float64)


@triton.jit
def _change(
    w,
    u,
    decay_high,
    decay_middle,
    decay_low,
    lr_high,
    lr_middle,
    lr_low,
    numel,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    decay = _sum(decay_high, decay_middle, decay_low, BLOCK)
    lr = _sum(lr_high, lr_middle, lr_low, BLOCK)
    x = tl.load(w + at, mask=inside, other=0.0).to(tl.float64)
    update = tl.load(u + at, mask=inside, other=0.0).to(tl.float64)
    change = tl.fma(x, decay, update).to(tl.float32)
    tl.store(w + at, tl.fma(change.to(tl.float64), lr, x).to(tl.float32), mask=inside)
