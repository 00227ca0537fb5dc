"""RMSNorm on CUDA: a program holds whole rows (a single row, if they are long), so that each is
read and written once. With rounding the same pass adds a branch, and in backward all gradients.

In backward, each of at most PROGRAMS programs processes a run of rows and sums its part of the
weight's gradient; torch adds the parts. Letters: T rows, D columns; a tile is ROWS x BLOCK, BLOCK a
power of 2 that holds a row.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from collections.abc import Sequence
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


MOST_GRADIENTS = 3
"""Number of copies of y whose gradients the backward kernel can add."""


def forward(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, weight_D.dtype)
    _, y, _, inverse_rms = forward_rounded(x, None, weight_D, eps, dtype, wide=False)
    return y, inverse_rms


def forward_rounded(
    x: Tensor,
    branch: Tensor | None,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    x_TD = _as_rows(x)
    branch_TD = x_TD if branch is None else _as_rows(branch)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    inverse_rms = torch.empty(
        (*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
    )
    y_wide = torch.empty_like(y, dtype=inverse_rms.dtype) if wide else None
    total = x if branch is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = _options(x_TD, weight_D)
    launch(
        _forward_kernel,
        (triton.cdiv(len(x_TD), sizes["ROWS"]),),
        x_TD,
        branch_TD,
        weight_D.contiguous(),
        y,
        x_TD if y_wide is None else y_wide,
        x_TD if branch is None else total,
        inverse_rms,
        *x_TD.shape,
        x_TD.stride(0),
        branch_TD.stride(0),
        EPS=eps,
        ADDS=branch is not None,
        BOTH=wide,
        **sizes,
    )
    return total, y, y_wide, inverse_rms


def backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x, _, grad_weight_D = backward_rounded((grad,), None, x, weight_D, inverse_rms, None)
    return grad_x, grad_weight_D


def backward_rounded(
    grads: Sequence[Tensor],
    grad_total: Tensor | None,
    total: Tensor,
    weight_D: Tensor,
    inverse_rms: Tensor,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    assert 1 <= len(grads) <= MOST_GRADIENTS, len(grads)
    grad_x = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    of_branch = None if branch_dtype is None else torch.empty_like(grad_x, dtype=branch_dtype)
    if total.numel() == 0:
        return grad_x, of_branch, torch.zeros_like(weight_D)
    x_TD = _as_rows(total)
    grads_TD = [_as_rows(grad) for grad in grads]
    grads_TD += grads_TD[:1] * (MOST_GRADIENTS - len(grads))
    total_TD = x_TD if grad_total is None else _as_rows(grad_total)
    options = _options(x_TD, weight_D)
    num_tiles = triton.cdiv(len(x_TD), options["ROWS"])
    run = triton.cdiv(num_tiles, min(num_tiles, PROGRAMS)) * options["ROWS"]
    num_programs = triton.cdiv(len(x_TD), run)
    parts_PD = inverse_rms.new_empty(num_programs, len(weight_D))
    launch(
        _backward_kernel,
        (num_programs,),
        *grads_TD,
        x_TD,
        total_TD,
        weight_D.contiguous(),
        inverse_rms.contiguous(),
        grad_x,
        x_TD if of_branch is None else of_branch,
        parts_PD,
        *x_TD.shape,
        *(grad_TD.stride(0) for grad_TD in grads_TD),
        x_TD.stride(0),
        total_TD.stride(0),
        run,
        GRADS=len(grads),
        PASSES=grad_total is not None,
        BRANCHES=of_branch is not None,
        **options,
    )
    return grad_x, of_branch, parts_PD.sum(0).to(weight_D.dtype)


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
    branch_ptr,
    weight_ptr,
    y_ptr,
    wide_ptr,
    total_ptr,
    inverse_rms_ptr,
    num_rows,
    num_columns,
    x_stride,
    branch_stride,
    EPS: tl.constexpr,
    ADDS: tl.constexpr,
    BOTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < num_rows) & (column < num_columns)
    place = row[:, None] * num_columns + column
    x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0).to(WIDE)
    weight = tl.load(weight_ptr + column, mask=column < num_columns, other=0.0).to(WIDE)
    if ADDS:
        x += tl.load(branch_ptr + row[:, None] * branch_stride + column, mask=inside, other=0.0).to(
            WIDE
        )
        x = x.to(x_ptr.dtype.element_ty).to(WIDE)
        tl.store(total_ptr + place, x.to(total_ptr.dtype.element_ty), mask=inside)
    eps = tl.full((), EPS, WIDE)  # a bare constant would be rounded to fp32
    inverse_rms = 1 / tl.sqrt(tl.sum(x * x, axis=1) / num_columns + eps)
    y = weight * (x * inverse_rms[:, None]).to(x_ptr.dtype.element_ty).to(WIDE)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)
    if BOTH:
        tl.store(wide_ptr + place, y.to(wide_ptr.dtype.element_ty), mask=inside)
    tl.store(
        inverse_rms_ptr + row, inverse_rms.to(inverse_rms_ptr.dtype.element_ty), mask=row < num_rows
    )


@triton.jit
def _backward_kernel(
    grad_ptr,
    second_ptr,
    third_ptr,
    x_ptr,
    passed_ptr,
    weight_ptr,
    inverse_rms_ptr,
    grad_x_ptr,
    branch_ptr,
    part_ptr,
    num_rows,
    num_columns,
    grad_stride,
    second_stride,
    third_stride,
    x_stride,
    passed_stride,
    run,
    GRADS: tl.constexpr,
    PASSES: tl.constexpr,
    BRANCHES: tl.constexpr,
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
        place = row[:, None] * num_columns + column
        grad = tl.load(grad_ptr + row[:, None] * grad_stride + column, mask=inside, other=0.0).to(
            WIDE
        )
        if GRADS > 1:
            grad += tl.load(
                second_ptr + row[:, None] * second_stride + column, mask=inside, other=0.0
            ).to(WIDE)
        if GRADS > 2:
            grad += tl.load(
                third_ptr + row[:, None] * third_stride + column, mask=inside, other=0.0
            ).to(WIDE)
        x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0).to(WIDE)
        inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < num_rows, other=0.0).to(WIDE)[
            :, None
        ]
        normed = x * inverse_rms
        part += grad * normed
        scaled = grad * weight
        along = tl.sum(scaled * normed, axis=1)[:, None] / num_columns
        grad_x = (scaled - normed * along) * inverse_rms
        if PASSES:
            grad_x += tl.load(
                passed_ptr + row[:, None] * passed_stride + column, mask=inside, other=0.0
            ).to(WIDE)
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if BRANCHES:
            tl.store(branch_ptr + place, grad_x.to(branch_ptr.dtype.element_ty), mask=inside)
    total = tl.sum(part, axis=0)[None, :]
    tl.store(
        part_ptr + program * num_columns + column,
        total.to(part_ptr.dtype.element_ty),
        mask=column < num_columns,
    )
