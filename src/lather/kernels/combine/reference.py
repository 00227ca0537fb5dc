"""The weighted sum of each token's rows: the specification of triton.py, and the implementation for
CPUs.

Letters: T tokens, K slots, G rows, D columns, B tokens of one block. A row of -1 contributes
nothing. Sums are computed in fp32 (fp64 for fp64), in the order of the slots.

No (T, K, D) tensor is created: `embedding_bag` adds while it reads, which is at least ten times
faster than (rows[row_TK] * weights).sum(1) (fp32, T 1024, K 6, D 2048). It takes weights in the
dtype of the rows only, which would round them for bf16 rows: such rows are converted to fp32 and
summed in blocks of tokens.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.device import Read, masked
from lather.kernels.backend import blocks, wide_dtype

BLOCK = 2**17
"""Elements of a block of tokens."""


def combine_forward(rows_GD: Tensor, row_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    wide = wide_dtype(rows_GD)
    if weights_TK is None or rows_GD.dtype == wide:
        return _bags(rows_GD, row_TK, weights_TK)
    out_TD = rows_GD.new_zeros(len(row_TK), rows_GD.shape[1])
    if len(rows_GD) == 0:
        return out_TD
    for block in blocks(out_TD, BLOCK):
        total = out_TD[block].to(wide)
        slots = zip(row_TK[block].unbind(1), weights_TK[block].unbind(1), strict=True)
        for row_B, weight_B in slots:
            picked = rows_GD.index_select(0, row_B.clamp(min=0)).to(wide)
            picked.masked_fill_((row_B < 0).unsqueeze(1), 0)  # row 0 may hold NaN
            total.addcmul_(picked, weight_B.to(wide).unsqueeze(1))
        out_TD[block] = total
    return out_TD


def _bags(rows_GD: Tensor, row_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Return the sum of each token's rows, a bag of `embedding_bag`."""
    if len(rows_GD) == 0 or row_TK.numel() == 0:
        return rows_GD.new_zeros(len(row_TK), rows_GD.shape[1])
    has_row = row_TK >= 0
    num_T = has_row.sum(1)
    weights = None
    if weights_TK is not None:
        weights = masked(weights_TK, has_row, Read.PAIRS).to(rows_GD.dtype)
    return F.embedding_bag(
        masked(row_TK, has_row, Read.PAIRS),
        rows_GD.contiguous(),
        num_T.cumsum(0) - num_T,
        per_sample_weights=weights,
        mode="sum",
    )
