"""The elementwise work on one tile of logits in Triton: the formulas of `reference.py`, each in one
pass over the tile.

`update_logsumexp_` has one program per row; `softmax_gradient` has one per row and block of
columns. The last dim of a tile must be contiguous. The reference handles fp64.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

BLOCK = 1024


def update_logsumexp_(
    max_N: Tensor,
    sum_N: Tensor,
    label_logit_N: Tensor,
    logits_NC: Tensor,
    labels_N: Tensor,
    first: int,
) -> None:
    """Do the same as in `reference.py`, but leave the tile as it is."""
    num_rows, num_columns = logits_NC.shape
    tensors = (max_N, sum_N, label_logit_N, logits_NC, logits_NC.stride(0), labels_N)
    launch(
        _update_logsumexp,
        (num_rows,),
        *tensors,
        first,
        num_columns,
        BLOCK=min(BLOCK, triton.next_power_of_2(num_columns)),
    )


def softmax_gradient(
    logits_NC: Tensor,
    labels_N: Tensor,
    first: int,
    logsumexp_N: Tensor,
    scale_N: Tensor,
    *,
    z_loss: float,
    dtype: torch.dtype,
) -> Tensor:
    """Do the same as in `reference.py`."""
    out_NC = logits_NC if dtype == logits_NC.dtype else torch.empty_like(logits_NC, dtype=dtype)
    num_rows, num_columns = logits_NC.shape
    block = min(BLOCK, triton.next_power_of_2(num_columns))
    tiles = (out_NC, out_NC.stride(0), logits_NC, logits_NC.stride(0))
    grid = (num_rows, triton.cdiv(num_columns, block))
    launch(
        _softmax_gradient,
        grid,
        *tiles,
        labels_N,
        first,
        logsumexp_N,
        scale_N,
        float(z_loss),
        num_columns,
        BLOCK=block,
    )
    return out_NC


@triton.jit
def _update_logsumexp(
    largest, total, label_logit, logits, row_stride, labels, first, num_columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    columns = tl.arange(0, BLOCK)
    label = tl.load(labels + row) - first
    running_max = tl.load(largest + row)
    running_sum = tl.load(total + row)
    value = tl.full((), 0.0, tl.float32)
    for offset in range(0, num_columns, BLOCK):
        x = tl.load(
            start + offset + columns, mask=offset + columns < num_columns, other=float("-inf")
        )
        value += tl.sum(tl.where(offset + columns == label, x, 0.0))
        new_max = tl.maximum(running_max, tl.max(x))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        running_sum = running_sum * tl.exp(running_max - shift) + tl.sum(tl.exp(x - shift))
        running_max = new_max
    tl.store(largest + row, running_max)
    tl.store(total + row, running_sum)
    if (label >= 0) & (label < num_columns):
        tl.store(label_logit + row, value)


@triton.jit
def _softmax_gradient(
    out,
    out_stride,
    logits,
    row_stride,
    labels,
    first,
    logsumexp,
    scale,
    z_loss,
    num_columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    label = tl.load(labels + row) - first
    lse = tl.load(logsumexp + row)
    weight = tl.load(scale + row)
    x = tl.load(logits + row * row_stride + columns, mask=inside, other=float("-inf"))
    gradient = weight * (1.0 + 2.0 * z_loss * lse) * tl.exp(x - lse) - tl.where(
        columns == label, weight, 0.0
    )
    gradient = tl.where(weight == 0.0, 0.0, gradient)
    tl.store(out + row * out_stride + columns, gradient.to(out.dtype.element_ty), mask=inside)
