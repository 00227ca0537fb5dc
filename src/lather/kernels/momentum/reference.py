"""Nesterov's momentum in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.unit_norm.reference import unit_norm


def nesterov_(b: Tensor, g: Tensor, mu: float) -> Tensor:
    return g.lerp(b.lerp_(g, 1 - mu), mu)


def unit_nesterov_(b: Tensor, g: Tensor, mu: float, dtype: torch.dtype) -> Tensor:
    return unit_norm(nesterov_(b, g, mu), dtype)
