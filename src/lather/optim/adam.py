"""The inner Adam, run in whatever coordinates the caller's gradient is in (Kingma and Ba, arXiv:1412.6980; Nesterov form: NAdam)."""

from __future__ import annotations

from torch import Tensor

from lather.kernels.adam_in_basis import adam_in_basis
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

    `step` is t, 1 for the first gradient. Without `correct_bias` the moments are taken as they are. See `lather.kernels.adam_in_basis`.
    """
    return adam_in_basis(g, exp_avg, exp_avg_sq, step, betas=betas, eps=eps, correct_bias=correct_bias, nesterov=nesterov)
