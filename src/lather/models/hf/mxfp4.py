"""Converts MXFP4 weights, blocks of 32 four-bit floats with a common power of two, to ordinary
numbers.

Source: OCP Microscaling Formats (MX) v1.0, elements E2M1, scales E8M0, in the layout of the
published GPT-OSS weights: two elements per byte, the first in the low half; the exponent of the
scale is biased by 127.

Letters: R rows, G blocks per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.shapes import Float

BLOCK = 32
"""Number of elements that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the sixteen elements: sign, two bits of exponent, one of mantissa."""


def dequantize_mxfp4(blocks_RGb: Tensor, scales_RG: Tensor) -> Float[Tensor, "r c"]:
    """Convert uint8 blocks (R, G, 16) and scales (R, G) to (R, 32 G) fp32 values, which are exact
    in bf16, too. A scale of 255 means NaN."""
    table = torch.tensor(VALUES, device=blocks_RGb.device)
    elements = torch.stack((blocks_RGb & 15, blocks_RGb >> 4), dim=-1).flatten(-2)
    scale_RG = scales_RG.view(torch.float8_e8m0fnu).to(torch.float32)
    return (table[elements.int()] * scale_RG.unsqueeze(-1)).flatten(-2)
