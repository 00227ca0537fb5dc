"""The change of bf16 weights in torch: the specification."""

from __future__ import annotations

from torch import Tensor

from lather.kernels.remainder import join, split
from lather.kernels.stochastic_rounding import round_to_bf16


def change_(w: Tensor, u: Tensor, r: Tensor | None, *, decay: float, lr: float, step: int) -> None:
    wide = w.float() if r is None else join(w, r)
    wide = wide.mul_(1 - decay).add_(u, alpha=-lr)
    if r is None:
        round_to_bf16(wide, step, out=w)
    else:
        split(wide, w, r)
