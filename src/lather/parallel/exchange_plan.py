"""Plans an expert exchange: the index of the row that takes a token to a rank. A token is sent once
to a rank, however many of its experts are there.

Rows to send are ordered by destination rank, then token; received rows are then ordered by source
rank, then token. Global expert e is number e % N on rank e // N. The router's decision is sent
beside the rows in one integer buffer: local numbers of the experts, and the bits of the weights.

Trade-off: the numbers of rows are exact, so nothing is padded and no token dropped; the host
therefore has to know these numbers, which are exchanged first.

Letters: T tokens of this rank, R rows that it receives, S rows that it sends, K experts per token,
P ranks, N experts on a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lather.models.routing import Routing
from lather.shapes import Float, Int


@dataclass(frozen=True)
class DispatchHandle:
    """Indices and row counts of an exchange, with which results and gradients are sent back."""

    token_S: Int[Tensor, " s"]
    """Token of each sent row. int32."""
    row_TK: Int[Tensor, "t k"]
    """Row that takes token t to the rank of its k-th expert; ~row in all but the first of its slots
    on that rank; -1 for padding, which is sent nowhere. int32.

    A sum over slots skips negative rows and so adds each row once.
    """
    sent_P: tuple[int, ...]
    """Number of rows sent to each rank."""
    received_P: tuple[int, ...]
    """Number of rows received from each rank."""
    num_pairs: int = 0
    """Number of pairs of a received row and one of this rank's experts."""

    def row_of_slot(self) -> Int[Tensor, "t k"]:
        """Return the row of every slot; 0 for padding, whose weight the router gives no gradient.
        int64."""
        return torch.where(self.row_TK < 0, ~self.row_TK, self.row_TK).long()


@dataclass(frozen=True)
class ExchangePlan:
    """A rank's part of a `DispatchHandle`, before the ranks have exchanged the numbers of rows."""

    sizes_P2: Int[Tensor, "p 2"]
    """Message to each rank: the number of rows for it, and the number of pairs of these rows and
    its experts."""
    row_TK: Int[Tensor, "t k"]
    row_TP: Int[Tensor, "t p"]
    """The row of each token for each rank; one past the last row if the token is not sent there."""

    def handle(self, sent_P2: list[list[int]], received_P2: list[list[int]]) -> DispatchHandle:
        """Complete the plan with this rank's message to each rank, and each rank's to this one."""
        t, p = self.row_TP.shape
        sent_P, received_P = (
            tuple(rows for rows, _ in messages_P2) for messages_P2 in (sent_P2, received_P2)
        )
        s = sum(sent_P)
        # the last entry takes the pairs of token and rank without a row
        token_S = self.row_TK.new_empty(s + 1)
        token_T1 = torch.arange(t, dtype=torch.int32, device=token_S.device).unsqueeze(1)
        token_S.scatter_(0, self.row_TP.flatten(), token_T1.expand(t, p).flatten())
        return DispatchHandle(
            token_S[:s], self.row_TK, sent_P, received_P, sum(pairs for _, pairs in received_P2)
        )


def plan_routing(routing: Routing, num_local_experts: int, num_ranks: int) -> ExchangePlan:
    """Assign a row to each pair of a token and a rank to which it is sent, which padding is not."""
    n, p, experts_TK = num_local_experts, num_ranks, routing.experts_TK
    if routing.num_pairs is None:
        return plan_rows(experts_TK, n, p)
    is_padding_TK = experts_TK < 0
    # the plan for one more rank, to which padding goes, and whose rows come last
    plan = plan_rows(experts_TK.masked_fill(is_padding_TK, n * p), n, p + 1)
    sizes_P2 = plan.sizes_P2[:p]
    row_TP = torch.minimum(plan.row_TP[:, :p], sizes_P2[:, 0].sum())
    return ExchangePlan(sizes_P2, plan.row_TK.masked_fill(is_padding_TK, -1), row_TP)


def plan_rows(
    experts_TK: Int[Tensor, "t k"], num_local_experts: int, num_ranks: int
) -> ExchangePlan:
    """Assign a row to each pair of a token and a rank to which it is sent."""
    (t, k), p, device = experts_TK.shape, num_ranks, experts_TK.device
    rank_TK = experts_TK // num_local_experts
    slot_TK = torch.arange(k, device=device).expand(t, k)
    first_TP = slot_TK.new_full((t, p), k).scatter_reduce(1, rank_TK, slot_TK, "amin")
    goes_TP = first_TP < k
    row_TP = (goes_TP.T.flatten().cumsum(0) - 1).view(p, t).T
    row_TK = row_TP.gather(1, rank_TK)
    row_TK = torch.where(first_TP.gather(1, rank_TK) == slot_TK, row_TK, ~row_TK).int()

    pairs_P = torch.zeros(p, dtype=torch.int64, device=device)
    pairs_P.scatter_add_(0, rank_TK.flatten(), torch.ones_like(rank_TK.flatten()))
    sent_P = goes_TP.sum(0)
    return ExchangePlan(
        torch.stack([sent_P, pairs_P], dim=1), row_TK, torch.where(goes_TP, row_TP, sent_P.sum())
    )


def pack_routing(
    routing: Routing, handle: DispatchHandle, num_local_experts: int
) -> Int[Tensor, "s packed"]:
    """Pack, for each sent row, its rank's numbers of the experts (-1 for experts elsewhere), and
    their weights (0 for those) as bits."""
    wide = torch.promote_types(routing.weights_TK.dtype, torch.float32)
    bits = torch.int64 if wide.itemsize == 8 else torch.int32
    row_S1 = torch.arange(len(handle.token_S), device=handle.token_S.device).unsqueeze(1)
    is_local_SK = handle.row_of_slot().index_select(0, handle.token_S) == row_S1
    experts_SK = routing.experts_TK.index_select(0, handle.token_S) % num_local_experts
    weights_SK = routing.weights_TK.index_select(0, handle.token_S).to(wide)
    return torch.cat(
        [
            torch.where(is_local_SK, experts_SK, -1).to(bits),
            torch.where(is_local_SK, weights_SK, 0).view(bits),
        ],
        dim=1,
    )


def unpack_routing(
    packed: Int[Tensor, "r packed"], dtype: torch.dtype
) -> tuple[Int[Tensor, "r k"], Float[Tensor, "r k"]]:
    """Return experts and weights from `pack_routing`, the weights in `dtype`; both are copies, so
    that either can be freed alone."""
    experts_RK, bits_RK = (
        half.clone(memory_format=torch.contiguous_format) for half in packed.chunk(2, dim=1)
    )
    wide = torch.float64 if packed.dtype == torch.int64 else torch.float32
    return experts_RK.long(), bits_RK.view(wide).to(dtype)
