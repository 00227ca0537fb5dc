"""Copying token rows to where the experts want them, keeping nothing but the index for backward.

Letters: N rows of the source, D columns, G picked rows.

`padded_index_gather` is x[index] in a buffer of a rounded-up number of rows. An index of -1 means "no row": zeros forward, no gradient
backward. Backward adds the gradients of repeated indices in fp32, in the order of the index: no atomics, the same bits every time (on CUDA
without Triton: torch's own order).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import run
from lather.kernels.gather import reference
from lather.kernels.route import check_range
from lather.shapes import Float, Int

__all__ = ["add_rows", "gather_rows", "padded_index_gather", "validate"]


@torch.no_grad()
def gather_rows(x: Float[Tensor, "n d"], index: Int[Tensor, " g"], num_rows: int | None = None) -> Float[Tensor, "r d"]:
    """x[index] in the first G of `num_rows` rows (None: G), zeros in the rest and where the index is -1; without autograd or checks."""
    return run(reference.gather_rows, x, index, num_rows)


@torch.no_grad()
def add_rows(grad: Float[Tensor, "g d"], index: Int[Tensor, " g"], num_rows: int) -> Float[Tensor, "n d"]:
    """The adjoint of gathering from `num_rows` rows: row n is the sum of the rows of `grad` whose index is n; -1 is dropped.

    Added up in fp32 (fp64 for fp64), in the order of `index`, rounded once to `grad`'s dtype; without autograd or checks. Where every
    source row was picked at most K times and the rows are known, `combine.combine_rows_sum` does the same without a sort.
    """
    return run(reference.add_rows, grad, index, num_rows)


def padded_index_gather(x: Float[Tensor, "n d"], index: Int[Tensor, " g"], pad_to_multiple: int = 1024) -> Float[Tensor, "g d"]:
    """The rows x[index], a view of a buffer whose row count is rounded up to `pad_to_multiple`; the buffer's other rows are zero.

    `index` is int64, from 0 to N - 1, or -1 for a row of zeros. Keeps the index only for backward; differentiable once. Errors: `validate`.
    """
    validate(x, index, pad_to_multiple)
    check_range(index, -1, len(x), "index")
    rows: Tensor = _Gather.apply(x, index, -(-len(index) // pad_to_multiple) * pad_to_multiple)  # type: ignore[no-untyped-call]
    return rows


def validate(x: Tensor, index: Tensor, pad_to_multiple: int) -> None:
    """ValueError for a wrong shape, device or multiple, TypeError for a wrong dtype; the range is checked by `route.check_range`."""
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: has to be floating point")
    if index.dtype != torch.int64:
        raise TypeError(f"index is {index.dtype}: has to be torch.int64")
    if x.dim() != 2 or index.dim() != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}, index {tuple(index.shape)}: have to be (rows, columns) and (picked rows,)")
    if x.device != index.device:
        raise ValueError(f"x is on {x.device}, index on {index.device}: have to be on one device")
    if pad_to_multiple < 1:
        raise ValueError(f"pad_to_multiple={pad_to_multiple}: has to be at least 1 (1: no padding)")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_source_rows = len(x)
        buffer = gather_rows(x, index, num_rows)
        return buffer.resize_(len(index), x.shape[1])  # the storage stays; a slice could not be written to in place by the caller

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return add_rows(grad, ctx.saved_tensors[0], ctx.num_source_rows), None, None
