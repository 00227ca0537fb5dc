"""The mixture-of-experts layer: router, routed and shared experts, and the exchange of tokens
between ranks.

Source: DeepSeekMoE (Dai et al., arXiv:2401.06066) and DeepSeek-V2 (arXiv:2405.04434): top-k
routing, shared experts that get every token. No token is ever dropped; an expert may have none.

An `Exchange` sends tokens to the ranks of their experts, and the partial sums of each rank back. A
token is sent to a rank only once, even if several of its experts are there: that rank copies its
row for each expert, and weights and sums the results. So the tensors that are sent and saved are
(R, D), never (T * K, D). With a single rank nothing is sent. Rows in FP8 travel with their scales.

Letters: T tokens of this rank, R tokens that this rank's experts receive, D hidden size, E experts,
K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lather.models.experts import Experts
from lather.models.gated_mlp import GatedMLP
from lather.models.layers import Linear
from lather.models.pending import Pending
from lather.models.routing import Router, Routing
from lather.models.scaled_products import Rows
from lather.shapes import Float, Int


@dataclass
class Dispatched:
    """Tokens on the rank of their experts."""

    x_RD: Rows
    """In FP8 if they were sent in it."""
    experts_RK: Int[Tensor, "r k"]
    """Numbers of the experts among those of this rank; -1 for experts on other ranks, and for
    padding."""
    weights_RK: Float[Tensor, "r k"]
    handle: Any = None
    """Information with which the exchange sends results and gradients back."""
    num_pairs: int | None = None
    """Number of entries of `experts_RK` that are not -1, if the host knows it."""


class Exchange:
    """Sends tokens to the ranks of their experts (`dispatch`) and partial sums back (`combine`);
    each is the other's adjoint.

    This class is the exchange if all experts are on this rank: nothing is sent, and results may be
    the arguments themselves. Exchanges between ranks are subclasses that override all methods
    (`lather.parallel.expert_exchange`).

    Both exist in two forms: differentiable, and asynchronous without autograd (`start_...`), so
    that other computations run until `wait`. The asynchronous forms of the backward pass are
    separate methods. Tensors that are passed to a `start_...` method must not change before `wait`
    returns. Results are sent back by `Dispatched.handle`.
    """

    num_ranks = 1
    """Number of ranks that share the experts."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Send this rank's tokens (T, D); return the R tokens that this rank's experts receive."""
        return Dispatched(x_TD, routing.experts_TK, routing.weights_TK, num_pairs=routing.num_pairs)

    def combine(self, partial_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the weighted sums of this rank's experts (R, D); return the complete sums of this
        rank's tokens (T, D)."""
        return partial_RD

    def start_plan(self, routing: Routing) -> Pending[Any]:
        """Start to exchange the numbers of rows, which ranks need before they can send rows."""
        return Pending(lambda: None)

    def start_dispatch(self, x_TD: Rows, routing: Routing, plan: Any = None) -> Pending[Dispatched]:
        """`x_TD` is in FP8 only if there are several ranks. `plan`: the result of `start_plan` for
        this routing; None: this method exchanges the numbers itself, and waits for them."""
        assert isinstance(x_TD, Tensor), "nothing is sent, so nothing may be rounded"
        dispatched = self.dispatch(x_TD, routing)
        return Pending(lambda: dispatched)

    def start_combine(self, partial_RD: Tensor, handle: Any) -> Pending[Tensor]:
        return Pending(lambda: partial_RD)

    def start_combine_backward(self, grad_TD: Tensor, handle: Any) -> Pending[Tensor]:
        """Send the gradient of the complete sums (T, D); the result is that of this rank's partial
        sums (R, D)."""
        return Pending(lambda: grad_TD)

    def start_dispatch_backward(
        self, grad_RD: Tensor, grad_weights_RK: Tensor, handle: Any
    ) -> Pending[tuple[Tensor, Tensor]]:
        """Send the gradients of the results of `dispatch`; the result is those of the tokens (T, D)
        and of the router's weights (T, K)."""
        return Pending(lambda: (grad_RD, grad_weights_RK))


LOCAL_EXCHANGE = Exchange()


class MoE(nn.Module):
    """Router, routed experts and shared experts. `lather.models.block.Block` calls them segment
    by segment; `forward` calls all of them.

    With `gates_shared_experts` the output of the shared experts is multiplied by the sigmoid of a
    number per token, `shared_expert_gate(x)`, as in Qwen2-MoE."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared_experts: GatedMLP | None,
        *,
        gates_shared_experts: bool = False,
    ) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts
        self.shared_experts = shared_experts
        self.shared_expert_gate = (
            Linear(router.weight.shape[1], 1, bias=False) if gates_shared_experts else None
        )
        self.keep_little()

    @property
    def reads_once(self) -> bool:
        """As in `GatedMLP`, of the shared experts; routed experts read their rows once."""
        if self.shared_experts is None:
            return True
        return self.shared_expert_gate is None and self.shared_experts.reads_once

    def keep_little(self) -> None:
        """Have the shared experts save only their input, which a block recomputes from its
        residual. Recomputing gate/up takes two products in addition to their nine."""
        if self.shared_experts is not None and self.shared_experts.memory == "saved":
            self.shared_experts.memory = "recompute"

    def forward(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch d"], Routing]:
        """Return the weighted sum of each token's experts plus the shared experts' output, and the
        router's decision with its losses."""
        x_TD = x.reshape(-1, x.shape[-1])
        routing: Routing = self.gate(x_TD)
        y_TD: Tensor = self.experts(x_TD, routing.experts_TK, routing.weights_TK)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view(x.shape), routing

    def shared(self, x_TD: Float[Tensor, "t d"]) -> Float[Tensor, "t d"]:
        """Return the output of the shared experts, which must exist, times their gate."""
        assert self.shared_experts is not None
        if self.shared_expert_gate is None:
            return self.shared_experts(x_TD)
        gate_T1: Tensor = self.shared_expert_gate(x_TD)
        return self.shared_experts(x_TD, torch.sigmoid(gate_T1.squeeze(-1)))
