"""`symmetric_product` and `add_symmetric_product`: x x^T for matrices x (B, m, n), alone or added
to symmetric matrices (B, m, m).

torch has no symmetric rank-k product and computes both halves of the result. On a GPU, where m has
several tiles, a kernel computes the tiles up to the diagonal and stores each of them twice: with
4 tiles 10 of 16, with 16 tiles 17 of 32. Its results are symmetric to the bit.

It has the precision that torch's own product would have: sums in fp32 of bf16 operands, or of fp32
operands in TF32 where products are in TF32. True fp32 has no tensor cores, and torch's library
multiplies faster without them than Triton does, so that such products are torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lather.kernels.backend import fastest
from lather.kernels.symmetric_product import reference
from lather.shapes import Float
from lather.torch_private import get_fp32_precision

SIDE = 128
"""Rows and columns of a tile of the result."""

LEAST_ROWS = 4 * SIDE
"""Least m for the kernel, which then leaves out 6 of 16 tiles. On an H200 it takes 0.94 of the time
of torch's library for 60 bf16 matrices of 512 rows, 1.1 for 20 of them, and 0.55 to 0.95 from 700
rows on."""

ALIGNMENT = 16
"""Bytes by which rows, or columns, have to be aligned for the kernel to read them 16 bytes at a
time."""

MOST_ELEMENTS = 2**31
"""Elements up to the last of a matrix that the kernel counts in 32 bits."""


def symmetric_product(x: Float[Tensor, "b m n"]) -> Float[Tensor, "b m m"]:
    """Return x x^T, in the dtype of `x`."""
    return fastest(reference.symmetric_product, x, in_reference=not has_kernel_for(x))(x)


def add_symmetric_product(
    total: Float[Tensor, "b m m"],
    x: Float[Tensor, "b m n"],
    *,
    beta: float,
    alpha: float,
    out: Tensor | None = None,
) -> Float[Tensor, "b m m"]:
    """Return beta total + alpha x x^T, in a new tensor or in `out`, which may be `total`.

    Args:
        total: symmetric matrices, of which only the lower triangles may be read; nothing of them is
            read if beta is 0.
        x: matrices, in the dtype of `total`.
    """
    plain = total.is_contiguous() and (out is None or out.is_contiguous())
    in_reference = not (plain and has_kernel_for(x))
    operation = fastest(reference.add_symmetric_product, total, x, in_reference=in_reference)
    result: Tensor = operation(total, x, beta=beta, alpha=alpha, out=out)
    if out is not None:
        increment_version(out)  # a kernel of Triton does not tell torch
    return result


def has_kernel_for(x: Float[Tensor, "b m n"]) -> bool:
    """Tell whether products of `x` on a GPU are the kernel's: of enough rows, in a precision of the
    tensor cores, aligned, and without a gradient. The columns of bf16 matrices may be contiguous in
    place of the rows; the tensor cores do not read TF32 so."""
    _, m, n = x.shape
    of_matrix, of_row, of_column = x.stride()
    in_tensor_cores = (x.dtype == torch.bfloat16 and min(of_row, of_column) == 1) or (
        x.dtype == torch.float32
        and of_column == 1
        and get_fp32_precision("cuda", "matmul") == "tf32"
    )
    if not in_tensor_cores or m < LEAST_ROWS:
        return False
    if x.requires_grad and torch.is_grad_enabled():
        return False
    starts = (of_matrix, max(of_row, of_column), x.storage_offset())
    is_aligned = all(start * x.element_size() % ALIGNMENT == 0 for start in starts)
    last = (m - 1) * of_row + (n - 1) * of_column
    return is_aligned and max(last, m * m) < MOST_ELEMENTS


def num_flops(x: Float[Tensor, "b m n"]) -> int:
    """Return the flops of the kernel's product of `x`."""
    b, m, n = x.shape
    side = -(-m // SIDE)
    return b * side * (side + 1) * SIDE * SIDE * n
