"""Indices of an expert exchange on CUDA: two kernels before the host learns the numbers of rows;
then one packs what is sent beside the rows, one unpacks it where they arrive, and one gives the
gradients of weights back to their slots. No atomics are used. The first two:

1. count       each block of BLOCK_T tokens counts, for each rank, its tokens that go there and the
               pairs of these and the rank's experts: count_2PB
2. rows        each block adds up the counts before it, in the order (rank, block), which is where
               its rows for a rank begin, and writes its tokens' rows and its rows' tokens

Both compare the slots of a block's tokens with BLOCK_P ranks at a time; a program of its own does
it for further ranks. So the second reads P * B counts for each block: little, unless both the
tokens and the ranks are very many. Letters: see the package; B blocks of tokens; a tile is ROWS x
BLOCK."""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.backend import wide_dtype
from lather.kernels.launch import launch, tile, wide

BLOCK_T = 128
BLOCK_P = 8
BLOCK_B = 256
"""Counts that are added up at a time."""
TILE = 1024
"""Elements of a tile of rows or tokens."""


def plan_rows(
    experts_TK: Tensor, num_local_experts: int, num_ranks: int, padded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    experts_TK = experts_TK.contiguous()
    t, k = experts_TK.shape
    num_blocks = triton.cdiv(max(t, 1), BLOCK_T)  # a block without tokens writes sizes of 0
    row_TK = torch.empty_like(experts_TK, dtype=torch.int32)
    token_U = row_TK.new_empty(t * min(k, num_ranks))
    count_2PB = row_TK.new_empty((2, num_ranks, num_blocks))
    sizes_2P2 = experts_TK.new_empty((2, num_ranks, 2), dtype=torch.int64)
    sizes = {"K": k, "BLOCK_T": BLOCK_T, "BLOCK_P": min(BLOCK_P, triton.next_power_of_2(num_ranks))}
    grid = (num_blocks, triton.cdiv(num_ranks, sizes["BLOCK_P"]))
    numbers = (t, num_local_experts, num_ranks, num_blocks)
    # the numbers that are added are counts of tokens: their overflows need no assertions
    options = {"LOWEST": -1 if padded else 0, "sanitize_overflow": False}
    launch(_count_kernel, grid, experts_TK, count_2PB, *numbers, **sizes, **options)
    outputs = (sizes_2P2, row_TK, token_U)
    launch(_rows_kernel, grid, experts_TK, count_2PB, *outputs, *numbers, **sizes, BLOCK_B=BLOCK_B)
    return outputs


def pack_routing(
    experts_TK: Tensor,
    weights_TK: Tensor,
    token_S: Tensor,
    row_TK: Tensor,
    num_local_experts: int,
) -> Tensor:
    s, k = len(token_S), row_TK.shape[1]
    bits = torch.int64 if wide_dtype(weights_TK).itemsize == 8 else torch.int32
    packed = token_S.new_empty((s, 2 * k), dtype=bits)
    options = {"WIDE": wide(weights_TK), "K": k, **tile(k, TILE, whole_rows=True)}
    launch(
        _pack_kernel,
        (triton.cdiv(s, options["ROWS"]),),
        experts_TK.contiguous(),
        weights_TK.contiguous(),
        token_S,
        row_TK.contiguous(),
        packed,
        s,
        num_local_experts,
        **options,
    )
    return packed


def unpack_routing(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    packed = packed.contiguous()
    r, k = len(packed), packed.shape[1] // 2
    experts_RK = packed.new_empty((r, k), dtype=torch.int64)
    weights_RK = torch.empty_like(experts_RK, dtype=dtype)
    wide = tl.float64 if packed.dtype == torch.int64 else tl.float32
    options = {"WIDE": wide, "K": k, **tile(k, TILE, whole_rows=True)}
    grid = (triton.cdiv(r, options["ROWS"]),)
    launch(_unpack_kernel, grid, packed, experts_RK, weights_RK, r, **options)
    return experts_RK, weights_RK


def slots_from_sent(value_SK: Tensor, row_TK: Tensor) -> Tensor:
    (t, k), value_SK = row_TK.shape, value_SK.contiguous()
    value_TK = value_SK.new_empty((t, k))
    options = {"K": k, **tile(k, TILE, whole_rows=True)}
    grid = (triton.cdiv(t, options["ROWS"]),)
    launch(
        _slots_kernel, grid, value_SK, row_TK.contiguous(), value_TK, t, len(value_SK), **options
    )
    return value_TK


@triton.jit
def _rank(expert, num_local_experts):
    """Return the ranks of experts; -1 for no expert. Numbers of experts fit into 32 bits, whose
    division is much faster."""
    return tl.where(expert < 0, -1, expert.to(tl.int32) // num_local_experts)


@triton.jit(debug=True)  # without debug the assertion is compiled away
def _count_kernel(
    expert_ptr,
    count_ptr,
    num_tokens,
    num_local_experts,
    num_ranks,
    num_blocks,
    LOWEST: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    block = tl.program_id(0)
    token = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < num_tokens
    rank_P = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    goes_TP = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.int32)
    pairs_TP = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.int32)
    for k in tl.static_range(K):
        expert = tl.load(expert_ptr + token * K + k, mask=inside, other=-1)
        in_range = (expert >= LOWEST) & (expert < num_local_experts * num_ranks)
        tl.device_assert(in_range | (token >= num_tokens), "an entry of experts_TK is out of range")
        is_here_TP = (_rank(expert, num_local_experts)[:, None] == rank_P[None, :]).to(tl.int32)
        goes_TP |= is_here_TP
        pairs_TP += is_here_TP
    place_P = rank_P * num_blocks + block
    tl.store(count_ptr + place_P, tl.sum(goes_TP, axis=0), mask=rank_P < num_ranks)
    place_P += num_ranks * num_blocks
    tl.store(count_ptr + place_P, tl.sum(pairs_TP, axis=0), mask=rank_P < num_ranks)


@triton.jit
def _rows_kernel(
    expert_ptr,
    count_ptr,
    sizes_ptr,
    row_ptr,
    token_ptr,
    num_tokens,
    num_local_experts,
    num_ranks,
    num_blocks,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    block = tl.program_id(0)
    token = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < num_tokens
    rank_P = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    num_counts = num_ranks * num_blocks
    if block == 0:
        sent_P = tl.zeros((BLOCK_P,), dtype=tl.int32)
        pairs_P = tl.zeros((BLOCK_P,), dtype=tl.int32)
        for start in range(0, num_blocks, BLOCK_B):
            other = start + tl.arange(0, BLOCK_B)
            has_count = (rank_P[:, None] < num_ranks) & (other[None, :] < num_blocks)
            place = rank_P[:, None] * num_blocks + other[None, :]
            sent_P += tl.sum(tl.load(count_ptr + place, mask=has_count, other=0), axis=1)
            place += num_counts
            pairs_P += tl.sum(tl.load(count_ptr + place, mask=has_count, other=0), axis=1)
        tl.store(sizes_ptr + 2 * rank_P, sent_P.to(tl.int64), mask=rank_P < num_ranks)
        tl.store(sizes_ptr + 2 * rank_P + 1, pairs_P.to(tl.int64), mask=rank_P < num_ranks)

    first_P = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for start in range(0, num_counts, BLOCK_B):
        place = start + tl.arange(0, BLOCK_B)
        count = tl.load(count_ptr + place, mask=place < num_counts, other=0)
        is_before = place[None, :] < (rank_P * num_blocks + block)[:, None]
        first_P += tl.sum(tl.where(is_before, count[None, :], 0), axis=1)

    goes_TP = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.int32)
    for k in tl.static_range(K):
        expert = tl.load(expert_ptr + token * K + k, mask=inside, other=-1)
        rank = _rank(expert, num_local_experts)
        goes_TP |= (rank[:, None] == rank_P[None, :]).to(tl.int32)
    row_TP = first_P[None, :] + tl.cumsum(goes_TP, 0) - goes_TP
    token_TP = tl.broadcast_to(token.to(tl.int32)[:, None], (BLOCK_T, BLOCK_P))
    tl.store(token_ptr + row_TP, token_TP, mask=goes_TP > 0)

    seen_TP = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.int32)
    for k in tl.static_range(K):
        expert = tl.load(expert_ptr + token * K + k, mask=inside, other=-1)
        rank = _rank(expert, num_local_experts)
        is_here_TP = (rank[:, None] == rank_P[None, :]).to(tl.int32)
        row = tl.sum(is_here_TP * tl.where(seen_TP > 0, -1 - row_TP, row_TP), axis=1)
        is_here = tl.sum(is_here_TP, axis=1) > 0
        is_padding = (expert < 0) & (tl.program_id(1) == 0)
        tl.store(
            row_ptr + token * K + k,
            tl.where(is_here, row, -1),
            mask=inside & (is_here | is_padding),
        )
        seen_TP |= is_here_TP


@triton.jit
def _pack_kernel(
    expert_ptr,
    weight_ptr,
    token_ptr,
    row_ptr,
    packed_ptr,
    num_rows,
    num_local_experts,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < num_rows) & (slot < K)
    token = tl.load(token_ptr + row, mask=row < num_rows, other=0).to(tl.int64)
    place = token[:, None] * K + slot
    row_of_slot = tl.load(row_ptr + place, mask=inside, other=-1)
    row_of_slot = tl.where(row_of_slot < 0, -1 - row_of_slot, row_of_slot)
    is_local = inside & (row_of_slot == row[:, None])
    expert = tl.load(expert_ptr + place, mask=is_local, other=0).to(tl.int32) % num_local_experts
    weight = tl.load(weight_ptr + place, mask=is_local, other=0.0).to(WIDE)
    place = row[:, None] * (2 * K) + slot
    bits = packed_ptr.dtype.element_ty
    tl.store(packed_ptr + place, tl.where(is_local, expert, -1).to(bits), mask=inside)
    tl.store(packed_ptr + place + K, weight.to(bits, bitcast=True), mask=inside)


@triton.jit
def _unpack_kernel(
    packed_ptr,
    expert_ptr,
    weight_ptr,
    num_rows,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < num_rows) & (slot < K)
    place = row[:, None] * (2 * K) + slot
    expert = tl.load(packed_ptr + place, mask=inside, other=-1)
    weight = tl.load(packed_ptr + place + K, mask=inside, other=0).to(WIDE, bitcast=True)
    place = row[:, None] * K + slot
    tl.store(expert_ptr + place, expert.to(tl.int64), mask=inside)
    tl.store(weight_ptr + place, weight.to(weight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slots_kernel(
    row_value_ptr,
    row_ptr,
    slot_value_ptr,
    num_tokens,
    num_rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, BLOCK)[None, :]
    inside = (token[:, None] < num_tokens) & (slot < K)
    row = tl.load(row_ptr + token[:, None] * K + slot, mask=inside, other=0).to(tl.int64)
    row = tl.where(row < 0, -1 - row, row)
    value = tl.load(row_value_ptr + row * K + slot, mask=inside & (row < num_rows), other=0.0)
    tl.store(slot_value_ptr + token[:, None] * K + slot, value, mask=inside)
