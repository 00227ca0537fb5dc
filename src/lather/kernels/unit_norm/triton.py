"""Matrices divided by their norms in Triton.

The first kernel measures parts of a matrix: the largest element of each, and the sum of the squares
of the part divided by it. Every program of the second adds the parts of its matrix, in the same
order, and divides a block. There are no atomics: a matrix has the same bits in every batch.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from dataclasses import dataclass

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
    parts = MatrixParts.of(x)
    largest, squares = parts.empty(x), parts.empty(x)
    out, grid = torch.empty_like(x, dtype=dtype), (len(x) * parts.num_parts,)
    launch(_measure, grid, x, largest, squares, *parts.of_first, BLOCK=BLOCK)
    grid = (len(x) * parts.num_blocks,)
    launch(_divide, grid, x, largest, squares, out, *parts.of_second, **parts.options)
    return out


@dataclass(frozen=True)
class MatrixParts:
    """How matrices are divided among the programs of the two kernels."""

    numel: int
    """Number of elements of a matrix."""
    num_blocks: int
    run: int
    """Number of blocks of a part."""

    @classmethod
    def of(cls, x: Tensor) -> MatrixParts:
        numel = x.numel() // len(x)
        num_blocks = triton.cdiv(numel, BLOCK)
        return cls(numel, num_blocks, max(RUN, triton.cdiv(num_blocks, PARTS)))

    @property
    def num_parts(self) -> int:
        return int(triton.cdiv(self.num_blocks, self.run))

    @property
    def of_first(self) -> tuple[int, int, int]:
        """The numbers that the first kernel takes."""
        return self.numel, self.num_parts, self.run

    @property
    def of_second(self) -> tuple[int, int, int]:
        return self.numel, self.num_parts, self.num_blocks

    @property
    def options(self) -> dict[str, int]:
        return {"PARTS": triton.next_power_of_2(self.num_parts), "BLOCK": BLOCK}

    def empty(self, x: Tensor) -> Tensor:
        """Return memory for a number of each part."""
        return x.new_empty(len(x), self.num_parts)


@triton.jit
def square(x):
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
        total = total * square(size / larger) + tl.sum(square(y / larger))
        size = larger
        at += BLOCK
    tl.store(largest + tl.program_id(0), size)
    tl.store(squares + tl.program_id(0), total)


@triton.jit
def norm_of(largest, squares, matrix, num_parts, PARTS: tl.constexpr):
    """Return the largest element of a matrix, and the norm of the matrix divided by it, from what
    its parts have measured."""
    part = tl.arange(0, PARTS)
    of_matrix, is_part = matrix * num_parts + part, part < num_parts
    sizes = tl.load(largest + of_matrix, mask=is_part, other=0.0)
    parts = tl.load(squares + of_matrix, mask=is_part, other=0.0)
    size = tl.max(sizes)
    norm = tl.sqrt_rn(tl.sum(parts * square(sizes / size)))
    return size, tl.maximum(norm, TINY, propagate_nan=tl.PropagateNan.ALL)


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
    size, norm = norm_of(largest, squares, matrix, num_parts, PARTS)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, at = at < numel, matrix.to(tl.int64) * numel + at
    y = tl.load(x + at, mask=inside, other=0.0) / size / norm
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
