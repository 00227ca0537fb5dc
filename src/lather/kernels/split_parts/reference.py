"""The parts of a matrix in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def split_parts(x: Tensor, hi: Tensor, mid: Tensor) -> None:
    hi.copy_(x)
    torch.sub(x, hi, out=mid)
