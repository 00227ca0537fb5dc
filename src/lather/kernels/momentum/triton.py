"""Nesterov's momentum in Triton: the formulas of `reference.py` in one pass over contiguous
tensors, in fp32.

With unit norms the first kernel updates B and measures parts of N, without writing it; the second
computes N again and divides it (`lather.kernels.unit_norm`)."""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch
from lather.kernels.unit_norm.triton import BLOCK as BLOCK_OF_PARTS
from lather.kernels.unit_norm.triton import MatrixParts, norm_of, square

BLOCK = 1024
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def nesterov_(b: Tensor, g: Tensor, mu: float, factor: float = 1.0) -> Tensor:
    n = torch.empty_like(g)
    grid = (triton.cdiv(g.numel(), BLOCK),)
    weights = (float(factor), 1.0 - mu, float(mu))
    launch(_nesterov, grid, g, b, n, *weights, g.numel(), BLOCK=BLOCK)
    return n


def unit_nesterov_(
    b: Tensor, g: Tensor, mu: float, dtype: torch.dtype, factor: float = 1.0
) -> Tensor:
    parts = MatrixParts.of(g)
    largest, squares = parts.empty(g), parts.empty(g)
    out, weights = torch.empty_like(g, dtype=dtype), (float(factor), 1.0 - mu, float(mu))
    first, second = (len(g) * parts.num_parts,), (len(g) * parts.num_blocks,)
    launch(_measure, first, g, b, largest, squares, *weights, *parts.of_first, BLOCK=BLOCK_OF_PARTS)
    arguments = (g, b, largest, squares, out, float(factor), float(mu), *parts.of_second)
    launch(_divide, second, *arguments, **parts.options)
    return out


@triton.jit
def _between(start, end, weight):
    """Do the same as torch's lerp, which is exact at both ends."""
    return tl.where(
        weight < 0.5, start + weight * (end - start), end - (1.0 - weight) * (end - start)
    )


@triton.jit
def _nesterov(g, b, n, factor, of_g, mu, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    gradient = tl.load(g + at, mask=inside, other=0.0).to(tl.float32) * factor
    before = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    momentum = _between(before, gradient, of_g).to(b.dtype.element_ty)
    tl.store(b + at, momentum, mask=inside)
    ahead = _between(gradient, momentum.to(tl.float32), mu)
    tl.store(n + at, ahead.to(n.dtype.element_ty), mask=inside)


@triton.jit
def _measure(g, b, largest, squares, factor, of_g, mu, numel, num_parts, run, BLOCK: tl.constexpr):
    matrix = tl.program_id(0) // num_parts
    begin = (tl.program_id(0) - matrix * num_parts).to(tl.int64) * run * BLOCK
    at, first = begin + tl.arange(0, BLOCK), matrix.to(tl.int64) * numel
    size, total = TINY, 0.0
    for _ in range(run):
        inside = at < numel
        gradient = tl.load(g + first + at, mask=inside, other=0.0) * factor
        before = tl.load(b + first + at, mask=inside, other=0.0)
        momentum = _between(before, gradient, of_g)
        tl.store(b + first + at, momentum, mask=inside)
        n = _between(gradient, momentum, mu)
        larger = tl.maximum(size, tl.max(tl.abs(n)))
        total = total * square(size / larger) + tl.sum(square(n / larger))
        size = larger
        at += BLOCK
    tl.store(largest + tl.program_id(0), size)
    tl.store(squares + tl.program_id(0), total)


@triton.jit
def _divide(
    g,
    b,
    largest,
    squares,
    out,
    factor,
    mu,
    numel,
    num_parts,
    num_blocks,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(0) // num_blocks
    block = tl.program_id(0) - matrix * num_blocks
    size, norm = norm_of(largest, squares, matrix, num_parts, PARTS)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, at = at < numel, matrix.to(tl.int64) * numel + at
    gradient = tl.load(g + at, mask=inside, other=0.0) * factor
    ahead = _between(gradient, tl.load(b + at, mask=inside, other=0.0), mu)
    tl.store(out + at, (ahead / size / norm).to(out.dtype.element_ty), mask=inside)
