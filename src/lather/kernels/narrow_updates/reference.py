"""The change of fp32 weights by bf16 updates in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def change_by_(w: Tensor, u: Tensor, decay: float, lr: float) -> None:
    wide = w.double()
    sums = torch.add(u.double(), wide, alpha=decay / lr).float()
    w.copy_(wide.sub_(sums.double(), alpha=lr))
