"""Tensors in 8 bits in Triton, with the bits of `reference.py`: one pass each, 5 bytes read and
written per element. A program takes several blocks of elements, one in a row of its tile."""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch, tile
from lather.kernels.quantized.reference import BLOCK, Code
from lather.kernels.stochastic_rounding.reference import key_of
from lather.kernels.stochastic_rounding.triton import noise

TILE = 4096
"""Elements of a tile."""


def quantize_(
    x: Tensor, codes: Tensor, scales: Tensor, step: int, code: Code, stochastic: bool
) -> None:
    sizes = _sizes(x, scales, code)
    narrow = codes.view(torch.uint8)
    arguments = (x, narrow, scales, key_of(step), x.shape[-1], scales.shape[-1], scales.numel())
    launch(_quantize, _grid(scales, sizes), *arguments, STOCHASTIC=stochastic, **sizes)


def dequantize(codes: Tensor, scales: Tensor, out: Tensor, code: Code) -> None:
    sizes = _sizes(codes, scales, code)
    arguments = (
        codes.view(torch.uint8),
        scales,
        out,
        codes.shape[-1],
        scales.shape[-1],
        scales.numel(),
    )
    del sizes["OCTAVES"]
    launch(_dequantize, _grid(scales, sizes), *arguments, **sizes)


def _sizes(x: Tensor, scales: Tensor, code: Code) -> dict[str, Any]:
    constants = {"OCTAVES": code.octaves, "SHIFT": code.shift, "SIGNED": code.is_signed}
    return tile(min(x.shape[-1], BLOCK), TILE) | constants


def _grid(scales: Tensor, sizes: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(scales.numel(), sizes["ROWS"]),)


@triton.jit
def _places(num_columns, blocks, num_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of a tile's blocks, the places of their elements in memory, and which of
    them exist."""
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = block // blocks
    column = (block - row * blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64)[:, None] * num_columns + column
    return block, at, (column < num_columns) & (block < num_blocks)[:, None]


@triton.jit(do_not_specialize=["key"])
def _quantize(
    x_ptr,
    codes_ptr,
    scales_ptr,
    key,
    num_columns,
    blocks,
    num_blocks,
    STOCHASTIC: tl.constexpr,
    OCTAVES: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, at, inside = _places(num_columns, blocks, num_blocks, ROWS, BLOCK)
    bits = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    top = tl.max(magnitude, 1)
    exponent = tl.maximum(((top + (1 << SHIFT) - 1) >> 23) + 2 - OCTAVES, 1)
    unit = tl.where(top >= 0x7F800000, 0x7FFFFFFF, exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales_ptr + block, unit, mask=block < num_blocks)

    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    y = magnitude.to(tl.float32, bitcast=True) * inverse[:, None]
    q = (y + tl.maximum(y, 1.0)).to(tl.int32, bitcast=True) - 0x3F800000 + (1 << (SHIFT - 1))
    if STOCHASTIC:
        q += noise(bits, key, SHIFT)
    q >>= SHIFT
    q = q | ((bits >> 24) & 0x80) if SIGNED else tl.maximum(q, tl.minimum(bits, 1))
    tl.store(codes_ptr + at, q.to(tl.uint8), mask=inside)


@triton.jit
def _dequantize(
    codes_ptr,
    scales_ptr,
    out_ptr,
    num_columns,
    blocks,
    num_blocks,
    SHIFT: tl.constexpr,
    SIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, at, inside = _places(num_columns, blocks, num_blocks, ROWS, BLOCK)
    unit = tl.load(scales_ptr + block, mask=block < num_blocks, other=0.0)
    q = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    magnitude = q & 0x7F if SIGNED else q
    y = ((magnitude << SHIFT) + 0x3F800000).to(tl.float32, bitcast=True)
    y = (y - tl.maximum(0.5 * y, 1.0)) * unit[:, None]
    if SIGNED:
        y = tl.where(q > 0x7F, -y, y)
    tl.store(out_ptr + at, y, mask=inside)
