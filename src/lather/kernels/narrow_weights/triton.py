"""The change of bf16 weights in Triton: the formulas of `reference.py` in one pass over contiguous
tensors. A product that is added is not rounded before, as in torch's sums on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch
from lather.kernels.remainder.triton import halves, joined
from lather.kernels.stochastic_rounding.reference import key_of
from lather.kernels.stochastic_rounding.triton import rounded

BLOCK = 1024


def change_(w: Tensor, u: Tensor, r: Tensor | None, *, decay: float, lr: float, step: int) -> None:
    grid, numbers = (triton.cdiv(w.numel(), BLOCK),), (1.0 - decay, float(lr), w.numel())
    if r is None:
        launch(_change_rounded, grid, w.view(torch.int16), u, key_of(step), *numbers, BLOCK=BLOCK)
    else:
        launch(_change_exact, grid, w, r, u, *numbers, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["key"])
def _change_rounded(w, u, key, keep, lr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    half = tl.load(w + at, mask=inside, other=0).to(tl.int32)
    x = (half << 16).to(tl.float32, bitcast=True)
    x = tl.fma(tl.load(u + at, mask=inside, other=0.0), -lr, x * keep)
    tl.store(w + at, rounded(x, key), mask=inside)


@triton.jit
def _change_exact(w, r, u, keep, lr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    half, remainder = tl.load(w + at, mask=inside, other=0.0), tl.load(r + at, mask=inside, other=0)
    update = tl.load(u + at, mask=inside, other=0.0)
    x = tl.fma(update, -lr, joined(half, remainder) * keep)
    half, remainder = halves(x)
    tl.store(w + at, half, mask=inside)
    tl.store(r + at, remainder, mask=inside)
