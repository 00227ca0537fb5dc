"""Copying of token rows into the order of the experts; autograd keeps only the index for the backward pass.

Letters: N rows of the source, D columns, G picked rows, E experts.

`padded_index_gather` returns x[index] in a buffer whose number of rows is rounded up; `scatter_for_grouped_gemm` groups rows by expert and
aligns every group. An index or expert id of -1 means "no row": zeros in the forward pass, no gradient in the backward pass. Backward adds
the gradients of repeated indices in fp32, in the order of the index, without atomics, so that every run has the same bits (on CUDA without
Triton, torch determines the order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import use_triton
from lather.kernels.gather import reference
from lather.kernels.route import check_range, plan_route
from lather.shapes import Float, Int

__all__ = ["ScatteredRows", "add_rows", "gather_rows", "padded_index_gather", "scatter_for_grouped_gemm", "validate"]

_ALLOCATION = 1024
"""Buffers have a multiple of this many rows, so that the allocator sees few different sizes."""


@dataclass(frozen=True)
class ScatteredRows:
    """Rows grouped by expert."""

    rows: Float[Tensor, "r d"]
    """The whole buffer, a multiple of 1024 rows; rows without an input row are zero."""
    end_E: Int[Tensor, " e"]
    """End of each expert's group, including padding: the `offs` of `torch.nn.functional.grouped_mm`. int32."""
    position_G: Int[Tensor, " g"]
    """Position of each input row in `rows`; -1 if it is not there. int64."""


@torch.no_grad()
def gather_rows(x: Float[Tensor, "n d"], index: Int[Tensor, " g"], num_rows: int | None = None) -> Float[Tensor, "r d"]:
    """Return x[index] in the first G of `num_rows` rows (None: G); the others, and rows with index -1, are zero. Without autograd or
    checks."""
    if use_triton(x, index):
        from lather.kernels.gather import triton

        return triton.gather_rows(x, index, num_rows)
    return reference.gather_rows(x, index, num_rows)


@torch.no_grad()
def add_rows(grad: Float[Tensor, "g d"], index: Int[Tensor, " g"], num_rows: int) -> Float[Tensor, "n d"]:
    """Return the adjoint of gathering from `num_rows` rows: row n is the sum of the rows of `grad` with index n; -1 is dropped.

    Sums are computed in fp32 (fp64 for fp64), in the order of `index`, and rounded once to the dtype of `grad`, without autograd or checks.
    If every source row was picked at most K times and these rows are known, `combine.combine_rows_sum` does the same without sorting.
    """
    if use_triton(grad, index):
        from lather.kernels.gather import triton

        return triton.add_rows(grad, index, num_rows)
    return reference.add_rows(grad, index, num_rows)


def padded_index_gather(x: Float[Tensor, "n d"], index: Int[Tensor, " g"], pad_to_multiple: int = 1024) -> Float[Tensor, "g d"]:
    """Return x[index] as a view of a buffer whose number of rows is rounded up to a multiple of `pad_to_multiple`; its other rows are zero.

    `index` is int64, from 0 to N - 1, or -1 for a row of zeros. Autograd keeps only the index; the result can be differentiated once.
    Errors: see `validate`.
    """
    validate(x, index, pad_to_multiple)
    check_range(index, -1, len(x), "index")
    rows: Tensor = _Gather.apply(x, index, _round_up(len(index), pad_to_multiple))  # type: ignore[no-untyped-call]
    return rows


def scatter_for_grouped_gemm(x: Float[Tensor, "g d"], expert_ids: Int[Tensor, " ids"], num_experts: int, alignment: int) -> ScatteredRows:
    """Group the rows of `x` by expert, in their order within each group. Every group begins at a multiple of `alignment`.

    `expert_ids` is int64, from 0 to `num_experts` - 1, or -1 for a row to leave out. Autograd keeps only the positions; the result can be
    differentiated once. Errors: see `validate` and `route.plan_route`.
    """
    validate(x, expert_ids, _ALLOCATION)
    if len(x) != len(expert_ids):
        raise ValueError(f"{len(x)} rows and {len(expert_ids)} expert ids: every row needs one")
    check_range(expert_ids, -1, num_experts, "expert_ids")
    route = plan_route(expert_ids.unsqueeze(1), num_experts, alignment)
    position = route.row_TK.squeeze(1)
    rows: Tensor = _Scatter.apply(x, route.token_G, position)  # type: ignore[no-untyped-call]
    return ScatteredRows(rows, route.end_E, position)


def validate(x: Tensor, index: Tensor, pad_to_multiple: int) -> None:
    """Raise ValueError for a wrong shape, device or multiple, and TypeError for a wrong dtype; `route.check_range` checks the range."""
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


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_source_rows = len(x)
        buffer = gather_rows(x, index, num_rows)
        return buffer.resize_(len(index), x.shape[1])  # the storage stays; callers could not write to a slice in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return add_rows(grad, ctx.saved_tensors[0], ctx.num_source_rows), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return gather_rows(x, token, _round_up(len(token), _ALLOCATION))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(grad, ctx.saved_tensors[0]), None, None
