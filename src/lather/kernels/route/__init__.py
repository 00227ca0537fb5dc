"""Routing as indices: the rows of every expert form one run, as grouped matrix products need them.

`plan_route` computes, from the experts of each token, the token of each row, the row of each
(token, slot) pair, the number of rows of each expert and the end of its run. Every run starts at a
multiple of `alignment`, which tiled and quantized products need; rows between runs are padding.

Letters: T tokens, K slots (experts per token), E experts, G rows.

Trade-off: G is the largest number of rows that T, K and E allow, not the number that this routing
needs, so that the host never waits for the device. With expert parallelism the host has waited for
the numbers of rows anyway, and passes the number of pairs whose expert is on this rank. With
`alignment` 1 and an expert for every pair there is no padding. Within each expert, rows are always
in (token, slot) order, because no atomics are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lather.kernels.backend import run
from lather.kernels.route import reference
from lather.shapes import Float, Int


@dataclass(frozen=True)
class Route:
    """Routing indices: row g belongs to token `token_G[g]`; (token t, slot k) has row `row_TK[t,
    k]`; the run of expert e ends before `end_E[e]`."""

    token_G: Int[Tensor, " g"]
    """Token of each row; -1 for padding. int64."""
    row_TK: Int[Tensor, "t k"]
    """Row of each pair; -1 if its expert is on another rank. int64."""
    count_E: Int[Tensor, " e"]
    """Number of rows of each expert, without padding. int64."""
    end_E: Int[Tensor, " e"]
    """End of each expert's run, including padding: the `offs` of `torch.nn.functional.grouped_mm`.
    int32."""


def plan_route(
    experts_TK: Int[Tensor, "t k"],
    num_experts: int,
    alignment: int = 1,
    num_pairs: int | None = None,
) -> Route:
    """Assign rows to (token, slot) pairs, grouped by expert and in (token, slot) order within each.

    `experts_TK` holds ids from 0 to `num_experts` - 1, or -1 for a pair without row, whose expert
    is on another rank. `num_pairs`: number of pairs with a row, if the host knows it (None: up to
    T * K); with expert parallelism it is much smaller than T * K. `reference.rows_for` has the
    number of rows G; rows after the last run are padding. Errors: see `validate`, and for ids out
    of range `check_range`.
    """
    validate(experts_TK, num_experts, alignment, num_pairs)
    return Route(*run(reference.plan_route, experts_TK, num_experts, alignment, num_pairs))


def rows_from_slots(
    value_TK: Float[Tensor, "t k"], row_TK: Int[Tensor, "t k"], num_rows: int
) -> Float[Tensor, " g"]:
    """Return for each of the G rows the value of its (token, slot); 0 for rows without one. Without
    autograd."""
    return run(reference.rows_from_slots, value_TK, row_TK, num_rows)


def slots_from_rows(
    value_G: Float[Tensor, " g"], row_TK: Int[Tensor, "t k"]
) -> Float[Tensor, "t k"]:
    """Return for each (token, slot) the value of its row; 0 where there is no row. Without
    autograd."""
    return run(reference.slots_from_rows, value_G, row_TK)


def validate(
    experts_TK: Tensor, num_experts: int, alignment: int, num_pairs: int | None = None
) -> None:
    """Raise TypeError for another dtype than int64, and ValueError for another shape than (T, K),
    and for too many rows."""
    if experts_TK.dtype != torch.int64:
        raise TypeError(f"experts_TK is {experts_TK.dtype}: has to be torch.int64")
    if experts_TK.dim() != 2:
        raise ValueError(
            f"experts_TK has shape {tuple(experts_TK.shape)}: has to be (tokens, experts per token)"
        )
    rows = reference.rows_for(experts_TK, num_experts, alignment, num_pairs)
    if rows >= 2**31:
        raise ValueError(
            f"{rows} rows: grouped products count them in int32, so there have to be fewer than "
            "2**31; use smaller micro-batches"
        )


def check_range(index: Int[Tensor, "..."], low: int, high: int, name: str) -> None:
    """Check that every entry of `index` is in [low, high).

    Raises ValueError on a CPU. On CUDA it is an assertion on the device, so that the host need not
    wait: as with torch's own index errors, the process ends with the message when it next waits for
    the device.
    """
    run(reference.check_range, index, low, high, name)
