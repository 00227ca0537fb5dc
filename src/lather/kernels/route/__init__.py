"""Routing as indices: the rows of every expert in one run, ready for a grouped matrix product.

From the experts of each token follow the token of each row, the row of each (token, slot) pair, the number of rows of each expert and the
end of its run. Every run starts at a multiple of `alignment`, which tiled and quantised products need; the rows between are padding.

Letters: T tokens, K slots (experts per token), E experts, G rows.

Trade-off: G is the largest number of rows that T, K and E allow, not what this routing needs, so that the host never waits for the device.
Where experts are on several ranks, the host has waited for numbers of rows anyway, and gives that of the pairs with an expert here.
With `alignment` 1 and an expert for every pair there is no padding. The order is (token, slot) within each expert, always: no atomics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lather.kernels.backend import run
from lather.kernels.route import reference
from lather.shapes import Int

__all__ = ["Route", "check_range", "plan_route", "validate"]


@dataclass(frozen=True)
class Route:
    """Row g belongs to token `token_G[g]`; the row of (token t, slot k) is `row_TK[t, k]`; expert e's run ends before `end_E[e]`."""

    token_G: Int[Tensor, " g"]
    """The token of each row; -1 for padding rows. int64."""
    row_TK: Int[Tensor, "t k"]
    """The row of each pair; -1 where the pair has no expert here. int64."""
    count_E: Int[Tensor, " e"]
    """Rows of each expert, padding not counted. int64."""
    end_E: Int[Tensor, " e"]
    """Where each expert's run ends, its padding included: the `offs` of `torch.nn.functional.grouped_mm`. int32."""


def plan_route(experts_TK: Int[Tensor, "t k"], num_experts: int, alignment: int = 1, num_pairs: int | None = None) -> Route:
    """Rows grouped by expert, in (token, slot) order within each.

    `experts_TK` holds ids from 0 to `num_experts` - 1, or -1 for a pair that has no row here (its expert is on another rank).
    `num_pairs`: how many pairs have one, if the host knows (None: T * K may); with fewer experts here than there are, far fewer do.
    G is `num_pairs` for `alignment` 1 (but 1 for none of some), else `num_pairs` + E * (alignment - 1) rounded up to a multiple of
    `alignment`; rows past the last run are padding.
    Errors: see `validate`.
    """
    validate(experts_TK, num_experts, alignment, num_pairs)
    return Route(*run(reference.plan_route, experts_TK, num_experts, alignment, num_pairs))


def validate(experts_TK: Tensor, num_experts: int, alignment: int, num_pairs: int | None = None) -> None:
    """ValueError or TypeError for a wrong shape, dtype, number or alignment, and for ids out of range on the CPU; see `check_range`."""
    if experts_TK.dtype != torch.int64:
        raise TypeError(f"experts_TK is {experts_TK.dtype}: has to be torch.int64")
    if experts_TK.dim() != 2:
        raise ValueError(f"experts_TK has shape {tuple(experts_TK.shape)}: has to be (tokens, experts per token)")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts}: has to be at least 1")
    if alignment < 1:
        raise ValueError(f"alignment={alignment}: has to be at least 1 (1: no padding)")
    if num_pairs is not None and not 0 <= num_pairs <= experts_TK.numel():
        raise ValueError(f"num_pairs={num_pairs}: has to be from 0 to the {experts_TK.numel()} pairs that there are")
    rows = reference.rows_for(experts_TK, num_experts, alignment, num_pairs)
    if rows >= 2**31:
        raise ValueError(
            f"{rows} rows: grouped products count them in int32, so there have to be fewer than 2**31; use smaller micro-batches"
        )
    check_range(experts_TK, -1, num_experts, "experts_TK")


def check_range(index: Int[Tensor, "..."], low: int, high: int, name: str) -> None:
    """Every entry of `index` has to be in [low, high).

    On the CPU a ValueError with the entry. On CUDA an assertion on the device, so that the host need not wait: the process ends with the
    message at its next synchronisation, as with torch's own index errors.
    """
    run(reference.check_range, index, low, high, name)
