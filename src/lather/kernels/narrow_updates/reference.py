"""The change of fp32 weights by bf16 updates in torch: the specification."""

from __future__ import annotations

from torch import Tensor


def change_by_(w: Tensor, u: Tensor, decay: float, lr: float) -> None:
    w.mul_(1 - decay).add_(u, alpha=-lr)
