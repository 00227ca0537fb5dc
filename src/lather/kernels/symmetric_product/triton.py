"""Products of matrices with their own transposes in Triton: a program computes one square tile of
the result, on the diagonal or below it, and stores it there and, transposed, above the diagonal.

Letters: B matrices, m rows, n columns. The rows of x may be contiguous, or its columns. Products
are summed in fp32; those of fp32 operands are in TF32. A tile on the diagonal is computed whole,
and its lower triangle is copied onto the upper one, so that results are symmetric to the bit.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch
from lather.kernels.symmetric_product import SIDE

DEPTH_BYTES = 128
"""Bytes of a row that are multiplied at a time."""

STAGES, STAGES_OF_MANY = 4, 3
"""Tiles of x that are under way in a program, one of which is being multiplied. Measured on an
H200: with more than `MANY` programs three take 0.85 to 1.02 of the time of four (m from 512 to
4,096), with 200 programs 1.6 times as long."""
MANY = 264
"""Twice the multiprocessors of compute capability 9.0."""


def symmetric_product(x: Tensor) -> Tensor:
    b, m, _ = x.shape
    return _launch(x, None, x.new_empty(b, m, m), 0.0, 1.0)


def add_symmetric_product(
    total: Tensor, x: Tensor, *, beta: float, alpha: float, out: Tensor | None
) -> Tensor:
    out = total.new_empty(total.shape) if out is None else out
    return _launch(x, total if beta else None, out, beta, alpha)


def _launch(x: Tensor, total: Tensor | None, out: Tensor, beta: float, alpha: float) -> Tensor:
    b, m, n = x.shape
    side = triton.cdiv(m, SIDE)
    num_tiles = side * (side + 1) // 2
    options = {"SIDE": SIDE, "DEPTH": DEPTH_BYTES // x.element_size()}
    numbers = (float(beta), float(alpha), m, n, num_tiles, *x.stride())
    stages = STAGES_OF_MANY if b * num_tiles > MANY else STAGES
    schedule = {"num_warps": 8, "num_stages": stages}
    launch(_product, (b * num_tiles,), x, total, out, *numbers, **options, **schedule)
    return out


@triton.jit
def _tile_of(number):
    """Return row and column of a tile, counted row by row up to the diagonal."""
    i = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    return i, number - i * (i + 1) // 2


@triton.jit(do_not_specialize=["num_tiles"])  # Triton 3.6 cannot compile a constant of 1
def _product(
    x_ptr,
    total_ptr,
    out_ptr,
    beta,
    alpha,
    m,
    n,
    num_tiles,
    of_matrix,
    of_row,
    of_column,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    matrix = tl.program_id(0) // num_tiles
    i, j = _tile_of(tl.program_id(0) - matrix * num_tiles)
    row, column = i * SIDE + tl.arange(0, SIDE), j * SIDE + tl.arange(0, SIDE)
    depth = tl.arange(0, DEPTH)
    x = x_ptr + matrix.to(tl.int64) * of_matrix
    left = row[:, None] * of_row + depth[None, :] * of_column
    right = column[:, None] * of_row + depth[None, :] * of_column
    y = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, n, DEPTH):
        inside = depth[None, :] < n - start
        a = tl.load(x + left, mask=(row[:, None] < m) & inside, other=0.0)
        b = tl.load(x + right, mask=(column[:, None] < m) & inside, other=0.0)
        y = tl.dot(a, tl.trans(b), y, input_precision="tf32")
        x += DEPTH * of_column
    y *= alpha
    first = matrix.to(tl.int64) * m * m
    at, inside = row[:, None] * m + column[None, :], (row[:, None] < m) & (column[None, :] < m)
    if total_ptr is not None:
        total = tl.load(total_ptr + first + at, mask=inside, other=0.0)
        y += beta * total.to(tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    if i == j:
        y = tl.where(column[None, :] <= row[:, None], y, tl.trans(y))
    tl.store(out_ptr + first + at, y, mask=inside)
    if i != j:
        # the same numbers above the diagonal, where a row of the tile is a column of the result
        at, inside = column[:, None] * m + row[None, :], (column[:, None] < m) & (row[None, :] < m)
        tl.store(out_ptr + first + at, tl.trans(y), mask=inside)
