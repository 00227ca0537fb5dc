"""Matrices divided by their norms in Triton.

The first kernel measures parts of a matrix: the largest element of each, and the sum of the squares
of the part divided by it. Every program of the second adds the parts of its matrix, in the same
order, and divides a block. There are no atomics: a matrix has the same bits in every batch.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

BLOCK = 4096
RUN = 4
"""Least number of blocks of a part."""
PARTS = 256
"""Largest number of parts of a matrix, which all programs of the second kernel read."""
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def unit_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    num_matrices, numel = len(x), x.numel() // len(x)
    num_blocks = triton.cdiv(numel, BLOCK)
    run = max(RUN, triton.cdiv(num_blocks, PARTS))
    num_parts = triton.cdiv(num_blocks, run)
    largest, squares = x.new_empty(num_matrices, num_parts), x.new_empty(num_matrices, num_parts)
    out, grid = torch.empty_like(x, dtype=dtype), (num_matrices * num_parts,)
    launch(_measure, grid, x, largest, squares, numel, num_parts, run, BLOCK=BLOCK)
    options = {"PARTS": triton.next_power_of_2(num_parts), "BLOCK": BLOCK}
    numbers = (numel, num_parts, num_blocks)
    launch(_divide, (num_matrices * num_blocks,), x, largest, squares, out, *numbers, **options)
    return out


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _measure(x, largest, squares, numel, num_parts, run, BLOCK: tl.constexpr):
    matrix = tl.program_id(0) // num_parts
    begin = (tl.program_id(0) - matrix * num_parts).to(tl.int64) * run * BLOCK
    at, first = begin + tl.arange(0, BLOCK), matrix.to(tl.int64) * numel
    size, total = TINY, 0.0
    for _ in range(run):
        y = tl.load(x + first + at, mask=at < numel, other=0.0)
        larger = tl.maximum(size, tl.max(tl.abs(y)))
        total = total * _square(size / larger) + tl.sum(_square(y / larger))
        size = larger
        at += BLOCK
    tl.store(largest + tl.program_id(0), size)
    tl.store(squares + tl.program_id(0), total)


@triton.jit
def _divide(
    x,
    largest,
    squares,
    out,
    numel,
    num_parts,
    num_blocks,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(0) // num_blocks
    block = tl.program_id(0) - matrix * num_blocks
    part = tl.arange(0, PARTS)
    of_matrix, is_part = matrix * num_parts + part, part < num_parts
    sizes = tl.load(largest + of_matrix, mask=is_part, other=0.0)
    parts = tl.load(squares + of_matrix, mask=is_part, other=0.0)
    size = tl.max(sizes)
    norm = tl.sqrt_rn(tl.sum(parts * _square(sizes / size)))
    norm = tl.maximum(norm, TINY, propagate_nan=tl.PropagateNan.ALL)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, at = at < numel, matrix.to(tl.int64) * numel + at
    y = tl.load(x + at, mask=inside, other=0.0) / size / norm
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
