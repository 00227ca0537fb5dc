"""The router: scores each token for each expert, chooses K experts, and balances their load.

Sources: top-k gating (Shazeer et al., arXiv:1701.06538); softmax scores, group-limited top-k and the expert-level balance loss
(DeepSeek-V2, arXiv:2405.04434, section 2.2); router z-loss (ST-MoE, arXiv:2202.08906, eq. 5); sigmoid scores and loss-free balancing by a
bias that only affects the choice of experts (Wang et al., arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437); balance over the global batch
(Qiu et al., arXiv:2501.11873). Scores are computed in fp32 or wider, because bf16 cannot distinguish close scores.

Letters: T tokens, D hidden size, E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lather.models.layers import Product, multiply, reset_parameters
from lather.models.saving.weight_gradients import Deferrable
from lather.shapes import Float, Int

SCORES = ("softmax", "sigmoid")
TINY = 1e-20
"""Added to sums of scores, which are 0 if all scores have underflowed; it changes no other fp32 sum."""
BALANCE_LEVELS = ("micro_batch", "sequence", "global_batch")


@dataclass
class Routing:
    """The router's decision for T tokens. The losses are without their coefficients."""

    experts_TK: Int[Tensor, "t k"]
    """The experts of each token."""
    weights_TK: Float[Tensor, "t k"]
    """The weight of each of a token's experts in its output, in fp32 or wider."""
    count_E: Int[Tensor, " e"]
    """Number of rows that each expert receives."""
    balance_loss: Float[Tensor, ""]
    """E * sum over experts of (share of rows) * (mean score); 1 for an even load."""
    z_loss: Float[Tensor, ""] | None
    """Mean over tokens of logsumexp(logits)^2; None unless `Router.takes_z_loss` is set, because autograd saves the logits for it."""
    balance_count_E: Int[Tensor, " e"] | None = None
    """Number of rows of each expert from which the balance loss computed the shares; None if it used those of each sequence."""


class Router(Deferrable, nn.Module):
    """Scores each token for each expert and chooses the K best.

    Shapes: weight (E, D), optional bias (E). `normalize` makes a token's weights sum to 1, `scale` multiplies them. With `groups` (number
    of groups, groups per token), a token's experts come from the groups of neighbouring experts that have the best single experts.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        score: str = "softmax",
        normalize: bool = False,
        scale: float = 1.0,
        bias: bool = False,
        groups: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__()
        _check_router(num_experts, num_experts_per_tok, score, *groups)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.num_experts_per_tok, self.score, self.normalize, self.scale = num_experts_per_tok, score, normalize, scale
        self.num_groups, self.num_groups_per_tok = groups
        self.takes_z_loss = False
        self.balance = LoadBalance("micro_batch")
        """The level of the balance loss; `Decoder.balance_load` sets it for all blocks."""
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", None)
        self._replayed_TK: Tensor | None = None
        self._repeated: Routing | None = None
        reset_parameters(self)

    def forward(self, x_TD: Float[Tensor, "t d"], num_sequences: int = 1) -> Routing:
        """Route tokens. x consists of `num_sequences` sequences of equal length, which only the balance loss at sequence level uses."""
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(-1) if self.score == "softmax" else logits_TE.sigmoid()
        experts_TK = self._experts(scores_TE)
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
        if self.scale != 1:
            weights_TK = weights_TK * self.scale
        count_E = count_rows(experts_TK, len(self.weight))
        if self.score == "sigmoid":  # the balance loss needs scores that sum to 1
            scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)
        over_E = self.balance.counted(count_E, num_sequences) if self._repeated is None else self._repeated.balance_count_E
        loss = sequence_balance_loss(scores_TE, experts_TK, num_sequences) if over_E is None else balance_loss(scores_TE, over_E)
        return Routing(experts_TK, weights_TK, count_E, loss, z_loss(logits_TE) if self.takes_z_loss else None, over_E)

    def logits(self, x_TD: Float[Tensor, "t d"]) -> Float[Tensor, "t e"]:
        """Compute x W^T + b in fp32 or wider, for any dtype of x and autocast, saving x only in its own dtype."""
        product = Product(self.weight, self.bias, self.weight_gradients)
        return multiply(x_TD, torch.promote_types(x_TD.dtype, torch.float32), product)[0]

    def _experts(self, scores_TE: Tensor) -> Tensor:
        if self._repeated is not None:
            return self._repeated.experts_TK
        replayed_TK = self._replayed_TK
        if replayed_TK is None:
            return self._choose(scores_TE.detach())
        if len(replayed_TK) != len(scores_TE):
            raise ValueError(f"replay was given {len(replayed_TK)} tokens, but the batch has {len(scores_TE)}: give one row per token")
        return replayed_TK.to(scores_TE.device)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        bias_E: Tensor | None = self.e_score_correction_bias
        if bias_E is not None:
            scores_TE = scores_TE + bias_E
        if self.num_groups > 1:
            grouped_TGE = scores_TE.unflatten(-1, (self.num_groups, -1))
            kept_TG = grouped_TGE.amax(-1).topk(self.num_groups_per_tok, dim=-1, sorted=False).indices
            allowed_TG = torch.zeros_like(grouped_TGE[..., 0], dtype=torch.bool).scatter_(1, kept_TG, value=True)
            scores_TE = grouped_TGE.masked_fill(~allowed_TG.unsqueeze(-1), -torch.inf).flatten(1)
        return scores_TE.topk(self.num_experts_per_tok, dim=-1).indices

    @contextlib.contextmanager
    def recompute(self, routing: Routing) -> Iterator[None]:
        """Inside this context, the router repeats `routing` for the same tokens, as activation checkpointing needs in backward.

        The tokens go to the same experts, and the balance loss uses the same row counts, without adding them or summing over ranks again.
        """
        before, self._repeated = self._repeated, routing
        try:
            yield
        finally:
            self._repeated = before

    @contextlib.contextmanager
    def replay(self, experts_TK: Int[Tensor, "t k"]) -> Iterator[None]:
        """Inside this context, tokens go to the given experts, with weights from their scores; for tests and benchmarks.

        Raises ValueError if they are not K different experts per token.
        """
        e, k = len(self.weight), self.num_experts_per_tok
        if experts_TK.dim() != 2 or experts_TK.shape[1] != k:
            raise ValueError(f"replay got experts of shape {tuple(experts_TK.shape)}: it must be (T, {k}), one row per token")
        if experts_TK.numel() and not 0 <= int(experts_TK.min()) <= int(experts_TK.max()) < e:
            raise ValueError(f"replay got experts {int(experts_TK.min())} to {int(experts_TK.max())}: they must be 0 to {e - 1}")
        if (experts_TK.sort(-1).values.diff(dim=-1) == 0).any():
            raise ValueError("replay got a token that has the same expert twice: give K different experts per token")
        before, self._replayed_TK = self._replayed_TK, experts_TK
        try:
            yield
        finally:
            self._replayed_TK = before

    def enable_loss_free_balancing(self) -> None:
        """Create the bias that `update_correction_bias` changes; it is part of the state dict."""
        if self.e_score_correction_bias is None:
            self.e_score_correction_bias = torch.zeros(len(self.weight), device=self.weight.device)

    @torch.no_grad()
    def update_correction_bias(self, count_E: Int[Tensor, " e"], rate: float) -> None:
        """After a step whose experts had `count_E` rows, raise the bias of underloaded experts by `rate`, and lower that of overloaded
        ones."""
        if self.e_score_correction_bias is None:
            raise RuntimeError("the router has no correction bias: call enable_loss_free_balancing first")
        load_E = count_E.to(self.e_score_correction_bias)
        self.e_score_correction_bias += rate * (load_E.mean() - load_E).sign()


def _check_router(num_experts: int, num_experts_per_tok: int, score: str, num_groups: int, num_groups_per_tok: int) -> None:
    if score not in SCORES:
        raise ValueError(f"score = {score!r} is not valid: use one of {', '.join(map(repr, SCORES))}")
    if num_experts % num_groups:
        raise ValueError(
            f"groups = ({num_groups}, {num_groups_per_tok}) is not valid: the number of groups must divide the {num_experts} experts"
        )
    if not 1 <= num_groups_per_tok <= num_groups:
        raise ValueError(f"groups = ({num_groups}, {num_groups_per_tok}) is not valid: a token may have from 1 to {num_groups} groups")
    reachable = num_experts // num_groups * num_groups_per_tok
    if not 1 <= num_experts_per_tok <= reachable:
        raise ValueError(f"num_experts_per_tok = {num_experts_per_tok} is not valid: it must be from 1 to the {reachable} experts in reach")


def count_rows(experts_TK: Int[Tensor, "t k"], num_experts: int) -> Int[Tensor, " e"]:
    """Count how often each expert occurs. (torch.bincount would wait for a CUDA device.)"""
    rows_G = experts_TK.flatten()
    return rows_G.new_zeros(num_experts).scatter_add_(0, rows_G, torch.ones_like(rows_G))


def z_loss(logits_TE: Float[Tensor, "t e"]) -> Float[Tensor, ""]:
    """Compute the mean over tokens of logsumexp(logits)^2; 0 for no tokens."""
    return logits_TE.logsumexp(-1).square().sum() / max(len(logits_TE), 1)


def balance_loss(scores_TE: Float[Tensor, "t e"], count_E: Int[Tensor, " e"]) -> Float[Tensor, ""]:
    """Compute DeepSeek-V2's expert-level loss (eq. 23 to 25, without coefficient); differentiable through the scores."""
    share_E = count_E.to(scores_TE.dtype) / count_E.sum().clamp(min=1)
    mean_score_E = scores_TE.sum(0) / max(len(scores_TE), 1)
    return len(count_E) * (share_E * mean_score_E).sum()


def sequence_balance_loss(scores_TE: Float[Tensor, "t e"], experts_TK: Int[Tensor, "t k"], num_sequences: int) -> Float[Tensor, ""]:
    """Compute the mean of the same loss over sequences of equal length; differentiable through the scores."""
    num_experts = scores_TE.shape[1]
    if len(scores_TE) % num_sequences:
        raise ValueError(f"num_sequences = {num_sequences} is not valid: it must divide the {len(scores_TE)} tokens")
    scores_BSE, experts_BG = scores_TE.unflatten(0, (num_sequences, -1)), experts_TK.reshape(num_sequences, -1)
    count_BE = torch.zeros(num_sequences, num_experts, dtype=scores_TE.dtype, device=scores_TE.device)
    count_BE.scatter_add_(1, experts_BG, torch.ones_like(experts_BG, dtype=scores_TE.dtype))
    share_BE = count_BE / max(experts_BG.shape[1], 1)
    mean_score_BE = scores_BSE.sum(1) / max(scores_BSE.shape[1], 1)
    return num_experts * (share_BE * mean_score_BE).sum(-1).mean()


class LoadBalance:
    """Counts the rows from which the balance loss is computed: those of a micro-batch, each sequence, or the global batch.

    Over the global batch, the experts' shares of rows are computed from all micro-batches of the step so far, on all ranks of `group`; the
    scores are those of the micro-batch. `counting_step` encloses a step. Autograd may be off in it, as in the forward pass of activation
    checkpointing. Outside a step, in validation, the loss is over the rows of its micro-batch.
    """

    def __init__(self, level: str, group: dist.ProcessGroup | None = None) -> None:
        if level not in BALANCE_LEVELS:
            raise ValueError(f"balance level {level!r} is not valid: use one of {', '.join(map(repr, BALANCE_LEVELS))}")
        self.level, self.group = level, group
        self._count_E: Tensor | None = None
        self._in_step = False

    def restart(self, *, in_step: bool) -> None:
        """Forget the rows that were counted; `in_step` tells whether a step begins."""
        self._count_E, self._in_step = None, in_step

    def counted(self, count_E: Int[Tensor, " e"], num_sequences: int) -> Int[Tensor, " e"] | None:
        """Add a micro-batch's rows to those of the step; return the counts from which its shares are computed. None: from each sequence."""
        if self.level == "sequence" and num_sequences > 1:
            return None
        if self.level == "global_batch" and self._in_step:
            if self.group is not None:
                count_E = count_E.clone()
                dist.all_reduce(count_E, group=self.group)
            self._count_E = count_E = count_E if self._count_E is None else self._count_E + count_E
        return count_E


@contextlib.contextmanager
def counting_step(routers: Iterable[Router]) -> Iterator[None]:
    """Enclose the forward passes of one optimizer step, over which balance losses at the level of the global batch count rows."""
    balances = [router.balance for router in routers]
    for balance in balances:
        balance.restart(in_step=True)
    try:
        yield
    finally:
        for balance in balances:
            balance.restart(in_step=False)
