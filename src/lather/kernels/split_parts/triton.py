"""The parts of matrices in Triton, in square tiles, because rows may be contiguous in x and columns
in the parts."""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

SIDE = 64
"""Rows and columns of a tile."""


def split_parts(x: Tensor, hi: Tensor, mid: Tensor) -> None:
    matrices, m, n = x.shape
    grid = matrices * triton.cdiv(m, SIDE) * triton.cdiv(n, SIDE)
    launch(_split, (grid,), x, hi, mid, m, n, *x.stride(), *hi.stride(), SIDE=SIDE)


@triton.jit
def _split(
    x_ptr,
    hi_ptr,
    mid_ptr,
    m,
    n,
    of_matrix,
    of_row,
    of_column,
    part_matrix,
    part_row,
    part_column,
    SIDE: tl.constexpr,
):
    columns = tl.cdiv(n, SIDE)
    per_matrix = tl.cdiv(m, SIDE) * columns
    matrix = (tl.program_id(0) // per_matrix).to(tl.int64)
    tile = tl.program_id(0) % per_matrix
    row = (tile // columns) * SIDE + tl.arange(0, SIDE)[:, None]
    column = (tile % columns) * SIDE + tl.arange(0, SIDE)[None, :]
    inside = (row < m) & (column < n)
    row, column = row.to(tl.int64), column.to(tl.int64)
    at = matrix * of_matrix + row * of_row + column * of_column
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    hi = x.to(tl.bfloat16)
    at = matrix * part_matrix + row * part_row + column * part_column
    tl.store(hi_ptr + at, hi, mask=inside)
    tl.store(mid_ptr + at, (x - hi.to(tl.float32)).to(tl.bfloat16), mask=inside)
