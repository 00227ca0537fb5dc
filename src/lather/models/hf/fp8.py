"""Converts weights in block-scaled FP8 to ordinary numbers.

Source: the published weights of DeepSeek-V3 (arXiv:2412.19437, section 3.3): elements E4M3, and for
each block of 128 x 128 elements, which may be cut off at the end of a row or column, a factor in
another tensor, `<name>_scale_inv`.

Letters: R rows, C columns, Y and Z blocks in a column and a row.
"""

from __future__ import annotations

from torch import Tensor

from lather.shapes import Float

SIDE = 128
"""Rows and columns of a block."""
FACTORS = "_scale_inv"
"""End of the name of the factors."""


def factor_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the factors of a matrix of this shape."""
    return tuple(-(-size // SIDE) for size in shape)


def dequantize_fp8(
    weight_RC: Tensor, factor_YZ: Float[Tensor, "y z"], first_row: int = 0
) -> Float[Tensor, "r c"]:
    """Convert E4M3 elements to fp32 values. They may be only some rows of a matrix, from
    `first_row` on; the factors are those of the whole matrix."""
    rows, columns = weight_RC.shape
    factor_RZ = factor_YZ.float().repeat_interleave(SIDE, dim=0)[first_row : first_row + rows]
    factor_RC = factor_RZ.repeat_interleave(SIDE, dim=1)[:, :columns]
    return weight_RC.float().mul_(factor_RC)
