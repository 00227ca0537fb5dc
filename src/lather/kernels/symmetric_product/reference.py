"""Products of matrices with their own transposes in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric_product(x: Tensor) -> Tensor:
    return x @ x.mT


def add_symmetric_product(
    total: Tensor, x: Tensor, *, beta: float, alpha: float, out: Tensor | None
) -> Tensor:
    return torch.baddbmm(total, x, x.mT, beta=beta, alpha=alpha, out=out)
