"""The change of the weights by the update of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from lather.torch_private import foreach_add_, foreach_copy_, foreach_mul_


def apply_(weights: list[Tensor], updates: list[Tensor], lr: float, decay: float) -> None:
    """Set W = (1 - decay) W - lr U in place, rounded once to W's dtype. All weights have one dtype,
    and all updates."""
    if not weights:
        return
    dtype = torch.promote_types(weights[0].dtype, updates[0].dtype)
    wide = (
        weights
        if dtype == weights[0].dtype
        else [torch.empty_like(weight, dtype=dtype) for weight in weights]
    )
    if wide is not weights:
        foreach_copy_(wide, weights)
    if decay:
        foreach_mul_(wide, 1 - decay)
    foreach_add_(wide, updates, alpha=-lr)
    if wide is not weights:
        foreach_copy_(weights, wide)
