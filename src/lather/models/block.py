"""A block of a decoder, and its five segments.

    1 attend_and_route   attention, residual, norm, router     compute
    2 dispatch           tokens to their experts' ranks        all-to-all under expert parallelism
    3 run_experts        routed experts, weighted sums         compute
    4 combine            sums back to their tokens             all-to-all under expert parallelism
    5 aggregate          shared experts, residual              compute

In a dense block segments 2 and 4 are identities. `forward` composes the segments in a single
autograd graph; `lather.pipeline.segments` must give the same results.

Letters: B sequences, S positions, T = B * S tokens, D hidden size, E experts, K experts per token,
R tokens that this rank's experts receive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from lather.kernels.residual_sum import residual_sum
from lather.models.gated_mlp import GatedMLP
from lather.models.gathering_attention import GatheringAttention, Projected
from lather.models.layers import NormedRows, RMSNorm, recomputed_norm, rounds_to
from lather.models.moe import LOCAL_EXCHANGE, Dispatched, Exchange, MoE
from lather.models.mtp import MultiTokenPrediction
from lather.models.routing import Routing
from lather.models.saving.recomputed import Given, Placeholder, Recomputation
from lather.models.token_positions import SequenceLayout
from lather.shapes import Float


@dataclass
class Attended:
    """The results of segment 1."""

    residual_BSD: Float[Tensor, "b s d"]
    normed_TD: Float[Tensor, "t d"]
    routing: Routing | None
    """None in a dense block."""
    placeholder: Placeholder | None = None
    """Recomputes `normed_TD` from the residual; None if autograd saves it."""
    shared_TD: Float[Tensor, "t d"] | None = None
    """`normed_TD` again, for the shared experts, whose gradient is then not added to that of the
    routed experts before the norm's backward pass; None: they take `normed_TD`."""

    def recomputing(self) -> AbstractContextManager[None]:
        """Inside this context, autograd does not save `normed_TD`, but recomputes it in
        backward."""
        if self.placeholder is None:
            return nullcontext()
        return self.placeholder.instead_of(self.normed_TD)


class Block(nn.Module):
    """Pre-norm attention and feed-forward layer with residuals; the feed-forward layer is a `MoE`
    or, in a dense block, a `GatedMLP`."""

    def __init__(
        self,
        self_attn: nn.Module,
        mlp: MoE | GatedMLP,
        hidden_size: int,
        rms_norm_eps: float,
        *,
        zero_centered: bool = False,
    ) -> None:
        """`zero_centered`: of both norms (see `RMSNorm`)."""
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, rms_norm_eps, zero_centered=zero_centered)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(
            hidden_size, rms_norm_eps, zero_centered=zero_centered
        )
        self.mlp = mlp
        self.mtp: MultiTokenPrediction | None = None
        """None: this is a block of the main model."""
        self.memory = "saved"
        self.warmed_up: set[Hashable] | None = None
        """If parts are compiled, the recomputations that have run once in a forward pass
        (`Recomputation`)."""

    def attend_and_route(self, x_BSD: Float[Tensor, "b s d"], layout: SequenceLayout) -> Attended:
        recomputation = self.recomputation()
        with recomputation.watch():
            x_BSD, normed = self._normed_input(x_BSD, layout, recomputation)
            branch_BSD = self.self_attn(normed, layout, recomputation)
            return self._route(x_BSD, branch_BSD, layout, recomputation)

    def _normed_input(
        self, x_BSD: Tensor, layout: SequenceLayout, recomputation: Recomputation
    ) -> tuple[Tensor, NormedRows]:
        if layout.cache is not None:  # a layer may change its input
            return x_BSD, self.input_layernorm(x_BSD)
        return recomputed_norm(self.input_layernorm, x_BSD, recomputation)

    def recomputation(self) -> Recomputation:
        """Return a recomputation for one run of attention."""
        return Recomputation(enabled=self.memory != "reference", warmed_up=self.warmed_up)

    def project(
        self, x_BSD: Float[Tensor, "b s d"], layout: SequenceLayout, recomputation: Recomputation
    ) -> tuple[Projected, list[Callable[[], Tensor]]]:
        """Run `attend_and_route` up to where context ranks exchange. Return with the results
        functions that return the shared ones again in backward, if it gathers them again."""
        attention = self.self_attn
        assert isinstance(attention, GatheringAttention)
        with recomputation.watch():
            _, normed = self._normed_input(x_BSD, layout, recomputation)
            projected = attention.project(normed, layout, recomputation)
            assert layout.context is not None
            again = () if layout.context.keeps_gathered else projected.shared
            return projected, [recomputation.keep(x) for x in again]

    def attend_to_all(
        self,
        x_BSD: Float[Tensor, "b s d"],
        projected: Projected,
        layout: SequenceLayout,
        recomputation: Recomputation,
    ) -> tuple[Attended, Given | None]:
        """Run the rest of `attend_and_route`. The second result takes the gathered tensors that
        backward needs; None if autograd keeps them."""
        attention = self.self_attn
        assert isinstance(attention, GatheringAttention)
        assert layout.context is not None
        with recomputation.watch():
            given = None
            if not layout.context.keeps_gathered:
                given = recomputation.given_again(projected.shared)
            branch_BSD = attention.attend_to_all(projected, layout, recomputation)
            return self._route(x_BSD, branch_BSD, layout, recomputation), given

    def _route(
        self,
        x_BSD: Tensor,
        branch_BSD: Tensor,
        layout: SequenceLayout,
        recomputation: Recomputation,
    ) -> Attended:
        residual_BSD, *rows = self._add_and_norm(x_BSD, branch_BSD, recomputation)
        normed_TD, *shared = rows[:-1] or rows
        routing = None
        if isinstance(self.mlp, MoE):
            gate = self.mlp.gate
            repeats_TK = layout.routing.get(gate)
            routing = gate(rows[-1], len(x_BSD), layout.padding, repeats_TK)
        placeholder = recomputation.placeholder(normed_TD)
        return Attended(residual_BSD, normed_TD, routing, placeholder, *shared)

    def _add_and_norm(
        self, x_BSD: Tensor, branch_BSD: Tensor, recomputation: Recomputation
    ) -> list[Tensor]:
        """Return the residual, and the normed rows (T, D) for the experts, the shared experts and
        the router, or once for all. Backward recomputes the rows."""
        norm, moe = self.post_attention_layernorm, isinstance(self.mlp, MoE)
        dtype = rounds_to(norm, x_BSD) if recomputation.enabled and self.mlp.reads_once else None
        if dtype is None:
            residual_BSD = x_BSD + branch_BSD

            def normed(residual_BSD: Tensor) -> tuple[Tensor]:
                return (norm(residual_BSD).flatten(0, 1),)

            rows = list(normed(residual_BSD))
            recomputation.add(tuple(rows), normed, residual_BSD)
            return [residual_BSD, *rows]
        copies = 2 if isinstance(self.mlp, MoE) and self.mlp.shared_experts is not None else 1
        residual_BSD, *rows_BSD = norm(x_BSD, branch_BSD, dtype=dtype, copies=copies, wide=moe)
        rows = [rows_BSD.flatten(0, 1) for rows_BSD in rows_BSD]

        def again(residual_BSD: Tensor) -> tuple[Tensor, ...]:
            made = norm.rounded_again(residual_BSD, dtype, wide=moe)
            return tuple(x_BSD.flatten(0, 1) for x_BSD in made)

        recomputation.add((rows[0], *rows[copies:]), again, residual_BSD)
        return [residual_BSD, *rows]

    def dispatch(self, attended: Attended, exchange: Exchange) -> Dispatched | None:
        """Send tokens to the ranks of their experts; return None in a dense block."""
        if attended.routing is None:
            return None
        return exchange.dispatch(attended.normed_TD, attended.routing)

    def run_experts(
        self, attended: Attended, dispatched: Dispatched | None
    ) -> Float[Tensor, "r d"]:
        """Run the experts and apply the router's weights to their outputs, so that `combine` only
        has to add."""
        if dispatched is None:
            return self.mlp(attended.normed_TD)
        assert isinstance(self.mlp, MoE)
        return self.mlp.experts(
            dispatched.x_RD, dispatched.experts_RK, dispatched.weights_RK, dispatched.num_pairs
        )

    def combine(
        self, partial_RD: Float[Tensor, "r d"], dispatched: Dispatched | None, exchange: Exchange
    ) -> Float[Tensor, "t d"]:
        return partial_RD if dispatched is None else exchange.combine(partial_RD, dispatched)

    def aggregate(
        self, attended: Attended, combined_TD: Float[Tensor, "t d"]
    ) -> Float[Tensor, "b s d"]:
        shared_TD = None
        if isinstance(self.mlp, MoE) and self.mlp.shared_experts is not None:
            rows_TD = attended.normed_TD if attended.shared_TD is None else attended.shared_TD
            shared_TD = self.mlp.shared(rows_TD)
        return residual_sum(attended.residual_BSD, combined_TD, shared_TD)

    def forward(
        self,
        x_BSD: Float[Tensor, "b s d"],
        layout: SequenceLayout,
        exchange: Exchange = LOCAL_EXCHANGE,
    ) -> tuple[Float[Tensor, "b s d"], Routing | None]:
        attended = self.attend_and_route(x_BSD, layout)
        with attended.recomputing():
            dispatched = self.dispatch(attended, exchange)
            partial_RD = self.run_experts(attended, dispatched)
            combined_TD = self.combine(partial_RD, dispatched, exchange)
            return self.aggregate(attended, combined_TD), attended.routing
