"""Routing indices on CUDA: a stable counting sort in three kernels, without atomics; the host
does not wait for the device.

1. histogram   each block of BLOCK_N pairs counts its pairs per expert: count_EP (P blocks); it
               asserts that they are in range, and writes "no token" to its share of the rows
2. scan        one program per expert turns its P counts into "pairs of this expert in earlier
               blocks", and their sum into count_E
3. scatter     each block computes start + earlier blocks + rank within the block for its pairs, and
               writes the two permutations. Starts are cumulative sums of the counts, rounded up to
               the alignment, which every block computes; the first writes the ends

The rank of a pair within its block is the number of earlier pairs with the same expert: BLOCK_N^2
comparisons, which are less work than a sort at this size and keep (token, slot) order. Values move
between rows and slots in a kernel for each direction. Letters: N =
T * K pairs, E experts, P blocks of pairs.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch
from lather.kernels.route.reference import rows_for

BLOCK_N = 128
BLOCK_E = 64
BLOCK_P = 1024


def plan_route(
    experts_TK: Tensor, num_experts: int, alignment: int, num_pairs: int | None = None
) -> tuple[Tensor, ...]:
    experts_TK = experts_TK.contiguous()
    token_G = experts_TK.new_empty(rows_for(experts_TK, num_experts, alignment, num_pairs))
    num_pairs, num_slots = experts_TK.numel(), experts_TK.shape[1]
    num_blocks = triton.cdiv(max(num_pairs, 1), BLOCK_N)  # a block without pairs writes padding
    row_TK = torch.empty_like(experts_TK)
    count_E = experts_TK.new_empty(num_experts)
    end_E = torch.empty_like(count_E, dtype=torch.int32)
    count_EP = end_E.new_empty((num_experts, num_blocks))
    launch(
        _histogram_kernel,
        (num_blocks, triton.cdiv(num_experts, BLOCK_E)),
        experts_TK,
        count_EP,
        token_G,
        num_pairs,
        num_experts,
        num_blocks,
        len(token_G),
        BLOCK_N=BLOCK_N,
        BLOCK_E=BLOCK_E,
        sanitize_overflow=False,  # counts of pairs need no assertions
    )
    launch(_scan_kernel, (num_experts,), count_EP, count_E, num_blocks, BLOCK_P=BLOCK_P)
    launch(
        _scatter_kernel,
        (num_blocks,),
        experts_TK,
        count_EP,
        count_E,
        end_E,
        token_G,
        row_TK,
        num_pairs,
        num_blocks,
        num_experts,
        alignment,
        K=num_slots,
        BLOCK_N=BLOCK_N,
        BLOCK_E=BLOCK_E,
    )
    return token_G, row_TK, count_E, end_E


def check_range(index: Tensor, low: int, high: int, name: str) -> None:
    index = index.contiguous()
    launch(
        _check_kernel,
        (triton.cdiv(index.numel(), 1024),),
        index,
        index.numel(),
        low,
        high,
        NAME=name,
        BLOCK=1024,
    )


def rows_from_slots(value_TK: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    value_G = value_TK.new_zeros(num_rows)
    _move(_rows_kernel, value_TK.contiguous(), value_G, row_TK)
    return value_G


def slots_from_rows(value_G: Tensor, row_TK: Tensor) -> Tensor:
    value_TK = value_G.new_empty(row_TK.shape)
    _move(_slots_kernel, value_G.contiguous(), value_TK, row_TK)
    return value_TK


def _move(kernel: Any, source: Tensor, target: Tensor, row_TK: Tensor) -> None:
    num_pairs = row_TK.numel()
    grid = (triton.cdiv(num_pairs, BLOCK_P),)
    launch(kernel, grid, source, target, row_TK.contiguous(), num_pairs, BLOCK=BLOCK_P)


@triton.jit
def _rows_kernel(slot_value_ptr, row_value_ptr, row_ptr, num_pairs, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    row = tl.load(row_ptr + pair, mask=inside, other=-1)
    value = tl.load(slot_value_ptr + pair, mask=inside, other=0.0)
    tl.store(row_value_ptr + row, value, mask=row >= 0)


@triton.jit
def _slots_kernel(row_value_ptr, slot_value_ptr, row_ptr, num_pairs, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    row = tl.load(row_ptr + pair, mask=inside, other=-1)
    value = tl.load(row_value_ptr + row, mask=row >= 0, other=0.0)
    tl.store(slot_value_ptr + pair, value, mask=inside)


@triton.jit(debug=True)  # without debug the assertion is compiled away
def _histogram_kernel(
    expert_ptr,
    count_ptr,
    token_ptr,
    num_pairs,
    num_experts,
    num_blocks,
    num_rows,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    pair = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    id_N = tl.load(expert_ptr + pair, mask=pair < num_pairs, other=-1)
    in_range = (id_N >= -1) & (id_N < num_experts)
    tl.device_assert(in_range, "an entry of experts_TK is out of range")
    expert_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    count_E = tl.sum((id_N[None, :] == expert_E[:, None]).to(tl.int32), axis=1)
    tl.store(
        count_ptr + expert_E.to(tl.int64) * num_blocks + block, count_E, mask=expert_E < num_experts
    )
    if tl.program_id(1) == 0:
        for start in range(block * BLOCK_N, num_rows, num_blocks * BLOCK_N):
            row = start + tl.arange(0, BLOCK_N)
            no_token = tl.full((BLOCK_N,), -1, tl.int64)
            tl.store(token_ptr + row, no_token, mask=row < num_rows)


@triton.jit
def _scan_kernel(count_ptr, total_ptr, num_blocks, BLOCK_P: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    total = tl.zeros((), dtype=tl.int32)
    for start in range(0, num_blocks, BLOCK_P):
        block = start + tl.arange(0, BLOCK_P)
        count = tl.load(count_ptr + expert * num_blocks + block, mask=block < num_blocks, other=0)
        tl.store(
            count_ptr + expert * num_blocks + block,
            total + tl.cumsum(count, 0) - count,
            mask=block < num_blocks,
        )
        total += tl.sum(count, axis=0)
    tl.store(total_ptr + expert, total.to(tl.int64))


@triton.jit
def _scatter_kernel(
    expert_ptr,
    before_ptr,
    count_ptr,
    end_ptr,
    token_ptr,
    row_ptr,
    num_pairs,
    num_blocks,
    num_experts,
    alignment,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK_N)
    pair = block.to(tl.int64) * BLOCK_N + lane
    expert = tl.load(expert_ptr + pair, mask=pair < num_pairs, other=-1)
    id_N, has_row = expert.to(tl.int32), expert >= 0
    start = tl.zeros((BLOCK_N,), dtype=tl.int32)
    num_rows = tl.zeros((), dtype=tl.int32)
    for first in range(0, num_experts, BLOCK_E):
        expert_E = first + tl.arange(0, BLOCK_E)
        is_expert = expert_E < num_experts
        count = tl.load(count_ptr + expert_E, mask=is_expert, other=0).to(tl.int32)
        padded = (count + alignment - 1) // alignment * alignment
        end = num_rows + tl.cumsum(padded, 0)
        if block == 0:
            tl.store(end_ptr + expert_E, end, mask=is_expert)
        is_its = id_N[:, None] == expert_E[None, :]
        start += tl.sum(tl.where(is_its, (end - padded)[None, :], 0), axis=1)
        num_rows += tl.sum(padded, axis=0)
    same_and_earlier = (id_N[:, None] == id_N[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(same_and_earlier.to(tl.int32), axis=1)
    before = tl.load(before_ptr + expert * num_blocks + block, mask=has_row, other=0)
    row = (start + before + rank).to(tl.int64)
    tl.store(token_ptr + row, pair // K, mask=has_row)
    tl.store(row_ptr + pair, tl.where(has_row, row, -1), mask=pair < num_pairs)


@triton.jit(debug=True)  # without debug the assertion is compiled away
def _check_kernel(index_ptr, num_entries, low, high, NAME: tl.constexpr, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + entry, mask=entry < num_entries, other=low)
    tl.device_assert((index >= low) & (index < high), "an entry of " + NAME + " is out of range")
