"""Sums of outer products over each expert's rows on CUDA: a program computes a tile of one expert's
gradient, with its sums in registers, and writes it once, or reads the sum of before and writes the
new one. There are no atomics, so every run has the same bits.

A tile has OUT x IN elements; STEP rows are multiplied at a time. The programs of an expert follow
each other, so that its rows come from memory once, and then from the cache. A tile is written in
two halves, so that two programs' registers fit into a multiprocessor of compute capability 9.0: one
multiplies while the other reads and writes sums. Tiles of twice the size would spill registers. An
expert without rows costs nothing if products are added to sums.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

TILES = {2: (128, 128, 64), 4: (64, 64, 32)}
"""OUT, IN and STEP by bytes of an element."""
SMALLEST = 16
"""Fewest rows and columns that tensor cores multiply."""


def outer_product_sums(
    grad: Tensor,
    x: Tensor,
    end_E: Tensor,
    out_EOI: Tensor,
    accumulate: bool,
    grad_rows: Tensor | None = None,
    x_rows: Tensor | None = None,
) -> None:
    num_experts, *sizes = out_EOI.shape
    options = _options(grad, sizes, grad_rows, x_rows)
    num_tiles = triton.cdiv(sizes[0], options["OUT"]) * triton.cdiv(sizes[1], options["IN"])
    operands = grad.contiguous(), x.contiguous()
    # unused pointers must still be valid
    rows = (end_E if index is None else index.contiguous() for index in (grad_rows, x_rows))
    kernel = _add_products if accumulate else _write_products
    launch(kernel, (num_experts * num_tiles,), *operands, *rows, end_E, out_EOI, *sizes, **options)


def _options(
    grad: Tensor, sizes: list[int], grad_rows: Tensor | None, x_rows: Tensor | None
) -> dict[str, Any]:
    largest_out, largest_in, step = TILES[grad.element_size()]
    out_size, in_size = (max(triton.next_power_of_2(size), SMALLEST) for size in sizes)
    gathers = grad_rows is not None, x_rows is not None
    return {
        "GATHER_GRAD": gathers[0],
        "GATHER_X": gathers[1],
        "OUT": min(out_size, largest_out),
        "IN": min(in_size, largest_in),
        "STEP": step,
        "num_warps": 8,
        # an index is loaded two stages before its rows
        "num_stages": 5 if any(gathers) else 3,
    }


@triton.jit
def _product(
    grad_ptr,
    x_ptr,
    grad_rows_ptr,
    x_rows_ptr,
    end_ptr,
    size_o,
    size_i,
    GATHER_GRAD: tl.constexpr,
    GATHER_X: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the left and the right half of this program's tile of its expert's product, the number
    of the expert and of its rows, and the first row and column of the tile."""
    across = tl.cdiv(size_i, IN)
    num_tiles = tl.cdiv(size_o, OUT) * across
    expert, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    first_o, first_i = tile // across * OUT, tile % across * IN
    o, i = first_o + tl.arange(0, OUT)[:, None], first_i + tl.arange(0, IN)[None, :]
    start = tl.load(end_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(end_ptr + expert)
    product = tl.zeros((OUT, IN), dtype=tl.float32)
    for first in range(start, end, STEP):
        row = first + tl.arange(0, STEP)
        grad_row = tl.where(row < end, row, -1)
        x_row = grad_row
        if GATHER_GRAD:
            grad_row = tl.load(grad_rows_ptr + row, mask=row < end, other=-1).to(tl.int32)
        if GATHER_X:
            x_row = tl.load(x_rows_ptr + row, mask=row < end, other=-1).to(tl.int32)
        grad = tl.load(
            grad_ptr + grad_row.to(tl.int64)[None, :] * size_o + o,
            mask=(grad_row >= 0)[None, :] & (o < size_o),
            other=0.0,
        )
        x = tl.load(
            x_ptr + x_row.to(tl.int64)[:, None] * size_i + i,
            mask=(x_row >= 0)[:, None] & (i < size_i),
            other=0.0,
        )
        product = tl.dot(grad, x, product, input_precision="ieee")
    halves = tl.split(tl.permute(tl.reshape(product, (OUT, 2, IN // 2)), (0, 2, 1)))
    return halves, expert, end - start, first_o, first_i


@triton.jit
def _half(first_o, first_i, size_o, size_i, OUT: tl.constexpr, IN: tl.constexpr):
    """Return the places of the elements of half a tile, and which of them exist."""
    o, i = first_o + tl.arange(0, OUT)[:, None], first_i + tl.arange(0, IN // 2)[None, :]
    return o * size_i + i, (o < size_o) & (i < size_i)


@triton.jit
def _write_products(
    grad_ptr,
    x_ptr,
    grad_rows_ptr,
    x_rows_ptr,
    end_ptr,
    out_ptr,
    size_o,
    size_i,
    GATHER_GRAD: tl.constexpr,
    GATHER_X: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STEP: tl.constexpr,
):
    halves, expert, _, first_o, first_i = _product(
        grad_ptr,
        x_ptr,
        grad_rows_ptr,
        x_rows_ptr,
        end_ptr,
        size_o,
        size_i,
        GATHER_GRAD,
        GATHER_X,
        OUT,
        IN,
        STEP,
    )
    out_ptr += expert.to(tl.int64) * size_o * size_i
    for number in tl.static_range(2):
        at, exists = _half(first_o, first_i + number * (IN // 2), size_o, size_i, OUT, IN)
        tl.store(out_ptr + at, halves[number], mask=exists)


@triton.jit
def _add_products(
    grad_ptr,
    x_ptr,
    grad_rows_ptr,
    x_rows_ptr,
    end_ptr,
    out_ptr,
    size_o,
    size_i,
    GATHER_GRAD: tl.constexpr,
    GATHER_X: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STEP: tl.constexpr,
):
    halves, expert, num_rows, first_o, first_i = _product(
        grad_ptr,
        x_ptr,
        grad_rows_ptr,
        x_rows_ptr,
        end_ptr,
        size_o,
        size_i,
        GATHER_GRAD,
        GATHER_X,
        OUT,
        IN,
        STEP,
    )
    out_ptr += expert.to(tl.int64) * size_o * size_i
    if num_rows > 0:
        for number in tl.static_range(2):
            at, exists = _half(first_o, first_i + number * (IN // 2), size_o, size_i, OUT, IN)
            before = tl.load(out_ptr + at, mask=exists, other=0.0)
            tl.store(out_ptr + at, before + halves[number], mask=exists)
