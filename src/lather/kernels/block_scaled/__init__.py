"""Matrices in FP8 with a scale for each block, and the grouped products of experts with them.

An element is in e4m3 (sign, 4 bits of exponent, 3 of mantissa, at most 448), times the fp32 scale
of its block: 1 x 128 elements of rows, 128 x 128 of weights; the last blocks may be smaller.

    scale     max |x| over the block / 448, but at least 2^-126
    value     x / scale, rounded to the nearest, ties to even
    product   for each block of 128 of the contracted dim, the fp32 sum of the products of values,
              times (scale of the row's block x scale of the weight's block); these are added in
              fp32 in the order of the blocks, and the sum is rounded to the result's dtype

A block with a NaN or an infinity is all NaN. The blocks of a weight are those of its transpose, so
that one copy serves a product and the gradient of its input. On compute capability 9.0 that
gradient pays for it: tensor cores read e4m3 with the contracted dim contiguous alone, so the kernel
turns each block of weights through registers, byte by byte, and does not copy the next ones
meanwhile. That is 512 stores of a warp beside some 500 cycles of the tensor cores: at worst, about
half of the rate. No GPU has timed it. A second, transposed copy would take another byte for each
weight, which is what FP8 saves against bf16.

Source: DeepSeek-V3 (arXiv:2412.19437, section 3.3.2), whose sums of 128 are those of the tensor
cores, too. The reference is the definition. The kernels have its bits of values and scales, and
differ in products by the rounding of sums within a block, in Triton's interpreter; no GPU has run
them. The product of two scales is formed first, and is not in the range of fp32 if it is above
3e38 or below 1e-38.

Letters: R rows, G rows grouped by expert, E experts, I input and O output size of a weight; N and M
are one of I and O each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lather.device import STANDINS, gpu_module, is_gpu, is_nvidia
from lather.kernels.backend import HAS_TRITON, run
from lather.kernels.block_scaled import reference
from lather.kernels.block_scaled.reference import BLOCK, DTYPE
from lather.shapes import Float, Int

__all__ = [
    "BLOCK",
    "DTYPE",
    "LEAST_CAPABILITY",
    "BlockScaled",
    "empty_rows",
    "grouped_product",
    "multiplies_in_fp8",
    "scaled_rows",
    "scaled_weights",
    "unscaled_rows",
]

LEAST_CAPABILITY = (8, 9)
"""Compute capability from which on GPUs multiply e4m3."""


class BlockScaled(NamedTuple):
    """Rows (R, N) or weights (E, O, I) in FP8."""

    values: Tensor
    scales: Tensor
    """(R, N / 128) or (E, O / 128, I / 128), rounded up, in fp32."""


def multiplies_in_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies in e4m3, by kernels of Triton; a CPU emulates it, and the
    stand-in of a GPU counts it."""
    if not is_gpu(device) or device.type in STANDINS:
        return True
    if not is_nvidia(device) or not HAS_TRITON:
        return False
    return tuple(gpu_module(device).get_device_capability(device)) >= LEAST_CAPABILITY


@torch.no_grad()
def scaled_rows(x: Float[Tensor, "r n"]) -> BlockScaled:
    """Return rows in FP8, with blocks of 1 x 128."""
    out = empty_rows(x, x.shape[1])
    run(reference.scale_rows, x, *out)
    return out


def empty_rows(x: Tensor, num_columns: int) -> BlockScaled:
    """Return memory for rows in FP8, as many as x has."""
    num_blocks = -(-num_columns // BLOCK)
    values = x.new_empty(len(x), num_columns, dtype=DTYPE)
    return BlockScaled(values, _scales(x, len(x), num_blocks))


@torch.no_grad()
def scaled_weights(weight: Float[Tensor, "e o i"]) -> BlockScaled:
    """Return weights in FP8, with blocks of 128 x 128. They are rounded to bf16 before, as gathered
    weights are, so that all meshes have the same bits."""
    blocks = (-(-size // BLOCK) for size in weight.shape[1:])
    out = BlockScaled(
        weight.new_empty(weight.shape, dtype=DTYPE), _scales(weight, len(weight), *blocks)
    )
    run(reference.scale_weights, weight, *out)
    return out


@torch.no_grad()
def unscaled_rows(
    rows: BlockScaled, row_G: Int[Tensor, " g"] | None, dtype: torch.dtype
) -> Float[Tensor, "g n"]:
    """Return the rows with these numbers (None: all) in `dtype`; zeros for -1."""
    num_rows = len(rows.values) if row_G is None else len(row_G)
    out = rows.scales.new_empty(num_rows, rows.values.shape[1], dtype=dtype)
    run(reference.unscale_rows, *rows, row_G, out)
    return out


@torch.no_grad()
def grouped_product(
    rows: BlockScaled,
    row_G: Int[Tensor, " g"] | None,
    weights: BlockScaled,
    end_E: Int[Tensor, " e"],
    dtype: torch.dtype,
    *,
    transposed: bool = False,
) -> Float[Tensor, "g m"]:
    """Multiply the rows of each expert e with W_e^T, or if `transposed` with W_e.

    Args:
        row_G: the row of each of the G rows, -1 for a row of zeros; None: `rows` has the G rows.
        end_E: the end of each expert's rows, in int32. Rows from the last end on have no expert:
            they are neither read nor written.
        dtype: of the result.
    """
    num_rows = len(rows.values) if row_G is None else len(row_G)
    num_columns = weights.values.shape[2 if transposed else 1]
    out = rows.scales.new_empty(num_rows, num_columns, dtype=dtype)
    run(reference.grouped_product, *rows, row_G, *weights, end_E, out, transposed)
    return out


def _scales(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)
