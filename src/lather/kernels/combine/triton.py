"""The weighted sum over slots on CUDA: a program per token and block of columns, which loads the
K rows of a token concurrently and adds them in registers.

Letters: T tokens, K slots, G rows, D columns; a tile is ROWS x BLOCK.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch, tile, wide

TILE = 1024
"""Elements of a tile."""


def combine_forward(rows_GD: Tensor, row_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    rows_GD, row_TK = rows_GD.contiguous(), row_TK.contiguous()
    out = rows_GD.new_empty(len(row_TK), rows_GD.shape[1])
    options = {"WIDE": wide(rows_GD), **tile(rows_GD.shape[1], TILE)}
    grid = (triton.cdiv(len(out), options["ROWS"]), triton.cdiv(out.shape[1], options["BLOCK"]))
    # an unused pointer must still be valid
    weights = row_TK if weights_TK is None else weights_TK.contiguous()
    options |= {"K": row_TK.shape[1], "WEIGHTED": weights_TK is not None}
    launch(_forward_kernel, grid, rows_GD, row_TK, weights, out, *out.shape, **options)
    return out


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
