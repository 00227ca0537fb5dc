"""The gated activation on CUDA: a program processes a few whole rows (a single row, if they are
long) in blocks of columns, so that each input is read once, each output is written once, and the
dot product of a row needs no second pass.

Letters: R rows, F intermediate size; a tile is ROWS x BLOCK. Interleaved gate and up are read as
a run of 2 * BLOCK columns and split in registers, so that both layouts load and store whole cache
lines. Values are clamped by comparisons, not by `min`, because NaN must stay NaN. A program that
writes FP8 has all columns of each block of a scale, so that nothing is read again; only a gradient
of gate and up in halves that are no multiple of a block is read by a pass of its own.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.block_scaled import BLOCK, BlockScaled
from lather.kernels.block_scaled.triton import scale_rows, store_scaled
from lather.kernels.launch import launch, tile, wide
from lather.kernels.swiglu.reference import Gate

TILE = 1024
"""Elements of h in a tile."""


def gate_forward(gate_up: Tensor, gate: Gate) -> Tensor:
    h = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    _forward(gate_up.contiguous(), gate, h, None, None)
    return h


def scaled_gate_forward(
    gate_up_RH: Tensor, gate: Gate, values_RF: Tensor, scales_RB: Tensor
) -> None:
    _forward(gate_up_RH.contiguous(), gate, None, values_RF, scales_RB)


def _forward(
    gate_up: Tensor,
    gate: Gate,
    h: Tensor | None,
    values: Tensor | None,
    scales: Tensor | None,
) -> None:
    num_rows, num_columns = gate_up.shape[:-1].numel(), gate_up.shape[-1] // 2
    options = _options(gate_up, gate, in_fp8=values is not None)
    grid = (triton.cdiv(num_rows, options["ROWS"]),)
    launch(_forward_kernel, grid, gate_up, h, values, scales, num_rows, num_columns, **options)


def gate_gradient(
    grad_h: Tensor,
    gate_up: Tensor,
    gate: Gate,
    scale: Tensor | None = None,
    h: Tensor | None = None,
    dot: Tensor | None = None,
    in_fp8: BlockScaled | None = None,
) -> Tensor:
    """Do the same as in `reference.py`."""
    grad_h, gate_up = grad_h.contiguous(), gate_up.contiguous()
    grad_gate_up = torch.empty_like(gate_up)
    # the kernel has both halves of a block only where gate and up lie side by side
    fused = gate.interleaved or grad_h.shape[-1] % BLOCK == 0
    values, scales = (None, None) if in_fp8 is None or not fused else in_fp8
    num_rows, options = grad_h.shape[:-1].numel(), _options(gate_up, gate, values is not None)
    options |= {"SCALED": scale is not None, "STORE_H": h is not None}
    # unused pointers must still be valid
    scale, h, dot = (gate_up if x is None else x.contiguous() for x in (scale, h, dot))
    tensors = (grad_h, gate_up, scale, grad_gate_up, h, dot, values, scales)
    launch(
        _backward_kernel,
        (triton.cdiv(num_rows, options["ROWS"]),),
        *tensors,
        num_rows,
        grad_h.shape[-1],
        **options,
    )
    if in_fp8 is not None and not fused:
        scale_rows(grad_gate_up, *in_fp8)
    return grad_gate_up


def _options(gate_up: Tensor, gate: Gate, in_fp8: bool) -> dict[str, Any]:
    limit = float("inf") if gate.limit is None else gate.limit
    options = {
        "ALPHA": gate.alpha,
        "OFFSET": gate.offset,
        "LIMIT": limit,
        "INTERLEAVED": gate.interleaved,
        "WIDE": wide(gate_up),
    }
    num_columns = gate_up.shape[-1] // 2
    return options | tile(max(num_columns, BLOCK) if in_fp8 else num_columns, TILE)


@triton.jit
def _load_halves(
    ptr,
    row,
    num_rows,
    start,
    num_columns,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    ptr += row[:, None] * 2 * num_columns
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * BLOCK)[None, :]
        values = tl.load(
            ptr + both, mask=(row[:, None] < num_rows) & (both < 2 * num_columns), other=0.0
        )
        g, u = tl.split(tl.reshape(values, (ROWS, BLOCK, 2)))
    else:
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (row[:, None] < num_rows) & (column < num_columns)
        g = tl.load(ptr + column, mask=inside, other=0.0)
        u = tl.load(ptr + num_columns + column, mask=inside, other=0.0)
    return g, u


@triton.jit
def _store_halves(
    ptr,
    g,
    u,
    row,
    num_rows,
    start,
    num_columns,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g, u = g.to(ptr.dtype.element_ty), u.to(ptr.dtype.element_ty)
    ptr += row[:, None] * 2 * num_columns
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * BLOCK)[None, :]
        values = tl.reshape(tl.join(g, u), (ROWS, 2 * BLOCK))
        tl.store(ptr + both, values, mask=(row[:, None] < num_rows) & (both < 2 * num_columns))
    else:
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (row[:, None] < num_rows) & (column < num_columns)
        tl.store(ptr + column, g, mask=inside)
        tl.store(ptr + num_columns + column, u, mask=inside)


@triton.jit
def _clamp(g, u, LIMIT: tl.constexpr):
    # a bare constant would be rounded to fp32, by Triton 3.6 in comparisons, too
    limit = tl.full((), LIMIT, g.dtype)
    return tl.where(g > limit, limit, g), tl.where(
        u > limit, limit, tl.where(u < -limit, -limit, u)
    )


@triton.jit
def _forward_kernel(
    gate_up_ptr,
    h_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for start in range(0, num_columns, BLOCK):
        raw_g, raw_u = _load_halves(
            gate_up_ptr, row, num_rows, start, num_columns, INTERLEAVED, ROWS, BLOCK
        )
        g, u = _clamp(raw_g.to(WIDE), raw_u.to(WIDE), LIMIT)
        h = (g * tl.sigmoid(ALPHA * g) * (u + OFFSET)).to(gate_up_ptr.dtype.element_ty)
        if h_ptr is not None:
            column = start + tl.arange(0, BLOCK)[None, :]
            inside = (row[:, None] < num_rows) & (column < num_columns)
            tl.store(h_ptr + row[:, None] * num_columns + column, h, mask=inside)
        if values_ptr is not None:
            store_scaled(values_ptr, scales_ptr, h, row, num_rows, start, num_columns, num_columns)


@triton.jit
def _backward_kernel(
    grad_h_ptr,
    gate_up_ptr,
    scale_ptr,
    grad_gate_up_ptr,
    h_ptr,
    dot_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    SCALED: tl.constexpr,
    STORE_H: tl.constexpr,
    ALPHA: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    partial = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    if SCALED:
        weight = tl.load(scale_ptr + row, mask=row < num_rows, other=0.0).to(WIDE)[:, None]
    for start in range(0, num_columns, BLOCK):
        raw_g, raw_u = _load_halves(
            gate_up_ptr, row, num_rows, start, num_columns, INTERLEAVED, ROWS, BLOCK
        )
        raw_g, raw_u = raw_g.to(WIDE), raw_u.to(WIDE)
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (row[:, None] < num_rows) & (column < num_columns)
        grad = tl.load(grad_h_ptr + row[:, None] * num_columns + column, mask=inside, other=0.0).to(
            WIDE
        )
        g, u = _clamp(raw_g, raw_u, LIMIT)
        sigmoid = tl.sigmoid(ALPHA * g)
        activated = g * sigmoid
        h = activated * (u + OFFSET)
        if SCALED:
            partial += grad * h  # grad is 0 outside of the rows and columns
            grad *= weight
            h *= weight
        d_gate = (sigmoid + ALPHA * activated * (1 - sigmoid)) * (u + OFFSET)
        # the factor is 0, not the product, so that a gradient that is NaN or infinite stays seen
        d_gate = tl.where(raw_g > g, 0.0, d_gate) * grad
        d_up = tl.where(tl.abs(raw_u) > tl.abs(u), 0.0, activated) * grad
        _store_halves(
            grad_gate_up_ptr,
            d_gate,
            d_up,
            row,
            num_rows,
            start,
            num_columns,
            INTERLEAVED,
            ROWS,
            BLOCK,
        )
        if values_ptr is not None:
            d_gate = d_gate.to(grad_gate_up_ptr.dtype.element_ty)
            d_up = d_up.to(grad_gate_up_ptr.dtype.element_ty)
            size = 2 * num_columns
            if INTERLEAVED:
                both = tl.reshape(tl.join(d_gate, d_up), (ROWS, 2 * BLOCK))
                store_scaled(values_ptr, scales_ptr, both, row, num_rows, 2 * start, size, size)
            else:
                store_scaled(
                    values_ptr, scales_ptr, d_gate, row, num_rows, start, num_columns, size
                )
                store_scaled(
                    values_ptr, scales_ptr, d_up, row, num_rows, num_columns + start, size, size
                )
        if STORE_H:
            tl.store(
                h_ptr + row[:, None] * num_columns + column,
                h.to(h_ptr.dtype.element_ty),
                mask=inside,
            )
    if SCALED:
        tl.store(dot_ptr + row, tl.sum(partial, axis=1), mask=row < num_rows)
