"""Products of rows grouped by expert with one matrix per expert.

`F.grouped_mm` does them where it is sound: in bf16 on CUDA (compute capabilities 9 and 10; for all others it loops over experts itself, and
waits for the runs' ends), in fp32, fp16 and bf16 on CPU, with matrices whose rows are a multiple of 16 bytes. Elsewhere a loop over experts
does, which has to read the runs' ends on the host.

Letters: G rows grouped by expert, E experts, I input and O output size. `end_E` (int32) is where each expert's run ends, padding included.
Rows from the last end on belong to nobody: they are neither read nor written, so results are undefined there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.device import gpu_module, is_gpu
from lather.shapes import Float, Int

GROUPED_MM_MAJORS = (9, 10)
"""Compute capabilities for which torch has a grouped kernel."""
ROW_BYTES = 16
"""grouped_mm wants every row of a matrix, and on CUDA the start of every run, at a multiple of this."""


def run_alignment(device: torch.device, dtype: torch.dtype) -> int:
    """Rows that an expert's run should be padded to a multiple of, so that `F.grouped_mm` can contract over rows."""
    return ROW_BYTES // dtype.itemsize if is_gpu(device) and dtype == torch.bfloat16 else 1


def grouped_linear(x_GI: Float[Tensor, "g i"], weight_EOI: Float[Tensor, "e o i"], end_E: Int[Tensor, " e"]) -> Float[Tensor, "g o"]:
    """x W_e^T for the rows of each expert e."""
    return _rows_times(x_GI, weight_EOI.transpose(1, 2), end_E)


def grouped_linear_transposed(
    g_GO: Float[Tensor, "g o"], weight_EOI: Float[Tensor, "e o i"], end_E: Int[Tensor, " e"]
) -> Float[Tensor, "g i"]:
    """g W_e for the rows of each expert e: what `grouped_linear` sends back to its rows."""
    return _rows_times(g_GO, weight_EOI, end_E)


def grouped_weight_gradient(g_GO: Float[Tensor, "g o"], x_GI: Float[Tensor, "g i"], end_E: Int[Tensor, " e"]) -> Float[Tensor, "e o i"]:
    """g_e^T x_e over the rows of each expert e, 0 where there are none: what `grouped_linear` sends back to its weights."""
    if _sound(g_GO, x_GI):
        return _zeros_for_idle(F.grouped_mm(g_GO.T, x_GI, offs=end_E), end_E)
    out_EOI = g_GO.new_zeros(len(end_E), g_GO.shape[1], x_GI.shape[1])
    for expert, rows in _runs(end_E):
        torch.mm(g_GO[rows].T, x_GI[rows], out=out_EOI[expert])
    return out_EOI


def _zeros_for_idle(out_EOI: Tensor, end_E: Tensor) -> Tensor:
    """0 for experts without rows, of which the kernel for compute capability 10 writes nothing."""
    if not is_gpu(out_EOI) or gpu_module(out_EOI).get_device_capability(out_EOI.device) < (10, 0):
        return out_EOI
    num_E = end_E.diff(prepend=end_E.new_zeros(1))
    return out_EOI.masked_fill_((num_E == 0)[:, None, None], 0)


def grouped_sum(x_GI: Float[Tensor, "g i"], end_E: Int[Tensor, " e"]) -> Float[Tensor, "e i"]:
    """The sum of each expert's rows, in fp32 or wider; row after row, so that a GPU gives the same bits each time."""
    offsets = F.pad(end_E.long(), (1, 0))
    wide_GI = x_GI.to(torch.promote_types(x_GI.dtype, torch.float32)).contiguous()
    sums_EI: Tensor = torch.segment_reduce(wide_GI, "sum", offsets=offsets, axis=0, unsafe=True)  # unsafe: without waiting for a check
    return sums_EI


def expert_of_row(end_E: Int[Tensor, " e"], num_rows: int) -> Int[Tensor, " g"]:
    """The expert that each row belongs to, E for rows that belong to nobody."""
    return torch.searchsorted(end_E, torch.arange(num_rows, dtype=end_E.dtype, device=end_E.device), right=True)


def _rows_times(x_GI: Tensor, matrix_EIO: Tensor, end_E: Tensor) -> Tensor:
    if _sound(x_GI, matrix_EIO):
        return F.grouped_mm(x_GI, matrix_EIO, offs=end_E)
    out_GO = x_GI.new_empty(len(x_GI), matrix_EIO.shape[2])
    for expert, rows in _runs(end_E):
        torch.mm(x_GI[rows], matrix_EIO[expert], out=out_GO[rows])
    return out_GO


def _runs(end_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and which."""
    start = 0
    for expert, end in enumerate(end_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _sound(*operands: Tensor) -> bool:
    """Whether `F.grouped_mm` takes these operands; none may be empty."""
    return all(_operand_is_sound(operand) for operand in operands)


def _operand_is_sound(operand: Tensor) -> bool:
    dtypes: tuple[torch.dtype, ...]
    if is_gpu(operand):
        major, _ = gpu_module(operand.device).get_device_capability(operand.device)
        dtypes = (torch.bfloat16,) if major in GROUPED_MM_MAJORS else ()
    else:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
    strides = sorted(operand.stride()[-2:])
    aligned = strides[0] == 1 and strides[1] * operand.element_size() % ROW_BYTES == 0
    return operand.dtype in dtypes and aligned and operand.numel() > 0
