"""Gathering of rows on CUDA: each program copies a tile of rows and columns; the adjoint uses no
atomics.

The adjoint sorts the index (torch's radix sort), so that rows with the same source row form a run.
The program of a source row adds its run in registers and writes the sum once, which is
deterministic and needs no fp32 buffer. The longest run determines the time. Letters: N rows of the
source, D columns, G picked rows; a tile is ROWS x BLOCK."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch, tile, wide

TILE = 2048
"""Elements of a tile."""


def gather_rows(x_ND: Tensor, index_G: Tensor, num_rows: int | None = None) -> Tensor:
    x_ND, index_G = x_ND.contiguous(), index_G.contiguous()
    out = x_ND.new_empty((len(index_G) if num_rows is None else num_rows, x_ND.shape[1]))
    sizes = tile(out.shape[1], TILE)
    grid = (triton.cdiv(len(out), sizes["ROWS"]), triton.cdiv(out.shape[1], sizes["BLOCK"]))
    launch(_gather_kernel, grid, x_ND, index_G, out, len(index_G), *out.shape, **sizes)
    return out


def add_rows(grad_GD: Tensor, index_G: Tensor, num_rows: int) -> Tensor:
    grad_GD = grad_GD.contiguous()
    order = index_G.argsort(stable=True)
    places = torch.arange(num_rows + 1, dtype=index_G.dtype, device=index_G.device)
    start_N = torch.searchsorted(index_G[order], places)
    out = grad_GD.new_empty(num_rows, grad_GD.shape[1])
    block = tile(out.shape[1], TILE)["BLOCK"]
    grid = (num_rows, triton.cdiv(out.shape[1], block))
    launch(
        _add_kernel, grid, grad_GD, order, start_N, out, out.shape[1], WIDE=wide(out), BLOCK=block
    )
    return out


@triton.jit
def _gather_kernel(
    x_ptr,
    index_ptr,
    out_ptr,
    num_picked,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    source = tl.load(index_ptr + row, mask=row < num_picked, other=-1).to(tl.int64)[:, None]
    values = tl.load(
        x_ptr + source * num_columns + column,
        mask=(source >= 0) & (column < num_columns),
        other=0.0,
    )
    tl.store(
        out_ptr + row[:, None] * num_columns + column,
        values,
        mask=(row[:, None] < num_rows) & (column < num_columns),
    )


@triton.jit
def _add_kernel(
    grad_ptr, order_ptr, start_ptr, out_ptr, num_columns, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    source = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for place in range(tl.load(start_ptr + source), tl.load(start_ptr + source + 1)):
        row = tl.load(order_ptr + place)
        total += tl.load(
            grad_ptr + row * num_columns + column, mask=column < num_columns, other=0.0
        ).to(WIDE)
    tl.store(
        out_ptr + source * num_columns + column,
        total.to(out_ptr.dtype.element_ty),
        mask=column < num_columns,
    )
