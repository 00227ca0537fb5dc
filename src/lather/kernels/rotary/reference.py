"""The rotation of rotary position embedding in torch's own operations: the specification of the
kernel.

    (x, y) -> (x cos - y sin, x sin + y cos)    and with -sin for the inverse

Letters: B sequences, S positions, H heads, R rotary width of a head, P = R / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn(
    x_BSHR: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, *, halves: bool, back: bool = False
) -> Tensor:
    """Rotate the pairs (x_i, x_P+i) if `halves`, otherwise (x_2i, x_2i+1); with `back`, by the
    negative angle."""
    wide_BSHR = x_BSHR.to(torch.promote_types(x_BSHR.dtype, cos_BSP.dtype))
    x, y = wide_BSHR.chunk(2, dim=-1) if halves else wide_BSHR.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_BSP.unsqueeze(-2), sin_BSP.unsqueeze(-2)
    turned = (
        (x * cos + y * sin, y * cos - x * sin) if back else (x * cos - y * sin, x * sin + y * cos)
    )
    joined = torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)
    return joined.to(x_BSHR.dtype)
