"""The weighted sum of each token's rows: the specification of triton.py, and the implementation for
CPUs.

Letters: T tokens, K slots, N = T * K pairs, G rows, D columns, B tokens of one block, R tokens or
rows. A row of -1 contributes nothing. Sums are computed in fp32 (fp64 for fp64), in the order of
the slots.

No (T, K, D) tensor is created: `embedding_bag` adds while it reads, which is at least ten times
faster than (rows[row_TK] * weights).sum(1) (fp32, T 1024, K 6, D 2048). It takes weights in the
dtype of the rows only, which would round them for bf16 rows: such rows are converted to fp32 and
summed in blocks of tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.device import Read, is_gpu, is_true, masked
from lather.kernels.backend import blocks, wide_dtype

BLOCK = 2**17
"""Elements of one block of tokens or rows."""


def combine_forward(rows_GD: Tensor, row_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    wide = wide_dtype(rows_GD)
    if weights_TK is None or rows_GD.dtype == wide:
        return _bags(rows_GD, row_TK, weights_TK)
    out_TD = rows_GD.new_zeros(len(row_TK), rows_GD.shape[1])
    if len(rows_GD) == 0:
        return out_TD
    for block in blocks(out_TD, BLOCK):
        total = out_TD[block].to(wide)
        for row_B, weight_B in zip(
            row_TK[block].unbind(1), weights_TK[block].unbind(1), strict=True
        ):
            picked = rows_GD.index_select(0, row_B.clamp(min=0)).to(wide)
            picked.masked_fill_((row_B < 0).unsqueeze(1), 0)  # row 0 may hold NaN
            total.addcmul_(picked, weight_B.to(wide).unsqueeze(1))
        out_TD[block] = total
    return out_TD


def combine_backward(
    grad_TD: Tensor, rows_GD: Tensor, row_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    if len(row_TK) == 0:
        return torch.zeros_like(rows_GD, memory_format=torch.contiguous_format), torch.zeros_like(
            weights_TK
        )
    wide = wide_dtype(rows_GD)
    pair_G = pair_of_row(row_TK, len(rows_GD))
    grad_rows_GD = torch.empty_like(rows_GD, memory_format=torch.contiguous_format)
    dot = weights_TK.new_zeros(
        row_TK.numel() + 1, dtype=wide
    )  # the last entry is for rows without pair
    weight = torch.cat([weights_TK.flatten().to(wide), dot[-1:]])
    for block in blocks(rows_GD, BLOCK):
        pair = pair_G[block]
        missing = (pair < 0).unsqueeze(1)
        grad = grad_TD.index_select(0, pair.clamp(min=0) // row_TK.shape[1]).to(wide)
        dot[pair] = torch.linalg.vecdot(grad, rows_GD[block].to(wide))
        grad_rows_GD[block] = grad.mul_(weight[pair].unsqueeze(1)).masked_fill_(missing, 0)
    return grad_rows_GD, dot[:-1].view_as(weights_TK).to(weights_TK.dtype)


def pair_of_row(row_TK: Tensor, num_rows: int) -> Tensor:
    """Return for each row its (token, slot) pair as token * K + slot, or -1 if it has none."""
    pair = torch.full(
        (num_rows + 1,), -1, dtype=torch.int64, device=row_TK.device
    )  # the last entry is for pairs without row
    pair[torch.where(row_TK < 0, num_rows, row_TK).flatten()] = torch.arange(
        row_TK.numel(), device=row_TK.device
    )
    return pair[:num_rows]


def check_distinct(row_TK: Tensor, num_rows: int) -> None:
    pair = pair_of_row(row_TK, num_rows)
    row_N = row_TK.flatten()
    lost = (
        ((row_N >= 0) & (pair[row_N] != torch.arange(len(row_N), device=row_N.device)))
        if num_rows
        else row_N >= 0
    )
    if is_gpu(
        row_TK
    ):  # without Triton: torch's own gather asserts on the device that the index is in range
        torch.zeros((), device=row_TK.device).expand(1).index_select(0, lost.long())
    elif is_true(lost.any(), Read.WRONG):
        raise ValueError(
            f"row_TK holds {int(row_N[lost][0])} twice: a row belongs to one (token, slot) at "
            "most; copy it for each of them"
        )


def _bags(rows_GD: Tensor, row_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Return the sum of each token's rows, which form one bag of `embedding_bag`."""
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
