"""Indices of an expert exchange: the row that takes a token to a rank, and what travels beside the
rows. A token is sent once to a rank, however many of its experts are there.

Rows to send are ordered by destination rank, then token; received rows are then ordered by source
rank, then token. Global expert e is number e % N on rank e // N. The router's decision is sent
beside the rows in one integer buffer: local numbers of the experts, and the bits of the weights.

Trade-off: the numbers of rows are exact, so nothing is padded and no token dropped; the host
therefore has to know these numbers, which are exchanged first. Until then only an upper bound of
the number of rows is known, for which the index of tokens has room.

Letters: T tokens of this rank, R rows that it receives, S rows that it sends, U = T * min(K, P)
rows that it could send, K experts per token, P ranks, N experts on a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import run
from lather.kernels.exchange_plan import reference
from lather.shapes import Float, Int


def plan_rows(
    experts_TK: Int[Tensor, "t k"], num_local_experts: int, num_ranks: int, *, padded: bool
) -> tuple[Int[Tensor, "2 p 2"], Int[Tensor, "t k"], Int[Tensor, " u"]]:
    """Assign a row to each pair of a token and a rank to which it is sent.

    Returns sizes_2P2, int64, whose first half is the message to each rank: the number of rows for
    it, and the number of pairs of these rows and its experts; the second half is not written.
    row_TK, int32: the row that takes token t to the rank of its k-th expert; ~row in all but the
    first of its slots on that rank. token_U, int32: the token of each row, in its first S entries.

    `padded`: all experts of a token may be -1; it is sent nowhere, and its entries of row_TK are
    -1. Raises ValueError if other experts are out of range (on CUDA the device asserts this).
    """
    return run(reference.plan_rows, experts_TK, num_local_experts, num_ranks, padded)


def pack_routing(
    experts_TK: Int[Tensor, "t k"],
    weights_TK: Float[Tensor, "t k"],
    token_S: Int[Tensor, " s"],
    row_TK: Int[Tensor, "t k"],
    num_local_experts: int,
) -> Int[Tensor, "s packed"]:
    """Pack, for each sent row, its rank's numbers of the experts (-1 for experts elsewhere), and
    their weights (0 for those) as bits."""
    return run(reference.pack_routing, experts_TK, weights_TK, token_S, row_TK, num_local_experts)


def unpack_routing(
    packed: Int[Tensor, "r packed"], dtype: torch.dtype
) -> tuple[Int[Tensor, "r k"], Float[Tensor, "r k"]]:
    """Return experts and weights from `pack_routing`, the weights in `dtype`; both are copies, so
    that either can be freed alone."""
    return run(reference.unpack_routing, packed, dtype)


def slots_from_sent(
    value_SK: Float[Tensor, "s k"], row_TK: Int[Tensor, "t k"]
) -> Float[Tensor, "t k"]:
    """Return for each (token, slot) its value in the row that took the token to the slot's rank.
    For padding it is any value of that slot, or 0 if there are no rows."""
    return run(reference.slots_from_sent, value_SK, row_TK)
