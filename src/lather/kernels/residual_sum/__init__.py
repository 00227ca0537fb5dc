"""The end of a block: the residual stream plus the outputs of routed and of shared experts.

Letters: `...` the dims of the stream, T its rows, D its columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import fastest
from lather.kernels.residual_sum import reference
from lather.shapes import Float


def residual_sum(
    residual: Float[Tensor, "*rows d"],
    routed_TD: Float[Tensor, "t d"],
    shared_TD: Float[Tensor, "t d"] | None = None,
) -> Float[Tensor, "*rows d"]:
    """Return residual + (routed + shared), in the dtype of the residual, which should be the widest
    of the three; the sum in parentheses is not rounded to less. On a GPU this is one pass. It can
    be differentiated once, and saves nothing."""
    return _ResidualSum.apply(residual, routed_TD, shared_TD)  # type: ignore[no-untyped-call]


class _ResidualSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, routed_TD: Tensor, shared_TD: Tensor | None) -> Tensor:
        terms = [x for x in (routed_TD, shared_TD) if x is not None]
        ctx.dtypes = [x.dtype for x in terms]
        is_compiling = torch.compiler.is_compiling()  # torch fuses the reference
        add = fastest(reference.add_terms, residual, *terms, in_reference=is_compiling)
        return add(residual, routed_TD, shared_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_TD = grad.flatten(0, -2)
        rounded = {dtype: grad_TD.to(dtype) for dtype in ctx.dtypes}
        of_terms = [rounded[dtype] for dtype in ctx.dtypes]
        return grad, of_terms[0], of_terms[1] if len(of_terms) > 1 else None
