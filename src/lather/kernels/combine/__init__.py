"""The output of each token as the weighted sum of its experts' rows, and the gradients of that.

    out[t] = sum over k of weights[t, k] * rows[row_TK[t, k]]        a row of -1 contributes nothing

Letters: T tokens, K slots (experts per token), G rows grouped by expert, D columns.

Sums are computed in fp32 (fp64 for fp64), in the order of the slots, and rounded once to the dtype
of the rows; no (T, K, D) tensor is created. Autograd keeps `rows` for the gradient of the weights.
A row must belong to at most one (token, slot) pair, as in the routes of `route.plan_route`, so that
backward writes the gradient of each row once, without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import run
from lather.kernels.combine import reference
from lather.kernels.route import check_range
from lather.shapes import Float, Int


def weighted_combine(
    rows: Float[Tensor, "g d"], row_TK: Int[Tensor, "t k"], weights_TK: Float[Tensor, "t k"]
) -> Float[Tensor, "t d"]:
    """Return the weighted sum of each token's rows, in their dtype. It can be differentiated once,
    for `rows` and `weights_TK`.

    `row_TK` is int64, from 0 to G - 1, each at most once, or -1 for no row. The gradient of rows
    that belong to no token is zero. Errors: see `validate`; on CUDA the entries of `row_TK` are
    checked by assertions on the device.
    """
    validate(rows, row_TK, weights_TK)
    check_range(row_TK, -1, len(rows), "row_TK")
    run(reference.check_distinct, row_TK, len(rows))
    return _Combine.apply(rows, row_TK, weights_TK)  # type: ignore[no-untyped-call]


@torch.no_grad()
def combine_forward(
    rows: Float[Tensor, "g d"],
    row_TK: Int[Tensor, "t k"],
    weights_TK: Float[Tensor, "t k"] | None = None,
) -> Float[Tensor, "t d"]:
    """Return the weighted sum of each token's rows, in their dtype, without autograd or checks.
    Without weights it is the plain sum, the adjoint of copying tokens to rows."""
    return run(reference.combine_forward, rows, row_TK, weights_TK)


@torch.no_grad()
def combine_backward(
    grad: Float[Tensor, "t d"],
    rows: Float[Tensor, "g d"],
    row_TK: Int[Tensor, "t k"],
    weights_TK: Float[Tensor, "t k"],
) -> tuple[Float[Tensor, "g d"], Float[Tensor, "t k"]]:
    """Return the gradients of `rows` (zero for rows of no token) and of `weights_TK` (zero for
    pairs without row), without checks."""
    return run(reference.combine_backward, grad, rows, row_TK, weights_TK)


def validate(rows: Tensor, row_TK: Tensor, weights_TK: Tensor) -> None:
    """Raise ValueError for shapes or devices that do not match, and TypeError for a wrong dtype.

    `weighted_combine` checks that the entries of `row_TK` are in range and distinct: by ValueError
    on the CPU, by an assertion on CUDA."""
    if not rows.is_floating_point() or not weights_TK.is_floating_point():
        raise TypeError(
            f"rows are {rows.dtype}, weights_TK {weights_TK.dtype}: both have to be floating point"
        )
    if row_TK.dtype != torch.int64:
        raise TypeError(f"row_TK is {row_TK.dtype}: has to be torch.int64")
    if rows.dim() != 2 or row_TK.dim() != 2:
        raise ValueError(
            f"rows have shape {tuple(rows.shape)}, row_TK {tuple(row_TK.shape)}: have to be (rows, "
            "columns) and (tokens, slots)"
        )
    if weights_TK.shape != row_TK.shape:
        raise ValueError(
            f"weights_TK has shape {tuple(weights_TK.shape)}, row_TK {tuple(row_TK.shape)}: have "
            "to be equal"
        )
    if not rows.device == row_TK.device == weights_TK.device:
        raise ValueError(
            f"rows are on {rows.device}, row_TK on {row_TK.device}, weights_TK on "
            f"{weights_TK.device}: have to be on one device"
        )


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows, row_TK, weights_TK)
        return combine_forward(rows, row_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        grad_rows, grad_weights = combine_backward(grad, *ctx.saved_tensors)
        return grad_rows, None, grad_weights
