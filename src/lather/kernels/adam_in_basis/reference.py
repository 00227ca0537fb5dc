"""Adam's moments and step direction in torch: the specification.

    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    u = (m / c1) / (sqrt(v / c2) + eps)

with c_i = 1 - beta_i^t, or 1 without bias correction. Nesterov's form replaces m / c1 by beta1 m /
c1' + (1 - beta1) g / c1, with c1' of step t + 1. Moments in a narrower dtype than g are converted
for the computation and rounded once, after u has been computed from them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def corrections(
    step: int, betas: tuple[float, float], *, correct_bias: bool
) -> tuple[float, float, float]:
    """Return c1 and c2 of this step, and c1 of the next."""
    beta1, beta2 = betas
    if not correct_bias:
        return 1.0, 1.0, 1.0
    return 1 - beta1**step, 1 - beta2**step, 1 - beta1 ** (step + 1)


def adam_in_basis(
    g: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    betas: tuple[float, float],
    eps: float | Tensor,
    correct_bias: bool,
    nesterov: bool,
) -> Tensor:
    """Change both moments in place and return u, in as few passes over memory as torch's operations
    allow."""
    beta1, beta2 = betas
    m, v = exp_avg.to(g.dtype), exp_avg_sq.to(g.dtype)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)

    c1, c2, next_c1 = corrections(step, betas, correct_bias=correct_bias)
    numerator, scale = m, c1
    if nesterov:
        numerator, scale = (m * (beta1 / next_c1)).add_(g, alpha=(1 - beta1) / c1), 1.0
    if isinstance(eps, Tensor):
        eps = eps.view(-1, *[1] * (g.dim() - 1))
    # (numerator / scale) / (sqrt(v / c2) + eps), with all scalars in the denominator
    denominator = v.sqrt().mul_(scale / math.sqrt(c2)).add_(eps * scale)
    u = torch.div(numerator, denominator, out=denominator)
    for moment, wide in ((exp_avg, m), (exp_avg_sq, v)):
        if moment is not wide:
            moment.copy_(wide)
    return u
