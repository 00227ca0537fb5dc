"""Matrices divided by their norms in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    wide, dims = torch.promote_types(x.dtype, torch.float32), tuple(range(1, x.dim()))
    tiny = torch.finfo(wide).tiny
    largest = torch.linalg.vector_norm(x, torch.inf, dims, dtype=wide, keepdim=True)
    scaled = x / largest.clamp_min(tiny)
    norm = torch.linalg.vector_norm(scaled, 2, dims, dtype=wide, keepdim=True)
    return torch.div(scaled, norm.clamp_min(tiny), out=torch.empty_like(scaled, dtype=dtype))
