"""Nesterov's momentum in torch: the specification."""

from __future__ import annotations

from torch import Tensor


def nesterov_(b: Tensor, g: Tensor, mu: float) -> Tensor:
    return g.lerp(b.lerp_(g, 1 - mu), mu)
