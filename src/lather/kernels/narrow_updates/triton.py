"""The change of fp32 weights by bf16 updates in Triton, in one pass over contiguous tensors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

BLOCK = 2048


def change_by_(w: Tensor, u: Tensor, decay: float, lr: float) -> None:
    grid = (triton.cdiv(w.numel(), BLOCK),)
    launch(_change, grid, w, u, decay / lr, float(lr), w.numel(), BLOCK=BLOCK)


@triton.jit
def _change(w, u, decay, lr, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    x = tl.load(w + at, mask=inside, other=0.0)
    update = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(w + at, tl.fma(tl.fma(x, decay, update), -lr, x), mask=inside)
