"""Adam's moments and step direction in Triton: the formulas of `reference.py` in one pass, 3 reads
and 3 writes per element.

torch's operations make about 18, and memory bandwidth limits both. The computation is in fp32. The
moments must be contiguous; a gradient that is not contiguous is copied first.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.adam_in_basis.reference import corrections
from lather.kernels.launch import launch

BLOCK = 1024


def adam_in_basis(
    g: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    betas: tuple[float, float],
    eps: float | Tensor,
    correct_bias: bool,
    nesterov: bool,
) -> Tensor:
    """Do the same as in `reference.py`."""
    beta1, beta2 = betas
    c1, c2, next_c1 = corrections(step, betas, correct_bias=correct_bias)
    g = g.contiguous()
    u = torch.empty_like(g)
    of_m, of_g = (beta1 / next_c1, (1 - beta1) / c1) if nesterov else (1.0, 0.0)
    scale = 1.0 if nesterov else c1
    numbers = (1.0 - beta1, float(beta2), 1.0 - beta2, of_m, of_g, scale / math.sqrt(c2))
    options = {"PER_MATRIX": isinstance(eps, Tensor), "BLOCK": BLOCK}
    scaled = eps * scale if isinstance(eps, Tensor) else float(eps * scale)
    num_matrices = len(g) if options["PER_MATRIX"] else 1
    numel = g.numel() // max(num_matrices, 1)
    blocks = triton.cdiv(numel, BLOCK)
    tensors, grid = (g, exp_avg, exp_avg_sq, u), (num_matrices * blocks,)
    launch(_adam, grid, *tensors, *numbers, scaled, numel, blocks, **options)
    return u


@triton.jit
def _adam(
    g,
    exp_avg,
    exp_avg_sq,
    u,
    weight1,
    beta2,
    weight2,
    momentum,
    own,
    scale,
    eps,
    numel,
    blocks,
    PER_MATRIX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    if PER_MATRIX:
        matrix = block // blocks
        block -= matrix * blocks
        first = matrix.to(tl.int64) * numel
        floor = tl.load(eps + matrix)
    else:
        first = 0
        floor = eps
    within = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, at = within < numel, first + within
    g_ = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.where(weight1 < 0.5, m + weight1 * (g_ - m), g_ - (1.0 - weight1) * (g_ - m))
    v = beta2 * v + weight2 * g_ * g_
    direction = (momentum * m + own * g_) / (tl.sqrt_rn(v) * scale + floor)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    tl.store(u + at, direction.to(u.dtype.element_ty), mask=inside)
