"""The rotation of rotary position embedding on CUDA, and the copies beside it, in one pass: each
element of a head is read and written once.

A program of the rotation processes a few heads: it rotates some of their columns and copies the
others, which may belong to another tensor. A program of the gradient of keys processes all heads of
a token, so that the sum over heads needs neither atomics nor a second pass.

Letters: B sequences, S positions, H heads, P pairs, R = 2 P rotary width of a head, N columns of a
head that are not rotated, U width of a head's value; rows are the heads of all positions, a tile is
ROWS x P or ROWS x N. Adjacent pairs are read as a run of R columns and split in registers, so that
both layouts load and store whole cache lines.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch, tile, wide
from lather.kernels.rotary.reference import parts

TILE = 4096
"""Elements of a tile of rotated or of other columns."""


def turn(
    x_BSHx: Tensor,
    cos_BSP: Tensor,
    sin_BSP: Tensor,
    *,
    halves: bool,
    back: bool = False,
    last: bool = False,
) -> Tensor:
    x_BSHx = _with_runs(x_BSHx)
    turned_BSHR, rest_BSHN = parts(x_BSHx, 2 * cos_BSP.shape[-1], last=last)
    y_BSHx = torch.empty(x_BSHx.shape, dtype=x_BSHx.dtype, device=x_BSHx.device)
    strides = turned_BSHR.stride()[:3]
    _turn_beside(
        turned_BSHR, strides, rest_BSHN, (cos_BSP, sin_BSP), y_BSHx, halves, BACK=back, LAST=last
    )
    return y_BSHx


def join_keys(
    k_BSHN: Tensor, k_BSR: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, *, halves: bool
) -> Tensor:
    k_BSHN, k_BSR = _with_runs(k_BSHN), _with_runs(k_BSR)
    width = k_BSHN.shape[-1] + k_BSR.shape[-1]
    y_BSHx = torch.empty((*k_BSHN.shape[:3], width), dtype=k_BSR.dtype, device=k_BSR.device)
    strides = (*k_BSR.stride()[:2], 0)
    _turn_beside(k_BSR, strides, k_BSHN, (cos_BSP, sin_BSP), y_BSHx, halves, BACK=False, LAST=True)
    return y_BSHx


def keys_gradient(
    grad_k_BSHx: Tensor, grad_v_BSHU: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, *, halves: bool
) -> tuple[Tensor, Tensor]:
    grad_k_BSHx, grad_v_BSHU = _with_runs(grad_k_BSHx), _with_runs(grad_v_BSHU)
    num_batch, num_positions, num_heads, key_width = grad_k_BSHx.shape
    rotary_width, value_width = 2 * cos_BSP.shape[-1], grad_v_BSHU.shape[-1]
    size = key_width - rotary_width
    grad_kv_BSHx = grad_k_BSHx.new_empty(num_batch, num_positions, num_heads, size + value_width)
    grad_k_BSR = grad_k_BSHx.new_empty(num_batch, num_positions, rotary_width)
    widest = max(rotary_width, size, value_width)
    options = {
        **_options(grad_k_BSHx, cos_BSP, halves),
        "KEY": size,
        "VALUE": value_width,
        "HEADS": min(
            tile(widest, TILE, whole_rows=True)["ROWS"], triton.next_power_of_2(max(num_heads, 1))
        ),
        "KEY_BLOCK": triton.next_power_of_2(max(size, 1)),
        "VALUE_BLOCK": triton.next_power_of_2(max(value_width, 1)),
    }
    launch(
        _keys_gradient_kernel,
        (num_batch * num_positions,),
        grad_k_BSHx,
        grad_v_BSHU,
        cos_BSP.contiguous(),
        sin_BSP.contiguous(),
        grad_kv_BSHx,
        grad_k_BSR,
        num_positions,
        num_heads,
        *grad_k_BSHx.stride()[:3],
        *grad_v_BSHU.stride()[:3],
        **options,
    )
    return grad_kv_BSHx, grad_k_BSR


def _turn_beside(
    x: Tensor,
    x_strides: tuple[int, ...],
    rest_BSHN: Tensor,
    tables: tuple[Tensor, Tensor],
    y_BSHx: Tensor,
    halves: bool,
    **options: bool,
) -> None:
    """Write into y the rotated columns, from x with the strides of (B, S, H), and the others."""
    num_batch, num_positions, num_heads, size = rest_BSHN.shape
    num_rows = num_batch * num_positions * num_heads
    rows = tile(max(2 * tables[0].shape[-1], size), TILE, whole_rows=True)["ROWS"]
    constants = {
        **_options(x, tables[0], halves),
        **options,
        "REST": size,
        "ROWS": rows,
        "REST_BLOCK": triton.next_power_of_2(max(size, 1)),
    }
    launch(
        _turn_kernel,
        (triton.cdiv(num_rows, rows),),
        x,
        rest_BSHN,
        *(table.contiguous() for table in tables),
        y_BSHx,
        num_rows,
        num_positions,
        num_heads,
        *x_strides,
        *rest_BSHN.stride()[:3],
        **constants,
    )


def _with_runs(x: Tensor) -> Tensor:
    """Return x with columns that are neighbors in memory, without a copy if they are already."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _options(x: Tensor, cos_BSP: Tensor, halves: bool) -> dict[str, Any]:
    """Return the constants that both kernels have."""
    return {
        "PAIRS": cos_BSP.shape[-1],
        "SHARED": len(cos_BSP) == 1,
        "HALVES": halves,
        "WIDE": wide(x, cos_BSP),
        "BLOCK": triton.next_power_of_2(max(cos_BSP.shape[-1], 1)),
    }


@triton.jit
def _turn_kernel(
    x_ptr,
    rest_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    num_rows,
    num_positions,
    num_heads,
    x_batch_stride,
    x_position_stride,
    x_head_stride,
    rest_batch_stride,
    rest_position_stride,
    rest_head_stride,
    PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
    HALVES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BACK: tl.constexpr,
    LAST: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    # 32-bit divisions: there are fewer than 2^31 heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // num_heads, (row % num_heads).to(tl.int64)
    batch, position = (token // num_positions).to(tl.int64), token % num_positions
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < num_rows) & (pair < PAIRS)
    of_token = (position if SHARED else token).to(tl.int64)[:, None] * PAIRS + pair
    position = position.to(tl.int64)
    out = row.to(tl.int64)[:, None] * (REST + 2 * PAIRS)
    if REST > 0:
        column = tl.arange(0, REST_BLOCK)[None, :]
        rest_inside = (row[:, None] < num_rows) & (column < REST)
        rest = (
            batch * rest_batch_stride + position * rest_position_stride + head * rest_head_stride
        )[:, None] + column
        values = tl.load(rest_ptr + rest, mask=rest_inside, other=0.0)
    cos = tl.load(cos_ptr + of_token, mask=inside, other=0.0).to(WIDE)
    sin = tl.load(sin_ptr + of_token, mask=inside, other=0.0).to(WIDE)
    if BACK:
        sin = -sin
    begin = (batch * x_batch_stride + position * x_position_stride + head * x_head_stride)[:, None]
    to = out + REST if LAST else out
    if HALVES:
        x = tl.load(x_ptr + begin + pair, mask=inside, other=0.0).to(WIDE)
        y = tl.load(x_ptr + begin + PAIRS + pair, mask=inside, other=0.0).to(WIDE)
        turned_x = (x * cos - y * sin).to(y_ptr.dtype.element_ty)
        turned_y = (x * sin + y * cos).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + to + pair, turned_x, mask=inside)
        tl.store(y_ptr + to + PAIRS + pair, turned_y, mask=inside)
    else:
        both = tl.arange(0, 2 * BLOCK)[None, :]
        both_inside = (row[:, None] < num_rows) & (both < 2 * PAIRS)
        pairs = tl.load(x_ptr + begin + both, mask=both_inside, other=0.0)
        x, y = tl.split(tl.reshape(pairs, (ROWS, BLOCK, 2)))
        x, y = x.to(WIDE), y.to(WIDE)
        turned = tl.reshape(tl.join(x * cos - y * sin, x * sin + y * cos), (ROWS, 2 * BLOCK))
        tl.store(y_ptr + to + both, turned.to(y_ptr.dtype.element_ty), mask=both_inside)
    if REST > 0:  # after all loads, which do not wait for each other
        beside = out if LAST else out + 2 * PAIRS
        tl.store(y_ptr + beside + column, values, mask=rest_inside)


@triton.jit
def _keys_gradient_kernel(
    grad_k_ptr,
    grad_v_ptr,
    cos_ptr,
    sin_ptr,
    grad_kv_ptr,
    grad_shared_ptr,
    num_positions,
    num_heads,
    k_batch_stride,
    k_position_stride,
    k_head_stride,
    v_batch_stride,
    v_position_stride,
    v_head_stride,
    PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
    HALVES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    batch, position = (token // num_positions).to(tl.int64), (token % num_positions).to(tl.int64)
    token = token.to(tl.int64)
    k_begin = batch * k_batch_stride + position * k_position_stride
    v_begin = batch * v_batch_stride + position * v_position_stride
    out = token * num_heads * (KEY + VALUE)
    pair, both = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    key_column = tl.arange(0, KEY_BLOCK)[None, :]
    value_column = tl.arange(0, VALUE_BLOCK)[None, :]
    # halves have a sum for each half, adjacent pairs one for the run
    first = tl.zeros((HEADS, BLOCK if HALVES else 2 * BLOCK), dtype=WIDE)
    second = tl.zeros((HEADS, BLOCK), dtype=WIDE)
    for start in range(0, num_heads, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        exists = head < num_heads
        from_k, from_v = k_begin + head * k_head_stride, v_begin + head * v_head_stride
        to = out + head * (KEY + VALUE)
        keys_inside = exists & (key_column < KEY)
        keys = tl.load(grad_k_ptr + from_k + key_column, mask=keys_inside, other=0.0)
        values_inside = exists & (value_column < VALUE)
        values = tl.load(grad_v_ptr + from_v + value_column, mask=values_inside, other=0.0)
        from_shared = grad_k_ptr + from_k + KEY
        if HALVES:
            inside = exists & (pair < PAIRS)[None, :]
            half = from_shared + pair[None, :]
            first += tl.load(half, mask=inside, other=0.0).to(WIDE)
            second += tl.load(half + PAIRS, mask=inside, other=0.0).to(WIDE)
        else:
            inside = exists & (both < 2 * PAIRS)[None, :]
            first += tl.load(from_shared + both[None, :], mask=inside, other=0.0).to(WIDE)
        tl.store(grad_kv_ptr + to + key_column, keys, mask=keys_inside)
        tl.store(grad_kv_ptr + to + KEY + value_column, values, mask=values_inside)
    of_token = (position if SHARED else token) * PAIRS + pair
    cos = tl.load(cos_ptr + of_token, mask=pair < PAIRS, other=0.0).to(WIDE)
    sin = tl.load(sin_ptr + of_token, mask=pair < PAIRS, other=0.0).to(WIDE)
    to_shared = token * (2 * PAIRS)
    narrow = grad_shared_ptr.dtype.element_ty
    if HALVES:
        x, y = tl.sum(first, axis=0), tl.sum(second, axis=0)
        turned_x, turned_y = (x * cos + y * sin).to(narrow), (y * cos - x * sin).to(narrow)
        tl.store(grad_shared_ptr + to_shared + pair, turned_x, mask=pair < PAIRS)
        tl.store(grad_shared_ptr + to_shared + PAIRS + pair, turned_y, mask=pair < PAIRS)
    else:
        x, y = tl.split(tl.reshape(tl.sum(first, axis=0), (BLOCK, 2)))
        turned = tl.reshape(tl.join(x * cos + y * sin, y * cos - x * sin), (2 * BLOCK,))
        tl.store(grad_shared_ptr + to_shared + both, turned.to(narrow), mask=both < 2 * PAIRS)
