"""Sums of outer products over each expert's rows on CUDA: a program computes a tile of one expert's
gradient, with its sums in registers, and writes it once, or reads the sum of before and writes the
new one. There are no atomics, so every run has the same bits.

A tile has OUT x IN elements; STEP rows are multiplied at a time. Steps that lie inside an expert's
rows are copied by the GPU's unit for blocks of tensors (TMA), which needs no registers for
addresses and masks; pointers read the rows after the last such step, with a mask, and all rows of
operands that the unit cannot read, in the same order.

The programs of an expert follow each other, so that its rows come from memory once, and then from
the cache. A tile is written in two halves, so that two programs' registers fit into a
multiprocessor of compute capability 9.0: one multiplies while the other reads and writes sums.
Tiles of twice the size are slower. An expert without rows costs nothing if products are added to
sums.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lather.kernels.launch import copies_blocks, launch

TILES = {2: (128, 128, 64), 4: (64, 64, 32)}
"""OUT, IN and STEP by bytes of an element."""
SMALLEST = 16
"""Fewest rows and columns that tensor cores multiply."""
GROUP = 8
"""Number of tiles below each other whose programs follow each other."""
DESCRIBED_BYTES = 16
"""Multiple at which the rows of a tensor with a descriptor begin."""


def outer_product_sums(
    grad: Tensor, x: Tensor, end_E: Tensor, out_EOI: Tensor, accumulate: bool
) -> None:
    num_experts, *sizes = out_EOI.shape
    grad, x = grad.contiguous(), x.contiguous()
    *largest, step = TILES[grad.element_size()]
    out, in_ = (
        min(max(triton.next_power_of_2(size), SMALLEST), limit)
        for size, limit in zip(sizes, largest, strict=True)
    )
    blocks: tuple[TensorDescriptor | None, ...] = None, None
    if _is_described(grad) and _is_described(x) and copies_blocks(grad):
        blocks = _described(grad, (step, out)), _described(x, (step, in_))
    launch(
        _add_products,
        (num_experts * triton.cdiv(sizes[0], out) * triton.cdiv(sizes[1], in_),),
        grad,
        x,
        *blocks,
        end_E,
        out_EOI if accumulate else None,
        out_EOI,
        *sizes,
        OUT=out,
        IN=in_,
        STEP=step,
        GROUP=GROUP,
        num_warps=8,
        num_stages=3,
    )


def _is_described(x: Tensor) -> bool:
    """Tell whether a contiguous matrix is read by a descriptor: one in 16 bits, which tensor cores
    multiply where the copies are (fp32 would need twice the registers), whose every row begins
    where a descriptor allows it. A tensor's memory begins at such a place."""
    places = x.storage_offset(), x.shape[1]
    aligned = not any(2 * place % DESCRIBED_BYTES for place in places)
    return x.element_size() == 2 and x.numel() > 0 and aligned


def _described(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Describe a contiguous matrix that is read in blocks; torch lets the stride of a single row be
    anything."""
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], list(block))


@triton.jit
def _add_products(
    grad_ptr,
    x_ptr,
    grad_blocks,
    x_blocks,
    end_ptr,
    before_ptr,
    out_ptr,
    size_o,
    size_i,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write a tile of an expert's product, or add it to the sums of before, if there are any."""
    down, across = tl.cdiv(size_o, OUT), tl.cdiv(size_i, IN)
    expert, tile = tl.program_id(0) // (down * across), tl.program_id(0) % (down * across)
    tile_o, tile_i = tl.swizzle2d(tile // across, tile % across, down, across, GROUP)
    first_o, first_i = tile_o * OUT, tile_i * IN
    start = tl.load(end_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(end_ptr + expert)
    last = end
    if grad_blocks is not None:
        last = start + (end - start) // STEP * STEP
    o, i = first_o + tl.arange(0, OUT)[:, None], first_i + tl.arange(0, IN)[None, :]
    row = tl.arange(0, STEP)
    product = tl.zeros((OUT, IN), dtype=tl.float32)
    for first in range(start, last, STEP):
        if grad_blocks is not None:
            grad = tl.trans(grad_blocks.load([first, first_o]))
            x = x_blocks.load([first, first_i])
        else:
            grad = _elements(grad_ptr, first + row[None, :], end, o, size_o)
            x = _elements(x_ptr, first + row[:, None], end, i, size_i)
        product = tl.dot(grad, x, product, input_precision="ieee")
    if last < end:
        grad = _elements(grad_ptr, last + row[None, :], end, o, size_o)
        x = _elements(x_ptr, last + row[:, None], end, i, size_i)
        product = tl.dot(grad, x, product, input_precision="ieee")
    halves = tl.split(tl.permute(tl.reshape(product, (OUT, 2, IN // 2)), (0, 2, 1)))
    out_ptr += expert.to(tl.int64) * size_o * size_i
    if before_ptr is not None:
        before_ptr += expert.to(tl.int64) * size_o * size_i
    if end > start or before_ptr is None:
        for number in tl.static_range(2):
            half = first_i + number * (IN // 2) + tl.arange(0, IN // 2)[None, :]
            at, exists = o * size_i + half, (o < size_o) & (half < size_i)
            total = halves[number]
            if before_ptr is not None:
                total += tl.load(before_ptr + at, mask=exists, other=0.0)
            tl.store(out_ptr + at, total, mask=exists)


@triton.jit
def _elements(ptr, row, end, column, size):
    """Return the elements of a matrix in these rows and columns; 0 from the end of the expert's
    rows and of the columns on."""
    exists = (row < end) & (column < size)
    return tl.load(ptr + row.to(tl.int64) * size + column, mask=exists, other=0.0)
