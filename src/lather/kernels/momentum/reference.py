"""Nesterov's momentum in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.unit_norm.reference import unit_norm


def nesterov_(b: Tensor, g: Tensor, mu: float, factor: float = 1.0) -> Tensor:
    if factor == 1.0:
        return g.lerp(b.lerp_(g, 1 - mu), mu)
    n = g * factor  # becomes N in place
    return n.lerp_(b.lerp_(n, 1 - mu), mu)


def unit_nesterov_(
    b: Tensor, g: Tensor, mu: float, dtype: torch.dtype, factor: float = 1.0
) -> Tensor:
    return unit_norm(nesterov_(b, g, mu, factor), dtype)
