"""Matrices in FP8 with block scales on CUDA.

A program of a product computes a tile of one expert's rows. It multiplies a block of 128 of the
contracted dim on tensor cores, and adds the product times its scales to fp32 sums in registers, as
DeepSeek-V3 does. Rows are looked up by number while they are read, so that no gathered copy is
made. The experts' numbers of rows are on the device: there are as many programs as the rows could
need, each finds its expert from the ends, and those without rows return at once. Every run has the
same bits.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.block_scaled.reference import BLOCK, LARGEST, SMALLEST_SCALE
from lather.kernels.launch import launch

ROWS = 32
"""Rows of a tile that is converted."""
PRODUCT_ROWS = 128
"""Rows of a tile of a product; it has the columns of a block of scales."""
_BLOCK, _LARGEST, _SMALLEST = map(tl.constexpr, (BLOCK, LARGEST, SMALLEST_SCALE))


def scale_rows(x_RN: Tensor, values_RN: Tensor, scales_RB: Tensor) -> None:
    num_blocks = scales_RB.shape[1]
    grid = (triton.cdiv(len(x_RN), ROWS) * num_blocks,)
    sizes = (*x_RN.shape, num_blocks)
    constants = {"ROWS": ROWS, "BLOCK": BLOCK}
    launch(_scale_rows, grid, x_RN.contiguous(), values_RN, scales_RB, *sizes, **constants)


def scale_weights(weight_EOI: Tensor, values_EOI: Tensor, scales_EPQ: Tensor) -> None:
    sizes = (*weight_EOI.shape[1:], *scales_EPQ.shape[1:])
    tensors = weight_EOI.contiguous(), values_EOI, scales_EPQ
    launch(_scale_weights, (scales_EPQ.numel(),), *tensors, *sizes, BLOCK=BLOCK, num_warps=8)


def unscale_rows(
    values_RN: Tensor, scales_RB: Tensor, row_G: Tensor | None, out_GN: Tensor
) -> None:
    num_blocks = scales_RB.shape[1]
    grid = (triton.cdiv(len(out_GN), ROWS) * num_blocks,)
    sizes = (*out_GN.shape, num_blocks)
    constants = {"ROWS": ROWS, "BLOCK": BLOCK}
    launch(_unscale_rows, grid, values_RN, scales_RB, row_G, out_GN, *sizes, **constants)


def grouped_product(
    values_RN: Tensor,
    scales_RB: Tensor,
    row_G: Tensor | None,
    weight_EOI: Tensor,
    scales_EPQ: Tensor,
    end_E: Tensor,
    out_GM: Tensor,
    transposed: bool,
) -> None:
    num_experts, (num_rows, num_columns) = len(weight_EOI), out_GM.shape
    # each expert begins a tile
    tiles = triton.cdiv(num_rows, PRODUCT_ROWS) + num_experts
    launch(
        _multiply,
        (tiles * triton.cdiv(num_columns, BLOCK) * min(num_rows, 1),),
        values_RN,
        scales_RB,
        row_G,
        weight_EOI,
        scales_EPQ,
        end_E,
        out_GM,
        num_experts,
        *weight_EOI.shape[1:],
        EXPERTS=triton.next_power_of_2(num_experts),
        TRANSPOSED=transposed,
        ROWS=PRODUCT_ROWS,
        BLOCK=BLOCK,
        num_warps=8,
        num_stages=3,
    )


@triton.jit
def store_scaled(values_ptr, scales_ptr, x, row, num_rows, first, end, num_columns):
    """Store a tile of rows in FP8, with the columns from `first`, where a block begins, to `end`,
    where a row or a block ends; rows have `num_columns` columns."""
    row, column = row.to(tl.int64)[:, None], first + tl.arange(0, x.shape[1])[None, :]
    exists = (row < num_rows) & (column < end)
    shape: tl.constexpr = (x.shape[0], x.shape[1] // _BLOCK, _BLOCK)
    x = tl.reshape(tl.where(exists, x.to(tl.float32), 0.0), shape)
    scale = _scale(tl.max(_magnitude(x), axis=2))
    values = tl.div_rn(x, tl.broadcast_to(scale[:, :, None], shape))
    values = tl.reshape(values, (shape[0], shape[1] * _BLOCK)).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * num_columns + column, values, mask=exists)
    block = tl.arange(0, shape[1])[None, :]
    at = row * tl.cdiv(num_columns, _BLOCK) + first // _BLOCK + block
    tl.store(scales_ptr + at, scale, mask=(row < num_rows) & (first + block * _BLOCK < end))


@triton.jit
def _scale(largest_bits):
    """Return the scale of blocks by the bits of their largest |x|; NaN stays NaN."""
    largest = largest_bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, _LARGEST, tl.float32))
    return tl.where(scale < _SMALLEST, _SMALLEST, scale)


@triton.jit
def _magnitude(x):
    """Return the bits of |x|, which are in the order of |x|; those of NaN are above all others."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_rows(
    x_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    num_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) % num_blocks * BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = first + tl.arange(0, BLOCK)[None, :]
    exists = (row[:, None] < num_rows) & (column < num_columns)
    x = tl.load(x_ptr + row[:, None] * num_columns + column, mask=exists)
    store_scaled(values_ptr, scales_ptr, x, row, num_rows, first, num_columns, num_columns)


@triton.jit
def _scale_weights(
    weight_ptr,
    values_ptr,
    scales_ptr,
    size_o,
    size_i,
    down,
    across,
    BLOCK: tl.constexpr,
):
    expert, block = tl.program_id(0) // (down * across), tl.program_id(0) % (down * across)
    o = block // across * BLOCK + tl.arange(0, BLOCK)[:, None]
    i = block % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    at, exists = expert.to(tl.int64) * size_o * size_i + o * size_i + i, (o < size_o) & (i < size_i)
    weight = tl.load(weight_ptr + at, mask=exists, other=0.0).to(tl.bfloat16).to(tl.float32)
    largest = tl.max(tl.max(_magnitude(weight), axis=1), axis=0)
    scale = _scale(tl.full((1, 1), 0, tl.int32) + largest)
    values = tl.div_rn(weight, tl.broadcast_to(scale, weight.shape))
    tl.store(values_ptr + at, values.to(values_ptr.dtype.element_ty), mask=exists)
    tl.store(scales_ptr + tl.program_id(0) + tl.zeros((1, 1), tl.int32), scale)


@triton.jit
def _unscale_rows(
    values_ptr,
    scales_ptr,
    row_ptr,
    out_ptr,
    num_rows,
    num_columns,
    num_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) % num_blocks
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    source = row
    if row_ptr is not None:
        source = tl.load(row_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    present = (row < num_rows) & (source >= 0)
    within = column < num_columns
    at = source[:, None] * num_columns + column
    values = tl.load(values_ptr + at, mask=present[:, None] & within, other=0.0).to(tl.float32)
    scale = tl.load(scales_ptr + source * num_blocks + block, mask=present, other=0.0)
    out = (values * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + row[:, None] * num_columns + column, out, mask=(row < num_rows)[:, None] & within
    )


@triton.jit
def _multiply(
    values_ptr,
    scales_ptr,
    row_ptr,
    weight_ptr,
    weight_scales_ptr,
    end_ptr,
    out_ptr,
    num_experts,
    size_o,
    size_i,
    EXPERTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a tile of one expert's product, if there are rows for it."""
    contracted, num_columns = size_i, size_o
    if TRANSPOSED:
        contracted, num_columns = size_o, size_i
    across, num_blocks = tl.cdiv(num_columns, BLOCK), tl.cdiv(contracted, BLOCK)
    tile, across_tile = tl.program_id(0) // across, tl.program_id(0) % across

    e = tl.arange(0, EXPERTS)
    ends = tl.load(end_ptr + e, mask=e < num_experts, other=0)
    starts = tl.load(end_ptr + e - 1, mask=(e > 0) & (e < num_experts), other=0)
    tiles = tl.cdiv(ends - starts, ROWS)
    expert = tl.sum((tl.cumsum(tiles) <= tile).to(tl.int32))
    if expert < num_experts:
        start = tl.load(end_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(end_ptr + expert)
        tile -= tl.sum(tl.where(e < expert, tiles, 0))
        row = start + tile * ROWS + tl.arange(0, ROWS)
        exists, source = row < end, row
        if row_ptr is not None:
            source = tl.load(row_ptr + row, mask=exists, other=-1)
        exists_x, source = exists & (source >= 0), source.to(tl.int64)
        n, k = across_tile * BLOCK + tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK)
        x_ptrs = values_ptr + source[:, None] * contracted + k[None, :]
        scale_ptrs = scales_ptr + source * num_blocks
        weight_ptr += expert.to(tl.int64) * size_o * size_i
        weight_scales_ptr += expert * across * num_blocks
        if TRANSPOSED:
            weight_ptrs, weight_step = weight_ptr + k[:, None] * size_i + n, BLOCK * size_i
            weight_scales_ptr, scale_step = weight_scales_ptr + across_tile, across
        else:
            weight_ptrs, weight_step = weight_ptr + n * size_i + k[:, None], BLOCK
            weight_scales_ptr, scale_step = weight_scales_ptr + across_tile * num_blocks, 1
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for block in range(num_blocks):
            left = contracted - block * BLOCK
            x = tl.load(x_ptrs, mask=exists_x[:, None] & (k[None, :] < left), other=0.0)
            weight = tl.load(weight_ptrs, mask=(n < num_columns) & (k[:, None] < left), other=0.0)
            scale = tl.load(scale_ptrs, mask=exists_x, other=0.0) * tl.load(weight_scales_ptr)
            total += tl.dot(x, weight) * scale[:, None]
            x_ptrs += BLOCK
            weight_ptrs += weight_step
            scale_ptrs += 1
            weight_scales_ptr += scale_step
        at = row.to(tl.int64)[:, None] * num_columns + n
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, out, mask=exists[:, None] & (n < num_columns))
