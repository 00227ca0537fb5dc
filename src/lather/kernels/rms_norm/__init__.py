"""RMSNorm over the last dim: y = weight * x / rms(x), and its backward pass.

Source: Zhang and Sennrich (arXiv:1910.07467). Letters: D width of a row; `...` the dims of the
rows.

Autograd keeps x, the weight and an fp32 number per row, 1 / rms. On a GPU, forward and backward
each read and write a row once; the gradient of the weight is summed in two passes in a fixed order,
without atomics.

`add_rms_norm` and `round_rms_norm` write y in the dtype of the products that read it, so that
nobody casts it. Gradients of y stay in fp32: each reader has a copy of y in autograd, or a tensor
that stands for y there in fp32 (`RoundedRows`), and the backward kernel adds the gradients of all
copies, and the gradient of the residual stream, in the pass that it makes anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import fastest
from lather.kernels.rms_norm import reference
from lather.shapes import Float

WIDEST = 16384
"""Largest number of columns for the kernels, whose programs hold a whole row; the reference handles
wider rows."""


def rms_norm(
    x: Float[Tensor, "*rows d"], weight: Float[Tensor, " d"], eps: float
) -> Float[Tensor, "*rows d"]:
    """Return weight * (x / sqrt(mean(x^2) + eps)). The quotient is computed in fp32 (fp64 for fp64)
    and rounded to the dtype of x; the product has the wider of the two dtypes.

    It can be differentiated once. Raises ValueError for shapes that do not match, TypeError for a
    dtype that is not floating point."""
    validate(x, weight)
    return _RMSNormFunction.apply(x, weight, eps)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class RoundedRows:
    """The output of a norm in the dtype of products, which takes its gradient in fp32."""

    values: Tensor
    """The rows, which autograd does not follow."""
    stand_in: Tensor
    """Stands for the rows in autograd: of their shape, without memory of its own, and without
    meaningful values."""
    when_widened: Callable[[Tensor], None] | None = None
    """Called with the result of `widened`, before anything reads it."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the rows have in autograd."""
        return self.stand_in.dtype

    def widened(self) -> Tensor:
        """Return the rows as a tensor of autograd, in the dtype of their gradient."""
        x: Tensor = _Widened.apply(self.stand_in, self.values)  # type: ignore[no-untyped-call]
        if self.when_widened is not None:
            self.when_widened(x)
        return x


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, values: Tensor) -> Tensor:
        return values.to(stand_in.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def round_rms_norm(
    x: Float[Tensor, "*rows d"], weight: Float[Tensor, " d"], eps: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "*rows d"], RoundedRows]:
    """Return x, and `rms_norm(x, weight, eps)` rounded to this dtype. If what follows uses the
    returned x in place of x, backward adds the gradients of both in one pass. Errors as of
    `rms_norm`."""
    validate(x, weight)
    x, values, stand_in = _RoundedFunction.apply(x, None, weight, eps, dtype, 0, False)  # type: ignore[no-untyped-call]
    return x, RoundedRows(values, stand_in)


def add_rms_norm(
    x: Float[Tensor, "*rows d"],
    branch: Float[Tensor, "*rows d"],
    weight: Float[Tensor, " d"],
    eps: float,
    dtype: torch.dtype,
    *,
    copies: int,
    wide: bool,
) -> tuple[Float[Tensor, "*rows d"], ...]:
    """Return the sum t of x and the branch, in the dtype of x; `rms_norm(t, weight, eps)` rounded
    to this dtype, once for each of its readers; and the same not rounded, if `wide`.

    The `copies` share memory, but each takes the gradient of its reader, in this dtype, and
    backward adds them in fp32. Errors as of `rms_norm`, and ValueError unless the branch has the
    shape of x and there are one or two copies."""
    validate(x, weight, branch, copies)
    return _RoundedFunction.apply(x, branch, weight, eps, dtype, copies, wide)  # type: ignore[no-untyped-call]


def narrow_rms_norm(
    x: Float[Tensor, "*rows d"], weight: Float[Tensor, " d"], eps: float, dtype: torch.dtype
) -> Float[Tensor, "*rows d"]:
    """Return `rms_norm(x, weight, eps)` rounded to this dtype, in which its gradient is, too.
    Errors as of `rms_norm`."""
    validate(x, weight)
    _, y = _RoundedFunction.apply(x, None, weight, eps, dtype, 1, False)  # type: ignore[no-untyped-call]
    return y


def rounded_again(
    x: Float[Tensor, "*rows d"],
    weight: Float[Tensor, " d"],
    eps: float,
    dtype: torch.dtype,
    *,
    wide: bool,
) -> tuple[Float[Tensor, "*rows d"], Float[Tensor, "*rows d"] | None]:
    """Return `rms_norm(x, weight, eps)` rounded to this dtype, and not rounded if `wide`, without
    autograd."""
    _, y, y_wide, _ = _rounded_forward(x, None, weight, eps, dtype, wide=wide)
    return y, y_wide


class _RoundedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight_D: Tensor,
        eps: float,
        dtype: torch.dtype,
        copies: int,
        wide: bool,
    ) -> tuple[Tensor, ...]:
        total, y, y_wide, inverse_rms = _rounded_forward(x, branch, weight_D, eps, dtype, wide=wide)
        ctx.save_for_backward(total, weight_D, inverse_rms)
        ctx.branch_dtype = None if branch is None else branch.dtype
        ctx.set_materialize_grads(False)
        if not copies:
            ctx.mark_non_differentiable(y)
            return total, y, inverse_rms.expand(total.shape)
        rows = [y, *(y.detach() for _ in range(copies - 1))]
        return (total, *rows) if y_wide is None else (total, *rows, y_wide)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_total: Tensor | None, *of_rows: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grads = [grad for grad in of_rows if grad is not None]
        total, weight_D, inverse_rms = ctx.saved_tensors
        dtype, rest = ctx.branch_dtype, (None,) * 4
        if not grads:
            of_branch = None if dtype is None or grad_total is None else grad_total.to(dtype)
            return grad_total, of_branch, None, *rest
        operation = fastest(
            reference.backward_rounded, total, weight_D, in_reference=_in_reference(weight_D)
        )
        grad_x, of_branch, grad_weight_D = operation(
            grads, grad_total, total, weight_D, inverse_rms, dtype
        )
        return grad_x, of_branch, grad_weight_D, *rest


def _rounded_forward(
    x: Tensor,
    branch: Tensor | None,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    operation = fastest(
        reference.forward_rounded, x, weight_D, in_reference=_in_reference(weight_D)
    )
    return operation(x, branch, weight_D, eps, dtype, wide=wide)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y, inverse_rms = fastest(
            reference.forward, x, weight_D, in_reference=_in_reference(weight_D)
        )(x, weight_D, eps)
        ctx.save_for_backward(x, weight_D, inverse_rms)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, inverse_rms = ctx.saved_tensors
        operation = fastest(reference.backward, x, weight_D, in_reference=_in_reference(weight_D))
        return *operation(grad, x, weight_D, inverse_rms), None


def _in_reference(weight_D: Tensor) -> bool:
    """Tell whether the reference runs, as it does if torch compiles the caller, because torch fuses
    the reference with the operations around it."""
    return torch.compiler.is_compiling() or len(weight_D) > WIDEST


def validate(x: Tensor, weight_D: Tensor, branch: Tensor | None = None, copies: int = 1) -> None:
    """Raise ValueError for shapes that do not match and for other than one or two copies, TypeError
    for a dtype that is not floating point."""
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}: has to be floating point")
    if x.dim() == 0 or weight_D.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight_D.shape)} with x {tuple(x.shape)}: has to be one "
            "number for each column of x"
        )
    if branch is not None and branch.shape != x.shape:
        raise ValueError(
            f"branch has shape {tuple(branch.shape)} with x {tuple(x.shape)}: has to be equal"
        )
    if copies not in (1, 2):  # the kernel adds the gradients of two, and of the wide rows
        raise ValueError(f"copies is {copies}: has to be 1 or 2")
