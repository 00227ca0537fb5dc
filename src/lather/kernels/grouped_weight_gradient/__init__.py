"""`outer_product_sums`: the gradients of experts' weights, summed in fp32 over the rows of each
expert, and added in fp32 to those of earlier micro-batches.

    W_e's gradient (O, I) = sum over the rows g of expert e of grad_g (x) x_g = grad_e^T x_e

A grouped product of torch (`F.grouped_mm`) rounds these sums to the operands' dtype, so another
pass has to convert them, and a third to add them: 12 bytes per weight and micro-batch where the sum
is read and written once, 8 bytes. Both operands are in the order of experts: a copy of gathered
rows and a product that reads blocks of them take less time than a product that looks up each row.

Letters: G rows grouped by expert, E experts, I input and O output size.
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
    grad: Float[Tensor, "g o"],
    x: Float[Tensor, "g i"],
    end_E: Int[Tensor, " e"],
    total: Float[Tensor, "e o i"] | None = None,
) -> Float[Tensor, "e o i"]:
    """Return grad_e^T x_e of every expert e in fp32, with fp32 sums; 0 for experts without rows.

    Every run gives the same bits. Errors: see `validate`.

    Args:
        end_E: the end of each expert's rows; rows from the last end on are not read.
        total: contiguous fp32 sums; the products are added to them in place, and they are returned.
    """
    validate(grad, x, end_E, total)
    shape = len(end_E), grad.shape[1], x.shape[1]
    out = torch.empty(shape, dtype=torch.float32, device=grad.device) if total is None else total
    run(reference.outer_product_sums, grad, x, end_E, out, total is not None)
    if total is not None:
        increment_version(total)  # a kernel of Triton does not tell autograd
    return out


def validate(grad: Tensor, x: Tensor, end_E: Tensor, total: Tensor | None) -> None:
    """Raise TypeError for dtypes, and ValueError for shapes that do not fit; values are not
    checked."""
    if grad.dtype not in DTYPES or x.dtype != grad.dtype:
        raise TypeError(
            f"grad is {grad.dtype}, x {x.dtype}: have to be the same, one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    if grad.dim() != 2 or x.dim() != 2 or len(grad) != len(x):
        raise ValueError(
            f"grad has shape {tuple(grad.shape)}, x {tuple(x.shape)}: have to be matrices with "
            "equally many rows"
        )
    shape = len(end_E), grad.shape[1], x.shape[1]
    if total is not None and total.dtype != torch.float32:
        raise TypeError(f"total is {total.dtype}: has to be torch.float32")
    if total is not None and not (total.shape == shape and total.is_contiguous()):
        raise ValueError(
            f"total has shape {tuple(total.shape)} and strides {total.stride()}: has to be "
            f"contiguous, with shape {shape}"
        )
