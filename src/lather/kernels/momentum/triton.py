"""Nesterov's momentum in Triton: the formulas of `reference.py` in one pass over contiguous
tensors, in fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

BLOCK = 1024


def nesterov_(b: Tensor, g: Tensor, mu: float) -> Tensor:
    n = torch.empty_like(g)
    grid = (triton.cdiv(g.numel(), BLOCK),)
    launch(_nesterov, grid, g, b, n, 1.0 - mu, float(mu), g.numel(), BLOCK=BLOCK)
    return n


@triton.jit
def _between(start, end, weight):
    """Do the same as torch's lerp, which is exact at both ends."""
    return tl.where(
        weight < 0.5, start + weight * (end - start), end - (1.0 - weight) * (end - start)
    )


@triton.jit
def _nesterov(g, b, n, of_g, mu, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    gradient = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    momentum = _between(before, gradient, of_g).to(b.dtype.element_ty)
    tl.store(b + at, momentum, mask=inside)
    ahead = _between(gradient, momentum.to(tl.float32), mu)
    tl.store(n + at, ahead.to(n.dtype.element_ty), mask=inside)
