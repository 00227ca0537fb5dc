"""Gathering of rows by an index, and its adjoint: the specification of triton.py, and the
implementation for CPUs.

Letters: N rows of the source, D columns, G picked rows. An index of -1 picks a row of zeros and
drops that row's gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.device import Read, is_gpu, is_true


def gather_rows(x_ND: Tensor, index_G: Tensor, num_rows: int | None = None) -> Tensor:
    """Return x[index] in the first G of `num_rows` rows (None: G); the others are zero."""
    picked = len(index_G)
    out = x_ND.new_empty((picked if num_rows is None else num_rows, x_ND.shape[1]))
    out[picked:] = 0
    if len(x_ND) == 0:
        return out.zero_()
    missing = index_G < 0
    torch.index_select(x_ND, 0, index_G.clamp(min=0), out=out[:picked])
    # On a GPU the check would wait for the device.
    if is_gpu(index_G) or is_true(missing.any(), Read.WRONG):
        out[:picked].masked_fill_(missing.unsqueeze(1), 0)
    return out


def add_rows(grad_GD: Tensor, index_G: Tensor, num_rows: int) -> Tensor:
    """Return the adjoint: row n is the sum of the rows with index n, added in order, in fp32 (fp64
    for fp64), and rounded once."""
    if len(grad_GD) == 0:
        return grad_GD.new_zeros(num_rows, grad_GD.shape[1])
    order = index_G.argsort(stable=True)
    places = torch.arange(-1, num_rows, dtype=index_G.dtype, device=index_G.device)
    start_N = torch.searchsorted(index_G[order], places)
    # The first bag has the dropped rows, then there is one per source row. Bags are several times
    # faster than index_add_ or a loop.
    return F.embedding_bag(order, grad_GD.contiguous(), start_N, mode="sum")[1:]
