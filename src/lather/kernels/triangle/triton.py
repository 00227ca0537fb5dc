"""Packed triangles in Triton: one launch each, in tiles of the rectangle, or of the matrix."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

SIDE = 32
"""Rows and columns of a tile."""


def pack_triangle(x: Tensor, out: Tensor) -> None:
    n = x.shape[-1]
    tiles = triton.cdiv(n + 1, SIDE), triton.cdiv((n + 1) // 2, SIDE)
    grid = (tiles[0], tiles[1], x.numel() // max(n * n, 1))
    launch(_pack, grid, x, out, n, SIDE=SIDE)


def unpack_triangle(packed: Tensor, out: Tensor) -> None:
    n = out.shape[-1]
    tiles = triton.cdiv(n, SIDE)
    launch(_unpack, (tiles, tiles, out.numel() // max(n * n, 1)), packed, out, n, SIDE=SIDE)


@triton.jit
def _pack(x_ptr, out_ptr, n, SIDE: tl.constexpr):
    h, is_odd = (n + 1) // 2, n % 2
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)[:, None]
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :]
    matrix = tl.program_id(2).to(tl.int64)
    inside = (row < n + 1 - is_odd) & (column < h)
    i, j = row - (1 - is_odd), column
    in_corner = i < j
    i, j = tl.where(in_corner, h + row, i), tl.where(in_corner, h + column - is_odd, j)
    values = tl.load(x_ptr + matrix * n * n + i * n + j, mask=inside, other=0.0)
    at = matrix * (n * (n + 1) // 2) + row * h + column
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _unpack(packed_ptr, out_ptr, n, SIDE: tl.constexpr):
    h, is_odd = (n + 1) // 2, n % 2
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)[:, None]
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :]
    matrix = tl.program_id(2).to(tl.int64)
    inside = (row < n) & (column < n)
    i, j = tl.maximum(row, column), tl.minimum(row, column)
    in_corner = j >= h
    # the corner holds the transposed triangle of the other columns
    i, j = tl.where(in_corner, j - h, i + 1 - is_odd), tl.where(in_corner, i - h + is_odd, j)
    packed = packed_ptr + matrix * (n * (n + 1) // 2)
    values = tl.load(packed + i * h + j, mask=inside, other=0.0)
    at = matrix * n * n + row * n + column
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=inside)
