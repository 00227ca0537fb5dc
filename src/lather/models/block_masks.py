"""Block masks of flex attention, made from intervals of keys.

A block mask says for `SIZE` queries by `SIZE` keys at a time whether all pairs attend to each other
(a full block), some (a partial one, for which flex attention calls the rule of the pairs) or none.
torch's `create_block_mask` calls the rule for all S x T pairs. Here every query attends to the keys
from a first one to its own, so that the first and last keys of a block's queries tell all three
apart, in (S / SIZE) x (T / SIZE) comparisons.

That is exact, because the intervals of queries that lie one after the other make up one interval,
which ends with the last query. A block in which one slice of a context rank ends and another begins
has two, and is looked at twice.

Letters: B sequences, S queries, T keys, Q blocks of queries, K blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lather.shapes import Bool, Int

SIZE = 128
"""Queries and keys of a block, torch's default."""


def block_mask_of(
    first_BS: Int[Tensor, "b s"],
    last_S: Int[Tensor, " s"],
    runs: Sequence[slice],
    num_keys: int,
    rule: Callable[..., Tensor],
) -> BlockMask:
    """Return the block mask of queries that attend to the keys from `first_BS` to `last_S`, of
    `num_keys`. In each of the `runs`, which are together all queries, last keys rise by one and
    first keys do not fall. `rule` tells the same of single pairs, (batch, head, query, key)."""
    num_queries = len(last_S)
    start_K = torch.arange(0, num_keys, SIZE, device=last_S.device)
    stop_K = start_K + SIZE
    some_BQK = torch.zeros((), dtype=torch.bool, device=last_S.device)
    for run in runs:
        first_BQx = _in_blocks(first_BS, run, num_keys)
        last_Qx = _in_blocks(last_S, run, -1)
        reaches_BQK = first_BQx.amin(-1).unsqueeze(-1) < stop_K
        some_BQK = some_BQK | (reaches_BQK & (last_Qx.amax(-1).unsqueeze(-1) >= start_K))
    everything = slice(0, num_queries)
    first_BQx = _in_blocks(first_BS, everything, num_keys)
    last_Qx = _in_blocks(last_S, everything, -1)
    all_BQK = first_BQx.amax(-1).unsqueeze(-1) <= start_K
    all_BQK = all_BQK & (last_Qx.amin(-1).unsqueeze(-1) >= stop_K - 1)
    return BlockMask.from_kv_blocks(
        *_in_order(some_BQK & ~all_BQK),
        *_in_order(all_BQK),
        BLOCK_SIZE=SIZE,
        mask_mod=rule,
        seq_lengths=(num_queries, num_keys),
    )


def _in_blocks(x_S: Int[Tensor, "*b s"], run: slice, filler: int) -> Int[Tensor, "*b q x"]:
    """Return the numbers of a run by blocks of all queries, with a filler in place of others."""
    num_blocks = -(-x_S.shape[-1] // SIZE)
    padded = x_S.new_full((*x_S.shape[:-1], num_blocks * SIZE), filler)
    padded[..., run] = x_S[..., run]
    return padded.unflatten(-1, (num_blocks, SIZE))


def _in_order(block_BQK: Bool[Tensor, "b q k"]) -> tuple[Int[Tensor, "b 1 q"], Int[Tensor, "..."]]:
    """Return for each block of queries the number of its blocks of keys, and their numbers, before
    those of the others."""
    number_B1QK = block_BQK.unsqueeze(1).int()
    ordered = number_B1QK.argsort(dim=-1, descending=True, stable=True)
    return number_B1QK.sum(-1, dtype=torch.int32), ordered.int()
