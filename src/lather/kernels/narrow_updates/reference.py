"""The change of fp32 weights by bf16 updates in torch: the specification. Products of fp32 numbers
are exact in fp64, so that each sum is rounded once, as by a fused multiply-add."""

from __future__ import annotations

from ctypes import c_float

import torch
from torch import Tensor


def change_by_(w: Tensor, u: Tensor, decay: float, lr: float) -> None:
    wide = w.double()
    sums = torch.add(u.double(), wide, alpha=c_float(decay / lr).value).float()
    w.copy_(wide.sub_(sums.double(), alpha=c_float(lr).value))
