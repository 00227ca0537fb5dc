"""RMSNorm on CUDA: a program holds whole rows (a single row, if they are long), so that each is
read and written once.

In backward, each of at most PROGRAMS programs processes a run of rows and sums its part of the
weight's gradient; torch adds the parts. Letters: T rows, D columns; a tile is ROWS x BLOCK, BLOCK a
power of 2 that holds a row.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch, tile, wide

TILE = 2048
"""Elements of a tile, which has at least a row."""
ELEMENTS = 256
"""Elements of a tile per warp: with twice as many the backward kernel spills registers."""
PROGRAMS = 512
"""Largest number of parts of the weight's gradient: a few per multiprocessor, and fixed, so that
all GPUs add in the same order."""


def forward(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_TD = _as_rows(x)
    y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight_D.dtype), device=x.device)
    inverse_rms = torch.empty(
        (*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
    )
    options = _options(x_TD, weight_D)
    grid = (triton.cdiv(len(x_TD), options["ROWS"]),)
    launch(
        _forward_kernel,
        grid,
        x_TD,
        weight_D.contiguous(),
        y,
        inverse_rms,
        *x_TD.shape,
        x_TD.stride(0),
        EPS=eps,
        **options,
    )
    return y, inverse_rms


def backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(weight_D)
    x_TD, grad_TD = _as_rows(x), _as_rows(grad)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = _options(x_TD, weight_D)
    num_tiles = triton.cdiv(len(x_TD), options["ROWS"])
    run = triton.cdiv(num_tiles, min(num_tiles, PROGRAMS)) * options["ROWS"]
    num_programs = triton.cdiv(len(x_TD), run)
    parts_PD = inverse_rms.new_empty(num_programs, len(weight_D))
    tensors = (grad_TD, x_TD, weight_D.contiguous(), inverse_rms.contiguous(), grad_x, parts_PD)
    launch(
        _backward_kernel,
        (num_programs,),
        *tensors,
        *x_TD.shape,
        grad_TD.stride(0),
        x_TD.stride(0),
        run,
        **options,
    )
    return grad_x, parts_PD.sum(0).to(weight_D.dtype)


def _as_rows(x: Tensor) -> Tensor:
    """Return x as (T, D) with contiguous rows, without a copy if x is a slice of the columns of a
    wider tensor."""
    rows_TD = x.reshape(-1, x.shape[-1]) if x.numel() else x.flatten(0, -2)
    return rows_TD if rows_TD.stride(1) == 1 else rows_TD.contiguous()


def _options(x_TD: Tensor, weight_D: Tensor) -> dict[str, Any]:
    sizes = tile(x_TD.shape[1], TILE, whole_rows=True)
    return {
        "WIDE": wide(x_TD, weight_D),
        **sizes,
        "num_warps": min(max(sizes["ROWS"] * sizes["BLOCK"] // ELEMENTS, 1), 16),
    }


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    inverse_rms_ptr,
    num_rows,
    num_columns,
    x_stride,
    EPS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < num_rows) & (column < num_columns)
    raw = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < num_columns, other=0.0).to(WIDE)
    x = raw.to(WIDE)
    eps = tl.full((), EPS, WIDE)  # a bare constant would be rounded to fp32
    inverse_rms = 1 / tl.sqrt(tl.sum(x * x, axis=1) / num_columns + eps)
    normed = (x * inverse_rms[:, None]).to(x_ptr.dtype.element_ty).to(WIDE)
    tl.store(
        y_ptr + row[:, None] * num_columns + column,
        (weight * normed).to(y_ptr.dtype.element_ty),
        mask=inside,
    )
    tl.store(
        inverse_rms_ptr + row, inverse_rms.to(inverse_rms_ptr.dtype.element_ty), mask=row < num_rows
    )


@triton.jit
def _backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    inverse_rms_ptr,
    grad_x_ptr,
    part_ptr,
    num_rows,
    num_columns,
    grad_stride,
    x_stride,
    run,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < num_columns, other=0.0).to(WIDE)
    part = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    for start in range(0, run, ROWS):
        row = program * run + start + tl.arange(0, ROWS)
        inside = (row[:, None] < num_rows) & (column < num_columns)
        grad = tl.load(grad_ptr + row[:, None] * grad_stride + column, mask=inside, other=0.0).to(
            WIDE
        )
        x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0).to(WIDE)
        inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < num_rows, other=0.0).to(WIDE)[
            :, None
        ]
        normed = x * inverse_rms
        part += grad * normed
        scaled = grad * weight
        along = tl.sum(scaled * normed, axis=1)[:, None] / num_columns
        grad_x = (scaled - normed * along) * inverse_rms
        tl.store(
            grad_x_ptr + row[:, None] * num_columns + column,
            grad_x.to(grad_x_ptr.dtype.element_ty),
            mask=inside,
        )
    total = tl.sum(part, axis=0)[None, :]
    tl.store(
        part_ptr + program * num_columns + column,
        total.to(part_ptr.dtype.element_ty),
        mask=column < num_columns,
    )
