"""The mixture-of-experts layer: router, routed and shared experts, and the steps between them.

Source: DeepSeekMoE (Dai et al., arXiv:2401.06066) and DeepSeek-V2 (arXiv:2405.04434): softmax scores, greedy top-k, shared experts that see
every token, auxiliary balance loss. No token is ever dropped; an expert may have none.

Letters: T tokens, D hidden size, E experts, K experts per token, F expert intermediate size, G = T * K dispatched rows grouped by expert.

Every token has exactly K rows, so dispatch (copy each token to its rows) and combine (sum each token's rows) are each other's adjoint:
both are gathers, forward and backward, which keep the index alone and add in an order that does not depend on threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lather.models.layers import GatedMLP
from lather.shapes import Float, Int


@dataclass
class Routing:
    """The router's decision for T tokens."""

    experts_TK: Int[Tensor, "t k"]
    """The experts of each token."""
    weights_TK: Float[Tensor, "t k"]
    """The weight of each of them in the token's output."""
    count_E: Int[Tensor, " e"]
    """Rows that each expert receives."""
    balance_loss: Float[Tensor, ""]
    """E * sum over experts of (share of rows) * (mean score); 1 when the load is even. Not multiplied by its coefficient."""


@dataclass
class Dispatch:
    """Where the rows go: row g belongs to token `token_G[g]`; token t's rows are `row_TK[t]`; expert e has `count_E[e]` rows in a run."""

    token_G: Int[Tensor, " g"]
    row_TK: Int[Tensor, "t k"]
    count_E: Int[Tensor, " e"]


class Router(nn.Module):
    """Softmax scores of each token for each expert, the K best taken."""

    def __init__(
        self, hidden_size: int, num_experts: int, num_experts_per_tok: int, *, norm_topk_prob: bool, routed_scaling_factor: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.num_experts_per_tok = num_experts_per_tok
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor

    def forward(self, x_TD: Float[Tensor, "t d"]) -> Routing:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):  # near-ties between experts need more than bf16
            scores_TE = F.linear(x_TD.to(wide), self.weight.to(wide)).softmax(-1)
        weights_TK, experts_TK = scores_TE.topk(self.num_experts_per_tok, dim=-1)
        normalize = self.norm_topk_prob and self.num_experts_per_tok > 1  # a lone weight of 1 would teach the router nothing
        scale = weights_TK.sum(-1, keepdim=True).reciprocal() if normalize else self.routed_scaling_factor
        count_E = experts_TK.flatten().bincount(minlength=len(self.weight))
        return Routing(experts_TK, weights_TK * scale, count_E, balance_loss(scores_TE, count_E))


def balance_loss(scores_TE: Float[Tensor, "t e"], count_E: Int[Tensor, " e"]) -> Float[Tensor, ""]:
    """DeepSeek-V2's expert-level loss (eq. 23 to 25, without coefficient) over the micro-batch; differentiable through the scores."""
    share_E = count_E.to(scores_TE.dtype) / count_E.sum().clamp(min=1)
    mean_score_E = scores_TE.sum(0) / max(len(scores_TE), 1)
    return len(count_E) * (share_E * mean_score_E).sum()


def plan_dispatch(routing: Routing) -> Dispatch:
    """Group the T * K (token, expert) pairs by expert, tokens in their order within each."""
    pair_G = routing.experts_TK.flatten().argsort(stable=True)
    row = torch.empty_like(pair_G)
    row[pair_G] = torch.arange(len(pair_G), device=pair_G.device)
    num_per_token = routing.experts_TK.shape[1]
    return Dispatch(token_G=pair_G // num_per_token, row_TK=row.view_as(routing.experts_TK), count_E=routing.count_E)


def _copy_to_rows(x_TD: Tensor, plan: Dispatch) -> Tensor:
    return x_TD.index_select(0, plan.token_G)


def _sum_rows(x_GD: Tensor, plan: Dispatch) -> Tensor:
    t, k = plan.row_TK.shape
    return x_GD.index_select(0, plan.row_TK.flatten()).view(t, k, x_GD.shape[-1]).sum(1)


class _DispatchRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        return _copy_to_rows(x_TD, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_GD: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(grad_GD, ctx.plan), None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_GD: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        return _sum_rows(x_GD, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return _copy_to_rows(grad_TD, ctx.plan), None


def dispatch_rows(x_TD: Float[Tensor, "t d"], plan: Dispatch) -> Float[Tensor, "g d"]:
    """Each token copied to its K rows, rows grouped by expert."""
    rows: Tensor = _DispatchRows.apply(x_TD, plan)  # type: ignore[no-untyped-call]
    return rows


def combine_rows(x_GD: Float[Tensor, "g d"], plan: Dispatch) -> Float[Tensor, "t d"]:
    """Each token's K rows summed."""
    tokens: Tensor = _CombineRows.apply(x_GD, plan)  # type: ignore[no-untyped-call]
    return tokens


class Experts(nn.Module):
    """E gated MLPs as stacked weights, gate and up in one: `gate_up_proj` (E, 2F, D), `down_proj` (E, D, F)."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, x_GD: Float[Tensor, "g d"], count_E: Int[Tensor, " e"]) -> Float[Tensor, "g d"]:
        rows = x_GD.split(count_E.tolist())
        weights = zip(rows, self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        return torch.cat([self._one(x, gate_up, down) for x, gate_up, down in weights])

    def _one(self, x_ND: Tensor, gate_up_FD: Tensor, down_DF: Tensor) -> Tensor:
        gate_NF, up_NF = F.linear(x_ND, gate_up_FD).chunk(2, dim=-1)
        return F.linear(F.silu(gate_NF) * up_NF, down_DF)


class MoE(nn.Module):
    """Router, routed experts and shared experts; `lather.models.decoder.Block` calls them segment by segment."""

    def __init__(self, router: Router, experts: Experts, shared_experts: GatedMLP | None) -> None:
        super().__init__()
        self.gate = router
        self.experts = experts
        self.shared_experts = shared_experts
