"""RMSNorm in torch's own operations: the specification of the kernels.

    r = 1 / sqrt(mean(x^2) + eps)        y = w * (x r)
    dw = sum over rows of dy * x r       dx = r (w dy - x r mean(w dy * x r))

With rounding, x is first added to: t = x + branch; y is written in a narrow dtype, and if wanted in
fp32, too. The gradients of all copies of y are added in fp32, and that of t is added to dx.

Letters: D width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def forward(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y, and r with a last dim of 1."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_D * (wide * inverse_rms).to(x.dtype), inverse_rms


def backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dx in the dtype of x, and dw in that of the weight."""
    normed = x * inverse_rms
    grad_weight_D = (grad * normed).flatten(0, -2).sum(0)
    scaled = grad * weight_D.to(normed.dtype)
    along = (scaled * normed).mean(-1, keepdim=True)
    grad_x = scaled.sub_(normed.mul_(along)).mul_(inverse_rms)
    return grad_x.to(x.dtype), grad_weight_D.to(weight_D.dtype)


def forward_rounded(
    x: Tensor,
    branch: Tensor | None,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return t in the dtype of x, y in this dtype, y in that of r if `wide`, and r. Without a
    branch t is x."""
    total = x if branch is None else (x + branch).to(x.dtype)
    y, inverse_rms = forward(total, weight_D, eps)
    return total, y.to(dtype), y.to(inverse_rms.dtype) if wide else None, inverse_rms


def backward_rounded(
    grads: Sequence[Tensor],
    grad_total: Tensor | None,
    total: Tensor,
    weight_D: Tensor,
    inverse_rms: Tensor,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return dx, the branch's gradient in its dtype (None: there is no branch), and dw, from the
    gradients of the copies of y, at least one, and that of t, which may be None."""
    grad = grads[0].to(inverse_rms.dtype)
    for other in grads[1:]:
        grad = grad + other
    grad_x, grad_weight_D = backward(grad, total, weight_D, inverse_rms)
    if grad_total is not None:
        grad_x = grad_x.add_(grad_total)
    return grad_x, None if branch_dtype is None else grad_x.to(branch_dtype), grad_weight_D
