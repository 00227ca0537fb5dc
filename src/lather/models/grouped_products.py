"""Multiplies rows that are grouped by expert with the matrix of their expert.

`F.grouped_mm` is used where it is correct and fast: in bf16 on CUDA (compute capabilities 9 and 10;
for others it loops over experts and waits for the device), and in fp32, fp16 and bf16 on CPU, for
matrices whose rows are a multiple of 16 bytes. Otherwise a loop over experts is used, which reads
`end_E` on the host. Weight gradients in fp32 of rows in 16 bits have a kernel of their own on a GPU
(`lather.kernels.grouped_weight_gradient`): that of `F.grouped_mm` rounds them.

Letters: G rows grouped by expert, E experts, I input and O output size. `end_E` (int32) has the end
of each expert's rows, including their padding. Rows from the last end on have no expert: they are
neither read nor written, so results are undefined there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.device import Read, gpu_module, is_gpu, read
from lather.kernels.backend import use_triton
from lather.kernels.gather import padded_index_gather
from lather.kernels.grouped_weight_gradient import outer_product_sums
from lather.shapes import Float, Int

GROUPED_MM_MAJORS = (9, 10)
"""Compute capabilities for which torch has a grouped kernel."""
ROW_BYTES = 16
"""grouped_mm needs each row of a matrix, and on CUDA the start of each expert's rows, at a multiple
of this number of bytes."""


def run_alignment(device: torch.device, dtype: torch.dtype) -> int:
    """Return the multiple to which the number of an expert's rows must be padded, so that
    `F.grouped_mm` can contract over rows."""
    return ROW_BYTES // dtype.itemsize if is_gpu(device) and dtype == torch.bfloat16 else 1


def grouped_linear(
    x_GI: Float[Tensor, "g i"], weight_EOI: Float[Tensor, "e o i"], end_E: Int[Tensor, " e"]
) -> Float[Tensor, "g o"]:
    """Compute x W_e^T for the rows of each expert e."""
    return grouped_linear_transposed(x_GI, weight_EOI.transpose(1, 2), end_E)


def grouped_linear_transposed(
    g_GO: Float[Tensor, "g o"], weight_EOI: Float[Tensor, "e o i"], end_E: Int[Tensor, " e"]
) -> Float[Tensor, "g i"]:
    """Compute g W_e for the rows of each expert e: the gradient of the rows in `grouped_linear`."""
    if _sound(g_GO) and _sound(weight_EOI):
        return F.grouped_mm(g_GO, weight_EOI, offs=end_E)
    out_GI = g_GO.new_empty(len(g_GO), weight_EOI.shape[2])
    for expert, rows in _runs(end_E):
        torch.mm(g_GO[rows], weight_EOI[expert], out=out_GI[rows])
    return out_GI


def grouped_weight_gradient(
    g_GO: Float[Tensor, "g_or_r o"],
    x_GI: Float[Tensor, "g_or_s i"],
    end_E: Int[Tensor, " e"],
    *,
    g_rows: Int[Tensor, " g"] | None = None,
    x_rows: Int[Tensor, " g"] | None = None,
    dtype: torch.dtype | None = None,
    total: Float[Tensor, "e o i"] | None = None,
) -> Float[Tensor, "e o i"]:
    """Compute g_e^T x_e over the rows of each expert e, in the dtype of g: the gradient of the
    weights in `grouped_linear`; 0 for experts without rows.

    On a GPU the gradient of a weight that accumulates in fp32 is not rounded to 16 bits: it is in
    fp32, and is added to `total`, which is then returned, by the kernel that computes it. On a CPU
    it is in the dtype of g, and `total` is not used.

    Args:
        g_rows: the row of g of each of the G rows, -1 for a row of zeros; None: g has the G rows.
        x_rows: the same of x.
        dtype: in which the gradient of the weights accumulates; None: that of g.
        total: the sum of earlier gradients, contiguous.
    """
    x_GI = x_GI.to(g_GO.dtype)
    g_GO = g_GO if g_rows is None else rows_of(g_GO, g_rows)
    x_GI = x_GI if x_rows is None else rows_of(x_GI, x_rows)
    if dtype == torch.float32 and g_GO.dtype.itemsize == 2 and use_triton(g_GO):
        return outer_product_sums(g_GO, x_GI, end_E, total)
    if _sound(g_GO) and _sound(x_GI):
        return _zeros_for_idle(F.grouped_mm(g_GO.T, x_GI, offs=end_E), end_E)
    out_EOI = g_GO.new_zeros(len(end_E), g_GO.shape[1], x_GI.shape[1])
    for expert, rows in _runs(end_E):
        torch.mm(g_GO[rows].T, x_GI[rows], out=out_EOI[expert])
    return out_EOI


def rows_of(x_RI: Float[Tensor, "r i"], row_G: Int[Tensor, " g"]) -> Float[Tensor, "g i"]:
    """Return the rows with these numbers, without a check; zeros for -1."""
    return padded_index_gather(x_RI, row_G, 1, checked=False)


def _zeros_for_idle(out_EOI: Tensor, end_E: Tensor) -> Tensor:
    """Set the gradients of experts without rows to 0; the kernel for compute capability 10 leaves
    them unwritten."""
    if not is_gpu(out_EOI) or gpu_module(out_EOI).get_device_capability(out_EOI.device) < (10, 0):
        return out_EOI
    num_E = end_E.diff(prepend=end_E.new_zeros(1))
    return out_EOI.masked_fill_((num_E == 0)[:, None, None], 0)


def grouped_sum(x_GI: Float[Tensor, "g i"], end_E: Int[Tensor, " e"]) -> Float[Tensor, "e i"]:
    """Sum each expert's rows in fp32 or wider, row after row, so that a GPU gives the same bits
    each time."""
    offsets = F.pad(end_E.long(), (1, 0))
    wide_GI = x_GI.to(torch.promote_types(x_GI.dtype, torch.float32)).contiguous()
    # unsafe: no check that waits
    return torch.segment_reduce(wide_GI, "sum", offsets=offsets, axis=0, unsafe=True)


def expert_of_row(end_E: Int[Tensor, " e"], num_rows: int) -> Int[Tensor, " g"]:
    """Return the expert of each row; E for rows without an expert."""
    return torch.searchsorted(
        end_E, torch.arange(num_rows, dtype=end_E.dtype, device=end_E.device), right=True
    )


def _runs(end_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with these rows."""
    start = 0
    for expert, end in enumerate(read(end_E, Read.ENDS).tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _sound(operand: Tensor) -> bool:
    """Tell whether `F.grouped_mm` supports this operand, which must not be empty."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    if is_gpu(operand):
        major, _ = gpu_module(operand.device).get_device_capability(operand.device)
        dtypes = [torch.bfloat16] if major in GROUPED_MM_MAJORS else []
    strides = sorted(operand.stride()[-2:])
    aligned = strides[0] == 1 and strides[1] * operand.element_size() % ROW_BYTES == 0
    return operand.dtype in dtypes and aligned and operand.numel() > 0
