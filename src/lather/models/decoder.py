"""A decoder-only transformer made of blocks, and the five segments of a block.

    1 attend_and_route   attention, residual, norm, router     compute
    2 dispatch           tokens to the experts' rows           all-to-all under expert parallelism
    3 run_experts        routed experts, weighted              compute
    4 combine            rows back to their tokens             all-to-all under expert parallelism
    5 aggregate          shared experts, residual              compute

A dense block has the same segments with 2 and 4 as identities. `reference_forward` is their composition in one autograd graph: what
every other way of running a block must agree with.

Letters: B sequences, S positions, T = B * S tokens, D hidden size, E experts, K experts per token, G = T * K rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lather.models.layers import GatedMLP, RMSNorm
from lather.models.moe import Dispatch, MoE, Routing, combine_rows, dispatch_rows, plan_dispatch
from lather.shapes import Float, Int


@dataclass
class Attended:
    """What segment 1 hands on."""

    residual_BSD: Float[Tensor, "b s d"]
    normed_TD: Float[Tensor, "t d"]
    routing: Routing | None
    """None in a dense block."""


class Block(nn.Module):
    """Pre-norm attention and feed-forward with residuals; the feed-forward is a `MoE` or, in a dense block, a `GatedMLP`."""

    def __init__(self, self_attn: nn.Module, mlp: MoE | GatedMLP, hidden_size: int, rms_norm_eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden_size, rms_norm_eps)
        self.mlp = mlp

    def attend_and_route(self, x_BSD: Float[Tensor, "b s d"]) -> Attended:
        residual_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD))
        normed_TD = self.post_attention_layernorm(residual_BSD).flatten(0, 1)
        return Attended(residual_BSD, normed_TD, self.mlp.gate(normed_TD) if isinstance(self.mlp, MoE) else None)

    def dispatch(self, attended: Attended) -> tuple[Float[Tensor, "g d"], Dispatch | None]:
        if attended.routing is None:
            return attended.normed_TD, None
        plan = plan_dispatch(attended.routing)
        return dispatch_rows(attended.normed_TD, plan), plan

    def run_experts(self, rows_GD: Float[Tensor, "g d"], routing: Routing | None, plan: Dispatch | None) -> Float[Tensor, "g d"]:
        """The router's weights are applied here, on the experts' side, so that combine only has to add."""
        if routing is None or plan is None:
            dense: Tensor = self.mlp(rows_GD)
            return dense
        assert isinstance(self.mlp, MoE)
        out_GD = self.mlp.experts(rows_GD, plan.count_E)
        weights = routing.weights_TK.flatten()
        weight_G = torch.empty_like(weights).index_copy(0, plan.row_TK.flatten(), weights)  # a permutation: every row is written
        weighted: Tensor = out_GD * weight_G.to(out_GD.dtype).unsqueeze(-1)
        return weighted

    def combine(self, rows_GD: Float[Tensor, "g d"], plan: Dispatch | None) -> Float[Tensor, "t d"]:
        return rows_GD if plan is None else combine_rows(rows_GD, plan)

    def aggregate(self, attended: Attended, combined_TD: Float[Tensor, "t d"]) -> Float[Tensor, "b s d"]:
        if isinstance(self.mlp, MoE) and self.mlp.shared_experts is not None:
            combined_TD = combined_TD + self.mlp.shared_experts(attended.normed_TD)
        return attended.residual_BSD + combined_TD.view_as(attended.residual_BSD)

    def reference_forward(self, x_BSD: Float[Tensor, "b s d"]) -> tuple[Float[Tensor, "b s d"], Routing | None]:
        attended = self.attend_and_route(x_BSD)
        rows_GD, plan = self.dispatch(attended)
        out_GD = self.run_experts(rows_GD, attended.routing, plan)
        combined_TD = self.combine(out_GD, plan)
        return self.aggregate(attended, combined_TD), attended.routing

    forward = reference_forward


@dataclass
class DecoderOutput:
    """What a forward pass gives."""

    logits_BSV: Float[Tensor, "b s v"]
    routings: list[Routing]
    """One per MoE block, in order."""

    def balance_loss(self) -> Float[Tensor, ""]:
        """Sum over the MoE blocks, 0 if there are none."""
        return torch.stack([r.balance_loss for r in self.routings]).sum() if self.routings else self.logits_BSV.new_zeros(())

    def rows_per_expert(self) -> Int[Tensor, "l e"]:
        """Rows that each expert of each MoE block received; (0, 0) if there are none."""
        counts = [r.count_E for r in self.routings]
        return torch.stack(counts) if counts else torch.zeros(0, 0, dtype=torch.int64)


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head; with `tie_word_embeddings` the head is the embedding."""

    def __init__(
        self, blocks: Sequence[Block], *, vocab_size: int, hidden_size: int, rms_norm_eps: float, tie_word_embeddings: bool
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(hidden_size, rms_norm_eps)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens_BS: Int[Tensor, "b s"]) -> DecoderOutput:
        x_BSD = self.embed_tokens(tokens_BS)
        routings = []
        for block in self.layers:
            x_BSD, routing = block(x_BSD)
            if routing is not None:
                routings.append(routing)
        return DecoderOutput(self.lm_head(self.norm(x_BSD)), routings)

    @torch.no_grad()
    def init_weights(self, std: float, generator: torch.Generator) -> None:
        """Norms 1, everything else normal with this standard deviation, drawn in the order of `parameters()`."""
        norms = {id(module.weight) for module in self.modules() if isinstance(module, RMSNorm)}
        for p in self.parameters():
            if id(p) in norms:
                p.fill_(1)
            else:
                p.normal_(0, std, generator=generator)
