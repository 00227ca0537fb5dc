"""Routing indices in plain torch: the specification of triton.py, and the implementation for CPUs.

Letters: T tokens, K slots (experts per token), N = T * K pairs, E experts, G rows. The expert ids
are sorted once, by a stable sort; the host does not wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.device import Read, is_gpu, read


def rows_for(
    experts_TK: Tensor, num_experts: int, alignment: int, num_pairs: int | None = None
) -> int:
    """Return G, the largest number of rows that `num_pairs` of the pairs (None: all of them) can
    need, however the router distributes them. It is at least 1 if there are pairs, so that masked
    reads of row 0 work."""
    all_pairs = experts_TK.numel()
    most = all_pairs if num_pairs is None else max(num_pairs, min(1, all_pairs))
    if alignment == 1:
        return most
    return -(-(most + num_experts * (alignment - 1)) // alignment) * alignment


def plan_route(
    experts_TK: Tensor, num_experts: int, alignment: int, num_pairs: int | None = None
) -> tuple[Tensor, ...]:
    check_range(experts_TK, -1, num_experts, "experts_TK")
    t, k = experts_TK.shape
    g, device = rows_for(experts_TK, num_experts, alignment, num_pairs), experts_TK.device
    # pairs without row form an additional last run
    expert_N = torch.where(experts_TK < 0, num_experts, experts_TK).flatten()
    pair_N = expert_N.argsort(stable=True)
    sorted_N = expert_N[pair_N]
    count = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, expert_N, torch.ones_like(expert_N)
    )
    padded = (count + alignment - 1) // alignment * alignment
    rank_N = torch.arange(t * k, device=device) - (count.cumsum(0) - count)[sorted_N]
    row_N = ((padded.cumsum(0) - padded)[sorted_N] + rank_N).masked_fill_(
        sorted_N == num_experts, -1
    )

    row = torch.empty_like(pair_N)
    row[pair_N] = row_N
    # the last entry is for pairs without row
    token = torch.full((g + 1,), -1, dtype=torch.int64, device=device)
    token[torch.where(row_N < 0, g, row_N)] = pair_N // max(k, 1)
    return (
        token[:g].clone(),
        row.view(t, k),
        count[:num_experts],
        padded[:num_experts].cumsum(0).to(torch.int32),
    )


def check_range(index: Tensor, low: int, high: int, name: str) -> None:
    if index.numel() == 0:
        return
    # without Triton: torch's own gather asserts on the device that the index is in range
    if is_gpu(index):
        torch.zeros((), device=index.device).expand(high - low).index_select(
            0, index.flatten() - low
        )
        return
    smallest, largest = read(torch.stack(index.aminmax()), Read.RANGE).tolist()
    if smallest < low or largest >= high:
        wrong = smallest if smallest < low else largest
        raise ValueError(f"{name} holds {wrong}: every entry has to be in [{low}, {high})")


def rows_from_slots(value_TK: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    place_TK = torch.where(row_TK < 0, num_rows, row_TK).flatten()
    value_G = value_TK.new_zeros(num_rows + 1)
    return value_G.index_copy_(0, place_TK, value_TK.flatten())[:num_rows]


def slots_from_rows(value_G: Tensor, row_TK: Tensor) -> Tensor:
    if not len(value_G):
        return value_G.new_zeros(row_TK.shape)
    picked = value_G.index_select(0, row_TK.clamp(min=0).flatten()).view(row_TK.shape)
    return picked.masked_fill(row_TK < 0, 0)
