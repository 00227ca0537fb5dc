"""Indices of an expert exchange in plain torch: the specification of triton.py, and the
implementation for CPUs.

Letters: T tokens of this rank, R rows that it receives, S rows that it sends, U = T * min(K, P)
rows that it could send, K experts per token, P ranks (with padding one more, to which it goes and
whose rows come last), N experts on a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import wide_dtype
from lather.kernels.route.reference import check_range


def plan_rows(
    experts_TK: Tensor, num_local_experts: int, num_ranks: int, padded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_range(experts_TK, -1 if padded else 0, num_local_experts * num_ranks, name="experts_TK")
    (t, k), p, device = experts_TK.shape, num_ranks, experts_TK.device
    rank_TK = experts_TK.long() // num_local_experts
    if padded:
        rank_TK, p = rank_TK.masked_fill(experts_TK < 0, p), p + 1
    slot_TK = torch.arange(k, device=device).expand(t, k)
    first_TP = slot_TK.new_full((t, p), k).scatter_reduce(1, rank_TK, slot_TK, "amin")
    goes_TP = first_TP < k
    row_TP = (goes_TP.T.flatten().cumsum(0) - 1).view(p, t).T
    row_TK, is_first_TK = row_TP.gather(1, rank_TK), first_TP.gather(1, rank_TK) == slot_TK
    u = t * min(k, num_ranks)
    # the last entry takes the slots without a row of their own, and padding what is left
    place_TK = torch.where(is_first_TK, row_TK, u).clamp_(max=u)
    token_T1 = torch.arange(t, dtype=torch.int32, device=device).unsqueeze(1)
    token_U = token_T1.new_empty(u + 1)
    token_U.scatter_(0, place_TK.flatten(), token_T1.expand(t, k).flatten())
    row_TK = torch.where(is_first_TK, row_TK, ~row_TK).int()
    if padded:
        row_TK.masked_fill_(experts_TK < 0, -1)

    pairs_P = torch.zeros(p, dtype=torch.int64, device=device)
    pairs_P.scatter_add_(0, rank_TK.flatten(), torch.ones_like(rank_TK.flatten()))
    sizes_2P2 = pairs_P.new_empty(2, num_ranks, 2)
    sizes_2P2[0, :, 0] = goes_TP.sum(0)[:num_ranks]
    sizes_2P2[0, :, 1] = pairs_P[:num_ranks]
    return sizes_2P2, row_TK, token_U[:u]


def pack_routing(
    experts_TK: Tensor,
    weights_TK: Tensor,
    token_S: Tensor,
    row_TK: Tensor,
    num_local_experts: int,
) -> Tensor:
    wide = wide_dtype(weights_TK)
    bits = torch.int64 if wide.itemsize == 8 else torch.int32
    row_S1 = torch.arange(len(token_S), dtype=row_TK.dtype, device=row_TK.device).unsqueeze(1)
    is_local_SK = _row_of_slot(row_TK).index_select(0, token_S) == row_S1
    experts_SK = experts_TK.index_select(0, token_S) % num_local_experts
    weights_SK = weights_TK.index_select(0, token_S).to(wide)
    return torch.cat(
        [
            torch.where(is_local_SK, experts_SK, -1).to(bits),
            torch.where(is_local_SK, weights_SK, 0).view(bits),
        ],
        dim=1,
    )


def unpack_routing(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    experts_RK, bits_RK = (
        half.clone(memory_format=torch.contiguous_format) for half in packed.chunk(2, dim=1)
    )
    wide = torch.float64 if packed.dtype == torch.int64 else torch.float32
    return experts_RK.long(), bits_RK.view(wide).to(dtype)


def slots_from_sent(value_SK: Tensor, row_TK: Tensor) -> Tensor:
    if not len(value_SK):  # all tokens are padding
        return value_SK.new_zeros(row_TK.shape)
    return value_SK.gather(0, _row_of_slot(row_TK).long())


def _row_of_slot(row_TK: Tensor) -> Tensor:
    """Return the row of every slot; 0 for padding."""
    return torch.where(row_TK < 0, ~row_TK, row_TK)
