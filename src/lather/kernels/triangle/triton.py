"""Packed triangles in Triton: one launch each, in tiles of the rectangle, or of the matrix."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch
from lather.kernels.stochastic_rounding.reference import key_of
from lather.kernels.stochastic_rounding.triton import noise
from lather.kernels.triangle import reference

SIDE = 32
"""Rows and columns of a tile."""

UNIT, LARGEST, NOISE_BITS = (
    tl.constexpr(number) for number in (reference.UNIT, reference.LARGEST, reference.NOISE_BITS)
)
NOISE_MIDDLE = tl.constexpr(2 ** (reference.NOISE_BITS - 1) + 0.5)
NOISE_UNIT = tl.constexpr(2.0**-reference.NOISE_BITS)


def pack_triangle(x: Tensor, out: Tensor) -> None:
    launch(_pack, _tiles_of_rectangles(x), x, out, x.shape[-1], SIDE=SIDE)


def unpack_triangle(packed: Tensor, out: Tensor) -> None:
    launch(_unpack, _tiles_of_matrices(out), packed, out, out.shape[-1], SIDE=SIDE)


def quantize_triangle(x: Tensor, codes: Tensor, diagonal: Tensor, step: int) -> None:
    arguments = x, codes, diagonal, key_of(step), x.shape[-1]
    # a product and a sum that are rounded once would have other bits than the reference
    options = {"SIDE": SIDE, "num_warps": 8, "enable_fp_fusion": False}
    launch(_quantize, _tiles_of_rectangles(x), *arguments, **options)


def dequantize_triangle(codes: Tensor, diagonal: Tensor, out: Tensor) -> None:
    launch(_dequantize, _tiles_of_matrices(out), codes, diagonal, out, out.shape[-1], SIDE=SIDE)


def _tiles_of_rectangles(x: Tensor) -> tuple[int, int, int]:
    n = x.shape[-1]
    rows, columns = triton.cdiv(n + 1, SIDE), triton.cdiv((n + 1) // 2, SIDE)
    return rows, columns, x.numel() // max(n * n, 1)


def _tiles_of_matrices(out: Tensor) -> tuple[int, int, int]:
    n = out.shape[-1]
    return triton.cdiv(n, SIDE), triton.cdiv(n, SIDE), out.numel() // max(n * n, 1)


@triton.jit
def _place(SIDE: tl.constexpr):
    """Return rows and columns of this program's tile, and the number of its matrix."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)[:, None]
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :]
    return row, column, tl.program_id(2).to(tl.int64)


@triton.jit
def _source(row, column, n):
    """Return row and column in the matrix of an element of the rectangle, and which elements
    exist."""
    h, is_odd = (n + 1) // 2, n % 2
    i, j = row - (1 - is_odd), column
    in_corner = i < j
    i, j = tl.where(in_corner, h + row, i), tl.where(in_corner, h + column - is_odd, j)
    return i, j, (row < n + 1 - is_odd) & (column < h)


@triton.jit
def _packed_place(row, column, n):
    """Return the place in the rectangle of an element of the matrix, and which elements exist."""
    h, is_odd = (n + 1) // 2, n % 2
    i, j = tl.maximum(row, column), tl.minimum(row, column)
    in_corner = j >= h
    # the corner holds the transposed triangle of the other columns
    i, j = tl.where(in_corner, j - h, i + 1 - is_odd), tl.where(in_corner, i - h + is_odd, j)
    return i * h + j, (row < n) & (column < n)


@triton.jit
def _scale(diagonal):
    return tl.sqrt_rn(tl.maximum(diagonal, 0.0)) * UNIT


@triton.jit
def _pack(x_ptr, out_ptr, n, SIDE: tl.constexpr):
    row, column, matrix = _place(SIDE)
    i, j, inside = _source(row, column, n)
    values = tl.load(x_ptr + matrix * n * n + i * n + j, mask=inside, other=0.0)
    at = matrix * (n * (n + 1) // 2) + row * ((n + 1) // 2) + column
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _unpack(packed_ptr, out_ptr, n, SIDE: tl.constexpr):
    row, column, matrix = _place(SIDE)
    at, inside = _packed_place(row, column, n)
    values = tl.load(packed_ptr + matrix * (n * (n + 1) // 2) + at, mask=inside, other=0.0)
    at = matrix * n * n + row * n + column
    tl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["key"])
def _quantize(x_ptr, codes_ptr, diagonal_ptr, key, n, SIDE: tl.constexpr):
    row, column, matrix = _place(SIDE)
    i, j, inside = _source(row, column, n)
    x = x_ptr + matrix * n * n
    s_i = _scale(tl.load(x + i * n + i, mask=inside, other=0.0))
    s_j = _scale(tl.load(x + j * n + j, mask=inside, other=0.0))
    y = tl.load(x + i * n + j, mask=inside, other=0.0) * _reciprocal(s_i) * _reciprocal(s_j)
    u = noise(y.to(tl.int32, bitcast=True), key, NOISE_BITS).to(tl.float32) + NOISE_MIDDLE
    y = tl.floor(y + u * NOISE_UNIT)
    y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    at = matrix * (n * (n + 1) // 2) + row * ((n + 1) // 2) + column
    tl.store(codes_ptr + at, y.to(tl.int16), mask=inside)
    k = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    inside_k = (k < n) & (tl.program_id(1) == 0)
    diagonal = tl.load(x + k * (n + 1), mask=inside_k, other=0.0)
    tl.store(diagonal_ptr + matrix * n + k, diagonal, mask=inside_k)


@triton.jit
def _reciprocal(s):
    divisor = tl.where(s > 0, s, 1.0)
    return tl.where(s > 0, tl.div_rn(tl.full(s.shape, 1.0, tl.float32), divisor), 0.0)


@triton.jit
def _dequantize(codes_ptr, diagonal_ptr, out_ptr, n, SIDE: tl.constexpr):
    row, column, matrix = _place(SIDE)
    at, inside = _packed_place(row, column, n)
    code = tl.load(codes_ptr + matrix * (n * (n + 1) // 2) + at, mask=inside, other=0)
    d_i = tl.load(diagonal_ptr + matrix * n + tl.maximum(row, column), mask=inside, other=0.0)
    d_j = tl.load(diagonal_ptr + matrix * n + tl.minimum(row, column), mask=inside, other=0.0)
    y = code.to(tl.float32) * _scale(d_i) * _scale(d_j)
    y = tl.where(row == column, d_i, y)
    tl.store(out_ptr + matrix * n * n + row * n + column, y, mask=inside)
