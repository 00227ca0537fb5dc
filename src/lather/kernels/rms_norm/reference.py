"""RMSNorm in torch's own operations: the specification of the kernels.

    r = 1 / sqrt(mean(x^2) + eps)        y = w * (x r)
    dw = sum over rows of dy * x r       dx = r (w dy - x r mean(w dy * x r))

Letters: D width of a row.
"""

from __future__ import annotations

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
