"""The inner Adam, run in whatever coordinates the caller's gradient is in (Kingma and Ba, arXiv:1412.6980; Nesterov form: NAdam)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lather.shapes import Float


def adam_update(
    g: Float[Tensor, "*dims"],
    exp_avg: Float[Tensor, "*dims"],
    exp_avg_sq: Float[Tensor, "*dims"],
    step: int,
    *,
    betas: tuple[float, float],
    eps: float,
    correct_bias: bool = True,
    nesterov: bool = False,
) -> Float[Tensor, "*dims"]:
    """Update both moments in place with `g` and return the step direction u, of the same shape (the caller subtracts lr * u).

    `step` is t, 1 for the first gradient. Without `correct_bias` the moments are taken as they are.
    """
    beta1, beta2 = betas
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)

    def correction(beta: float, t: int) -> float:
        return 1 - beta**t if correct_bias else 1.0

    c1, c2 = correction(beta1, step), correction(beta2, step)
    numerator, scale = exp_avg, c1
    if nesterov:
        numerator, scale = (exp_avg * (beta1 / correction(beta1, step + 1))).add_(g, alpha=(1 - beta1) / c1), 1.0
    # numerator / scale over sqrt(v / c2) + eps, in as few passes over memory as it takes
    denominator = exp_avg_sq.sqrt().mul_(scale / math.sqrt(c2)).add_(eps * scale)
    return torch.div(numerator, denominator, out=denominator)
