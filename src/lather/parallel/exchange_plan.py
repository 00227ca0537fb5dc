"""The plan of an expert exchange: indices (`lather.kernels.exchange_plan`) and numbers of rows.

Letters: T tokens of this rank, S rows that it sends, U rows that it could send, K experts per
token, P ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lather.kernels.exchange_plan import plan_rows
from lather.models.routing import Routing
from lather.shapes import Int


@dataclass(frozen=True)
class DispatchHandle:
    """Indices and row counts of an exchange, with which results and gradients are sent back."""

    token_S: Int[Tensor, " s"]
    """Token of each sent row, the beginning of a buffer for U rows. int32."""
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


@dataclass(frozen=True)
class ExchangePlan:
    """A rank's part of a `DispatchHandle`, before the ranks have exchanged the numbers of rows."""

    sizes_2P2: Int[Tensor, "2 p 2"]
    """Messages to each rank, and room for those from each: the number of rows, and the number of
    pairs of these rows and the experts of the rank that receives them."""
    row_TK: Int[Tensor, "t k"]
    token_U: Int[Tensor, " u"]
    """Token of each row; what follows the last row is no token."""

    @classmethod
    def of_routing(cls, routing: Routing, num_local_experts: int, num_ranks: int) -> ExchangePlan:
        """Assign a row to each pair of a token and a rank to which it is sent, which padding is
        not."""
        padded = routing.num_pairs is not None
        return cls(*plan_rows(routing.experts_TK, num_local_experts, num_ranks, padded=padded))

    def handle(self, sent_P2: list[list[int]], received_P2: list[list[int]]) -> DispatchHandle:
        """Complete the plan with this rank's message to each rank, and each rank's to this one."""
        sent_P, received_P = (
            tuple(rows for rows, _ in messages_P2) for messages_P2 in (sent_P2, received_P2)
        )
        num_pairs = sum(pairs for _, pairs in received_P2)
        token_S = self.token_U[: sum(sent_P)]
        return DispatchHandle(token_S, self.row_TK, sent_P, received_P, num_pairs)
