"""The weighted sum over slots on CUDA: forward has one program per token and block of columns,
backward one program per row.

Forward loads the K rows of a token concurrently and adds them in registers. Backward first inverts
`row_TK` (one small kernel); the program of a row then reads the gradient of its token (which is
read K times, all but once from the L2 cache) and the row, and writes the gradients of the row and
of its weight. There are no atomics, and the gradients of rows without token are set to zero in the
same pass. Letters: T tokens, K slots, G rows, D columns; a tile is ROWS x BLOCK.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch, tile, wide

TILE = 1024
"""Elements of one tile."""
PAIRS = 1024
"""(token, slot) pairs of one program of the kernel that inverts `row_TK`."""


def combine_forward(rows_GD: Tensor, row_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    rows_GD, row_TK = rows_GD.contiguous(), row_TK.contiguous()
    out = rows_GD.new_empty(len(row_TK), rows_GD.shape[1])
    options = _options(rows_GD)
    grid = (triton.cdiv(len(out), options["ROWS"]), triton.cdiv(out.shape[1], options["BLOCK"]))
    weights = (
        row_TK if weights_TK is None else weights_TK.contiguous()
    )  # an unused pointer must still be valid
    options |= {"K": row_TK.shape[1], "WEIGHTED": weights_TK is not None}
    launch(_forward_kernel, grid, rows_GD, row_TK, weights, out, *out.shape, **options)
    return out


def combine_backward(
    grad_TD: Tensor, rows_GD: Tensor, row_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    grad_TD, rows_GD, weights_TK = (
        grad_TD.contiguous(),
        rows_GD.contiguous(),
        weights_TK.contiguous(),
    )
    grad_rows_GD, grad_weights_TK = torch.empty_like(rows_GD), torch.zeros_like(weights_TK)
    pair_G, options = pair_of_row(row_TK, len(rows_GD)), _options(rows_GD)
    tensors = (grad_TD, rows_GD, pair_G, weights_TK, grad_rows_GD, grad_weights_TK)
    grid = (triton.cdiv(len(rows_GD), options["ROWS"]),)
    launch(_backward_kernel, grid, *tensors, *rows_GD.shape, K=max(1, row_TK.shape[1]), **options)
    return grad_rows_GD, grad_weights_TK


def pair_of_row(row_TK: Tensor, num_rows: int) -> Tensor:
    row_TK = row_TK.contiguous()
    pair_G = row_TK.new_full((num_rows,), -1)
    launch(
        _invert_kernel,
        (triton.cdiv(row_TK.numel(), PAIRS),),
        row_TK,
        pair_G,
        row_TK.numel(),
        BLOCK=PAIRS,
    )
    return pair_G


def check_distinct(row_TK: Tensor, num_rows: int) -> None:
    row_TK = row_TK.contiguous()
    pair_G = pair_of_row(row_TK, num_rows)
    launch(
        _check_kernel,
        (triton.cdiv(row_TK.numel(), PAIRS),),
        row_TK,
        pair_G,
        row_TK.numel(),
        BLOCK=PAIRS,
    )


def _options(rows_GD: Tensor) -> dict[str, Any]:
    return {"WIDE": wide(rows_GD), **tile(rows_GD.shape[1], TILE)}


@triton.jit
def _forward_kernel(
    rows_ptr,
    row_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    num_columns,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k, mask=token < num_tokens, other=-1).to(tl.int64)
        values = tl.load(
            rows_ptr + row[:, None] * num_columns + column,
            mask=(row[:, None] >= 0) & (column < num_columns),
            other=0.0,
        )
        if WEIGHTED:
            weight = tl.load(weight_ptr + token * K + k, mask=row >= 0, other=0.0).to(WIDE)
            total += weight[:, None] * values.to(WIDE)
        else:
            total += values.to(WIDE)
    inside = (token[:, None] < num_tokens) & (column < num_columns)
    tl.store(
        out_ptr + token[:, None] * num_columns + column,
        total.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _invert_kernel(row_ptr, pair_ptr, num_pairs, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + pair, mask=pair < num_pairs, other=-1)
    tl.store(pair_ptr + row, pair, mask=row >= 0)


@triton.jit(debug=True)  # without debug the assertion is compiled away
def _check_kernel(row_ptr, pair_ptr, num_pairs, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + pair, mask=pair < num_pairs, other=-1)
    owner = tl.load(pair_ptr + row, mask=row >= 0, other=0)
    tl.device_assert(
        (row < 0) | (owner == pair),
        "row_TK holds a row twice: a row belongs to one (token, slot) at most",
    )


@triton.jit
def _backward_kernel(
    grad_ptr,
    rows_ptr,
    pair_ptr,
    weight_ptr,
    grad_rows_ptr,
    grad_weight_ptr,
    num_rows,
    num_columns,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pair_ptr + row, mask=row < num_rows, other=-1)
    has_pair = pair >= 0
    weight = tl.load(weight_ptr + pair, mask=has_pair, other=0.0).to(WIDE)[:, None]
    token = (pair // K)[:, None]
    partial = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = has_pair[:, None] & (column < num_columns)
        grad = tl.load(grad_ptr + token * num_columns + column, mask=inside, other=0.0).to(WIDE)
        values = tl.load(rows_ptr + row[:, None] * num_columns + column, mask=inside, other=0.0).to(
            WIDE
        )
        partial += grad * values
        out = (grad * weight).to(grad_rows_ptr.dtype.element_ty)
        tl.store(
            grad_rows_ptr + row[:, None] * num_columns + column,
            out,
            mask=(row[:, None] < num_rows) & (column < num_columns),
        )
    dot = tl.sum(partial, axis=1).to(grad_weight_ptr.dtype.element_ty)
    tl.store(grad_weight_ptr + pair, dot, mask=has_pair)
