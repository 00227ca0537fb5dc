"""Matrices in FP8 with block scales in torch: the specification, and the emulation on a CPU. The
host reads the ends of the experts' rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.device import Read, read
from lather.kernels.backend import blocks

BLOCK = 128
"""Elements of a block in each direction."""
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value in e4m3."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal number in fp32."""
ELEMENTS = 2**20
"""Elements of rows that are converted at a time."""


def scale_rows(x_RN: Tensor, values_RN: Tensor, scales_RB: Tensor) -> None:
    num_blocks, num_columns = scales_RB.shape[1], x_RN.shape[1]
    for rows in blocks(x_RN, ELEMENTS):
        wide_RN = F.pad(x_RN[rows].float(), (0, num_blocks * BLOCK - num_columns))
        wide_RBI = wide_RN.view(-1, num_blocks, BLOCK)
        scales_RB[rows] = _scale(wide_RBI.abs().amax(-1))
        scaled_RN = (wide_RBI / scales_RB[rows, :, None]).flatten(1)
        values_RN[rows] = scaled_RN[:, :num_columns].to(DTYPE)


def scale_weights(weight_EOI: Tensor, values_EOI: Tensor, scales_EPQ: Tensor) -> None:
    sizes = weight_EOI.shape[1:]
    down, across = scales_EPQ.shape[1:]
    padding = (0, across * BLOCK - sizes[1], 0, down * BLOCK - sizes[0])
    for weight_OI, values_OI, scales_PQ in zip(weight_EOI, values_EOI, scales_EPQ, strict=True):
        wide_OI = F.pad(weight_OI.to(torch.bfloat16).float(), padding)
        wide_PJQI = wide_OI.view(down, BLOCK, across, BLOCK)
        scales_PQ.copy_(_scale(wide_PJQI.abs().amax((1, 3))))
        scaled_OI = (wide_PJQI / scales_PQ[:, None, :, None]).view(wide_OI.shape)
        values_OI.copy_(scaled_OI[: sizes[0], : sizes[1]].to(DTYPE))


def unscale_rows(
    values_RN: Tensor, scales_RB: Tensor, row_G: Tensor | None, out_GN: Tensor
) -> None:
    for rows in blocks(out_GN, ELEMENTS):
        numbers = rows if row_G is None else row_G[rows]
        wide_GN, scale_GB = _rows(values_RN, scales_RB, numbers)
        scale_GN = scale_GB.repeat_interleave(BLOCK, dim=1)[:, : wide_GN.shape[1]]
        out_GN[rows] = wide_GN.mul_(scale_GN).to(out_GN.dtype)


def grouped_product(
    values_RN: Tensor,
    scales_RB: Tensor,
    row_G: Tensor | None,
    weight_EOI: Tensor,
    scales_EPQ: Tensor,
    end_E: Tensor,
    out_GM: Tensor,
    transposed: bool,
) -> None:
    if transposed:
        weight_EOI, scales_EPQ = weight_EOI.mT, scales_EPQ.mT
    num_columns, start = out_GM.shape[1], 0
    for expert, end in enumerate(read(end_E, Read.ENDS).tolist()):
        if end > start:
            here = slice(start, end)
            x_GN, scale_GB = _rows(values_RN, scales_RB, here if row_G is None else row_G[here])
            weight_MN = weight_EOI[expert].float()
            scale_MB = scales_EPQ[expert].repeat_interleave(BLOCK, dim=0)[:num_columns]
            total_GM = torch.zeros_like(out_GM[here], dtype=torch.float32)
            for block in range(scale_GB.shape[1]):
                inside = slice(block * BLOCK, (block + 1) * BLOCK)
                product_GM = x_GN[:, inside] @ weight_MN[:, inside].mT
                total_GM += product_GM * (scale_GB[:, block, None] * scale_MB[:, block])
            out_GM[here] = total_GM.to(out_GM.dtype)
        start = end


def _scale(largest: Tensor) -> Tensor:
    return (largest / LARGEST).clamp_(min=SMALLEST_SCALE)


def _rows(values_RN: Tensor, scales_RB: Tensor, numbers: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Return the values of rows in fp32, and their scales; zeros for -1."""
    if isinstance(numbers, slice):
        return values_RN[numbers].float(), scales_RB[numbers]
    row_G, missing_G1 = numbers.clamp(min=0), (numbers < 0).unsqueeze(1)
    values, scales = values_RN.index_select(0, row_G).float(), scales_RB.index_select(0, row_G)
    return values.masked_fill_(missing_G1, 0), scales.masked_fill_(missing_G1, 0)
