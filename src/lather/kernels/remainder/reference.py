"""The two halves of fp32 weights in torch, by integer arithmetic on their bits: the
specification."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def join(w: Tensor, r: Tensor, x: Tensor) -> None:
    """Write the fp32 weights with the halves w and r into x."""
    bits = x.view(torch.int32).copy_(w.view(torch.int16)).bitwise_left_shift_(16)
    bits += r.where(w != 0, r.clamp_min(0))


def split(x: Tensor, w: Tensor, r: Tensor) -> None:
    """Write the halves of the fp32 weights x into w and r."""
    bits = x.where(~x.isnan(), math.nan).view(torch.int32)
    r.copy_(bits)  # the lower half
    w.view(torch.int16).copy_((bits + 2**15).bitwise_right_shift_(16))
