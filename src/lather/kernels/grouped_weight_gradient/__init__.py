"""`outer_product_sums`: the gradients of experts' weights, summed in fp32 over the rows of each
expert, and added in fp32 to those of earlier micro-batches.

    W_e's gradient (O, I) = sum over the rows g of expert e of grad_g (x) x_g = grad_e^T x_e

A grouped product of torch (`F.grouped_mm`) rounds these sums to the operands' dtype, so another
pass has to convert them, and a third to add them: 12 bytes per weight and micro-batch where the sum
is read and written once, 8 bytes. Either operand may have a row for each token, of which an index
picks the rows of experts, so that no copy in the order of experts is made for this product alone.

Letters: G rows grouped by expert, E experts, I input and O output size, R rows of an operand that
is gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lather.kernels.backend import run
from lather.kernels.grouped_weight_gradient import reference
from lather.shapes import Float, Int

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of the operands."""


@torch.no_grad()
def outer_product_sums(
    grad: Float[Tensor, "g_or_r o"],
    x: Float[Tensor, "g_or_s i"],
    end_E: Int[Tensor, " e"],
    total: Float[Tensor, "e o i"] | None = None,
    *,
    grad_rows: Int[Tensor, " g"] | None = None,
    x_rows: Int[Tensor, " g"] | None = None,
) -> Float[Tensor, "e o i"]:
    """Return grad_e^T x_e of every expert e in fp32, with fp32 sums; 0 for experts without rows.

    Every run gives the same bits. Errors: see `validate`.

    Args:
        end_E: the end of each expert's rows; rows from the last end on are not read.
        total: contiguous fp32 sums; the products are added to them in place, and they are returned.
        grad_rows: the row of `grad` of each of the G rows, -1 for a row of zeros; None: `grad` has
            the G rows.
        x_rows: the same of `x`.
    """
    validate(grad, x, end_E, total, grad_rows, x_rows)
    shape = len(end_E), grad.shape[1], x.shape[1]
    out = torch.empty(shape, dtype=torch.float32, device=grad.device) if total is None else total
    run(reference.outer_product_sums, grad, x, end_E, out, total is not None, grad_rows, x_rows)
    if total is not None:
        increment_version(total)  # a kernel of Triton does not tell autograd
    return out


def validate(
    grad: Tensor,
    x: Tensor,
    end_E: Tensor,
    total: Tensor | None,
    grad_rows: Tensor | None,
    x_rows: Tensor | None,
) -> None:
    """Raise TypeError for dtypes, and ValueError for shapes that do not fit; values are not
    checked."""
    if grad.dtype not in DTYPES or x.dtype != grad.dtype:
        raise TypeError(
            f"grad is {grad.dtype}, x {x.dtype}: have to be the same, one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    num_rows = {
        name: len(operand if rows is None else rows)
        for name, operand, rows in (("grad", grad, grad_rows), ("x", x, x_rows))
    }
    if grad.dim() != 2 or x.dim() != 2 or num_rows["grad"] != num_rows["x"]:
        raise ValueError(
            f"grad has shape {tuple(grad.shape)} and {num_rows['grad']} rows of experts, x "
            f"{tuple(x.shape)} and {num_rows['x']}: have to be matrices with equally many"
        )
    shape = len(end_E), grad.shape[1], x.shape[1]
    if total is not None and total.dtype != torch.float32:
        raise TypeError(f"total is {total.dtype}: has to be torch.float32")
    if total is not None and not (total.shape == shape and total.is_contiguous()):
        raise ValueError(
            f"total has shape {tuple(total.shape)} and strides {total.stride()}: has to be "
            f"contiguous, with shape {shape}"
        )
