"""The mixture-of-experts layer: router, routed and shared experts, and how tokens get to the experts and back.

Source: DeepSeekMoE (Dai et al., arXiv:2401.06066) and DeepSeek-V2 (arXiv:2405.04434): top-k routing, shared experts that see every token.
No token is ever dropped; an expert may have none.

An `Exchange` takes tokens to the ranks that have their experts and brings each rank's partial sum back. A token travels once to a rank,
however many of its experts are there: rows are expanded where the experts are, weighted and summed there, so what travels and what is
kept is (R, D), never (T * K, D). On one rank nothing travels.

Letters: T tokens of this rank, R tokens that are here for this rank's experts, D hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from lather.models.experts import Experts
from lather.models.layers import GatedMLP
from lather.models.routing import Router, Routing
from lather.shapes import Float, Int


@dataclass
class Dispatched:
    """Tokens that are where their experts are."""

    x_RD: Float[Tensor, "r d"]
    experts_RK: Int[Tensor, "r k"]
    """Numbers among this rank's experts; -1 for experts elsewhere."""
    weights_RK: Float[Tensor, "r k"]
    way_back: Any = None
    """Whatever the exchange needs to know for `combine`."""
    num_pairs: int | None = None
    """Entries of `experts_RK` that are not -1, if the host knows."""


Result_co = TypeVar("Result_co", covariant=True)


@runtime_checkable
class Pending(Protocol[Result_co]):
    """A communication that is on its way."""

    def wait(self) -> Result_co:
        """Return what has arrived. On CUDA the current stream waits for it, not the host."""


@dataclass(frozen=True)
class Arrived(Generic[Result_co]):
    """A value that is there already."""

    result: Result_co

    def wait(self) -> Result_co:
        return self.result


@runtime_checkable
class Exchange(Protocol):
    """Takes tokens to the ranks of their experts and partial sums back: `dispatch` and `combine`, each the other's adjoint.

    Both are there in two forms: differentiable, and launched without autograd, so that something else is computed until the result is
    waited for; the latter with a form of its own for the way of the gradients. What is given to a launch must stay as it is until then.
    """

    num_ranks: int
    """Over how many ranks the experts are spread. With 1 nothing travels, and what comes out may be what went in."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """(T, D) tokens to the R tokens that this rank's experts see."""

    def combine(self, partial_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """This rank's experts' weighted sums (R, D) to the whole sums of its own tokens (T, D)."""

    def start_plan(self, routing: Routing) -> Pending[Any]:
        """Begin what ranks have to tell each other before rows can travel: how many there are."""

    def start_dispatch(self, x_TD: Tensor, routing: Routing, plan: Any = None) -> Pending[Dispatched]:
        """`plan`: what `start_plan` gave for this routing; None: it is asked for here, and waited for."""

    def start_combine(self, partial_RD: Tensor, dispatched: Dispatched) -> Pending[Tensor]: ...

    def start_combine_backward(self, grad_TD: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """Gradient of the whole sums (T, D) to that of this rank's partial sums (R, D)."""

    def start_dispatch_backward(self, grad_RD: Tensor, grad_weights_RK: Tensor, dispatched: Dispatched) -> Pending[tuple[Tensor, Tensor]]:
        """Gradients of what `dispatch` gave to those of the tokens (T, D) and of the router's weights (T, K)."""


class LocalExchange:
    """All experts are on this rank: nothing travels."""

    num_ranks = 1

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        return Dispatched(x_TD, routing.experts_TK, routing.weights_TK)

    def combine(self, partial_RD: Tensor, dispatched: Dispatched) -> Tensor:
        return partial_RD

    def start_plan(self, routing: Routing) -> Pending[None]:
        return Arrived(None)

    def start_dispatch(self, x_TD: Tensor, routing: Routing, plan: None = None) -> Pending[Dispatched]:
        return Arrived(self.dispatch(x_TD, routing))

    def start_combine(self, partial_RD: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        return Arrived(partial_RD)

    def start_combine_backward(self, grad_TD: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        return Arrived(grad_TD)

    def start_dispatch_backward(self, grad_RD: Tensor, grad_weights_RK: Tensor, dispatched: Dispatched) -> Pending[tuple[Tensor, Tensor]]:
        return Arrived((grad_RD, grad_weights_RK))


LOCAL_EXCHANGE = LocalExchange()


class MoE(nn.Module):
    """Router, routed experts and shared experts. `lather.models.decoder.Block` calls them segment by segment; a call does it in one go."""

    def __init__(self, router: Router, experts: Experts, shared_experts: GatedMLP | None) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts
        self.shared_experts = shared_experts
        self.keep_little()

    def keep_little(self) -> None:
        """Keep nothing of the shared experts but their input, which a block makes again from its residual: so is gate/up in backward,
        two more products to their nine."""
        if self.shared_experts is not None and self.shared_experts.memory == "saved":
            self.shared_experts.memory = "recompute"

    def forward(self, x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch d"], Routing]:
        """Weighted sum of each token's experts and of the shared ones, and the router's decision with its losses."""
        x_TD = x.reshape(-1, x.shape[-1])
        routing: Routing = self.gate(x_TD)
        y_TD: Tensor = self.experts(x_TD, routing.experts_TK, routing.weights_TK)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view(x.shape), routing
