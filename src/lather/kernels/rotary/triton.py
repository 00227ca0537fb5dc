"""The rotation of rotary position embedding on CUDA: a program processes a few heads, each of which
is read and written once.

Letters: B sequences, S positions, H heads, P pairs; rows are the heads of all positions, a tile is
ROWS x P. Adjacent pairs are read as a run of 2 P columns and split in registers, so that both
layouts load and store whole cache lines.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch, tile, wide

TILE = 2048
"""Pairs in a tile."""


def turn(
    x_BSHR: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, *, halves: bool, back: bool = False
) -> Tensor:
    x_BSHR = x_BSHR if x_BSHR.stride(-1) == 1 else x_BSHR.contiguous()
    y_BSHR = torch.empty(x_BSHR.shape, dtype=x_BSHR.dtype, device=x_BSHR.device)
    num_batch, num_positions, num_heads, width = x_BSHR.shape
    num_rows = num_batch * num_positions * num_heads
    options = {
        "PAIRS": width // 2,
        "SHARED": len(cos_BSP) == 1,
        "HALVES": halves,
        "BACK": back,
        "WIDE": wide(x_BSHR, cos_BSP),
    }
    options |= tile(width // 2, TILE, whole_rows=True)
    tensors = (x_BSHR, cos_BSP.contiguous(), sin_BSP.contiguous(), y_BSHR)
    grid = (triton.cdiv(num_rows, options["ROWS"]),)
    launch(
        _turn_kernel,
        grid,
        *tensors,
        num_rows,
        num_positions,
        num_heads,
        *x_BSHR.stride()[:3],
        **options,
    )
    return y_BSHR


@triton.jit
def _turn_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    num_rows,
    num_positions,
    num_heads,
    batch_stride,
    position_stride,
    head_stride,
    PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
    HALVES: tl.constexpr,
    BACK: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 32-bit divisions: there are fewer than 2^31 heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // num_heads, row % num_heads
    batch, position = token // num_positions, token % num_positions
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < num_rows) & (pair < PAIRS)
    of_token = (position if SHARED else token).to(tl.int64)[:, None] * PAIRS + pair
    cos = tl.load(cos_ptr + of_token, mask=inside, other=0.0).to(WIDE)
    sin = tl.load(sin_ptr + of_token, mask=inside, other=0.0).to(WIDE)
    if BACK:
        sin = -sin
    begin = (
        batch.to(tl.int64) * batch_stride
        + position.to(tl.int64) * position_stride
        + head.to(tl.int64) * head_stride
    )
    from_ptr = x_ptr + begin[:, None]
    to_ptr = y_ptr + row.to(tl.int64)[:, None] * (2 * PAIRS)
    if HALVES:
        x = tl.load(from_ptr + pair, mask=inside, other=0.0).to(WIDE)
        y = tl.load(from_ptr + PAIRS + pair, mask=inside, other=0.0).to(WIDE)
        tl.store(to_ptr + pair, (x * cos - y * sin).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(to_ptr + PAIRS + pair, (x * sin + y * cos).to(y_ptr.dtype.element_ty), mask=inside)
    else:
        both = tl.arange(0, 2 * BLOCK)[None, :]
        both_inside = (row[:, None] < num_rows) & (both < 2 * PAIRS)
        values = tl.load(from_ptr + both, mask=both_inside, other=0.0)
        x, y = tl.split(tl.reshape(values, (ROWS, BLOCK, 2)))
        x, y = x.to(WIDE), y.to(WIDE)
        turned = tl.reshape(tl.join(x * cos - y * sin, x * sin + y * cos), (ROWS, 2 * BLOCK))
        tl.store(to_ptr + both, turned.to(y_ptr.dtype.element_ty), mask=both_inside)
