"""Copying of token rows into the order of the experts; autograd keeps only the index for the
backward pass.

Letters: N rows of the source, D columns, G picked rows.

`padded_index_gather` returns x[index] in a buffer whose number of rows is rounded up. An index of
-1 means "no row": zeros in the forward pass, no gradient in the backward pass. Backward adds the
gradients of repeated indices in fp32, in the order of the index, without atomics, so that every run
has the same bits (on CUDA without Triton, torch determines the order).
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


@torch.no_grad()
def gather_rows(x: Tensor, index: Int[Tensor, " g"]) -> Tensor:
    """Return x[index], and zeros for -1, for rows of any dtype, also of bytes, without autograd or
    checks."""
    return run(reference.gather_rows, x, index)


@torch.no_grad()
def add_rows(
    grad: Float[Tensor, "g d"], index: Int[Tensor, " g"], num_rows: int
) -> Float[Tensor, "n d"]:
    """Return the adjoint of gathering from `num_rows` rows: row n is the sum of the rows of `grad`
    with index n; -1 is dropped.

    Sums are computed in fp32 (fp64 for fp64), in the order of `index`, and rounded once to the
    dtype of `grad`, without autograd or checks. If every source row was picked at most K times and
    these rows are known, `combine.combine_forward` does the same without sorting."""
    return run(reference.add_rows, grad, index, num_rows)


def padded_index_gather(
    x: Float[Tensor, "n d"],
    index: Int[Tensor, " g"],
    pad_to_multiple: int = 1024,
    *,
    checked: bool = True,
) -> Float[Tensor, "g d"]:
    """Return x[index] as a view of a buffer whose number of rows is rounded up to a multiple of
    `pad_to_multiple`; its other rows are zero.

    `index` is int64 or int32, from 0 to N - 1, or -1 for a row of zeros. Autograd keeps only the
    index; the result can be differentiated once. Errors: see `validate`. `checked`: check also that
    the index is in range; False saves the launch of a kernel where the index is that of a
    `route.Route`.
    """
    validate(x, index, pad_to_multiple)
    if checked:
        check_range(index, -1, len(x), "index")
    return _Gather.apply(x, index, -(-len(index) // pad_to_multiple) * pad_to_multiple)  # type: ignore[no-untyped-call]


def validate(x: Tensor, index: Tensor, pad_to_multiple: int) -> None:
    """Raise ValueError for a wrong shape, device or multiple, and TypeError for a wrong dtype;
    `route.check_range` checks the range."""
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: has to be floating point")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"index is {index.dtype}: has to be torch.int64 or torch.int32")
    if x.dim() != 2 or index.dim() != 1:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, index {tuple(index.shape)}: have to be (rows, columns) "
            "and (picked rows,)"
        )
    if x.device != index.device:
        raise ValueError(f"x is on {x.device}, index on {index.device}: have to be on one device")
    if pad_to_multiple < 1:
        raise ValueError(f"pad_to_multiple={pad_to_multiple}: has to be at least 1 (1: no padding)")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_source_rows = len(x)
        buffer = run(reference.gather_rows, x, index, num_rows)
        if num_rows == len(index):
            return buffer
        # the storage stays; callers could not write to a slice in place
        return buffer.resize_(len(index), x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return add_rows(grad, ctx.saved_tensors[0], ctx.num_source_rows), None, None
