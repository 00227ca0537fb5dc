"""The router: scores each token for each expert, chooses K experts, and balances their load.

Sources: top-k gating (Shazeer et al., arXiv:1701.06538); softmax scores, group-limited top-k and
the expert-level balance loss (DeepSeek-V2, arXiv:2405.04434, section 2.2); router z-loss (ST-MoE,
arXiv:2202.08906, eq. 5); sigmoid scores and loss-free balancing by a bias that only affects the
choice of experts (Wang et al., arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437); balance over the
global batch (Qiu et al., arXiv:2501.11873). Scores are computed in fp32 or wider, because bf16
cannot distinguish close scores.

Letters: T tokens, D hidden size, E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lather.device import Read, is_true, read
from lather.models.layers import Product, multiply, reset_parameters
from lather.models.saving.weight_gradients import Deferrable
from lather.shapes import Bool, Float, Int

SCORES = ("softmax", "sigmoid")
TINY = 1e-20
"""Added to sums of scores, which are 0 if all scores have underflowed; it changes no other fp32
sum."""
BALANCE_LEVELS = ("micro_batch", "sequence", "global_batch")


@dataclass(frozen=True)
class Padding:
    """The positions of a micro-batch that hold no token: they go to no expert, and count in no loss
    and no load."""

    mask_T: Bool[Tensor, " t"]
    """True at these positions."""
    num_tokens: int
    """Number of the other positions."""

    def fill(self, x_TN: Tensor, value: float) -> Tensor:
        """Return `x_TN` with this value in the rows of the padding, which get no gradient."""
        return x_TN.masked_fill(self.mask_T.unsqueeze(1), value)


@dataclass
class Routing:
    """The router's decision for T tokens. The losses are without their coefficients. Losses and
    counts leave out padding."""

    experts_TK: Int[Tensor, "t k"]
    """The experts of each token; -1 for padding, which is sent to no expert."""
    weights_TK: Float[Tensor, "t k"]
    """The weight of each of a token's experts in its output, in fp32 or wider; 0 for padding."""
    count_E: Int[Tensor, " e"]
    """Number of rows that each expert receives."""
    balance_loss: Float[Tensor, ""]
    """E * sum over experts of (share of rows) * (mean score); 1 for an even load."""
    z_loss: Float[Tensor, ""] | None
    """Mean over tokens of logsumexp(logits)^2; None unless `Router.takes_z_loss` is set, because
    autograd saves the logits for it."""
    balance_count_E: Int[Tensor, " e"] | None = None
    """Number of rows of each expert from which the balance loss computed the shares; None if it
    used those of each sequence."""
    num_pairs: int | None = None
    """Number of entries of `experts_TK` that are experts, where the batch has padding; None:
    all."""


class Router(Deferrable, nn.Module):
    """Scores each token for each expert and chooses the K best.

    Shapes: weight (E, D), optional bias (E). `normalize` makes a token's weights sum to 1, `scale`
    multiplies them. With `groups` (number of groups, groups per token), a token's experts come from
    the groups of neighboring experts that have the best single experts."""

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
        self.num_experts_per_tok, self.score, self.normalize, self.scale = (
            num_experts_per_tok,
            score,
            normalize,
            scale,
        )
        self.num_groups, self.num_groups_per_tok = groups
        self.takes_z_loss = False
        self.balance = LoadBalance("micro_batch")
        """The level of the balance loss; `Decoder.balance_load` sets it for all blocks."""
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", None)
        self._replayed_TK: Tensor | None = None
        self._repeated: Routing | None = None
        reset_parameters(self)

    def forward(
        self,
        x_TD: Float[Tensor, "t d"],
        num_sequences: int = 1,
        padding: Padding | None = None,
    ) -> Routing:
        """Route tokens. x consists of `num_sequences` sequences of equal length, which only the
        balance loss at sequence level uses."""
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(-1) if self.score == "softmax" else logits_TE.sigmoid()
        experts_TK = self._experts(scores_TE)
        weights_TK = scores_TE.gather(1, experts_TK if padding is None else experts_TK.clamp(min=0))
        if self.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
        if self.scale != 1:
            weights_TK = weights_TK * self.scale
        if padding is not None:
            experts_TK, weights_TK = padding.fill(experts_TK, -1), padding.fill(weights_TK, 0)
        count_E = count_rows(experts_TK, len(self.weight), padding)
        if self.score == "sigmoid":  # the balance loss needs scores that sum to 1
            scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)
        over_E = (
            self.balance.counted(count_E, num_sequences)
            if self._repeated is None
            else self._repeated.balance_count_E
        )
        if over_E is None:
            loss = sequence_balance_loss(scores_TE, experts_TK, num_sequences, padding)
        else:
            loss = balance_loss(scores_TE, over_E, padding)
        of_logits = z_loss(logits_TE, padding) if self.takes_z_loss else None
        num_pairs = None if padding is None else padding.num_tokens * self.num_experts_per_tok
        return Routing(experts_TK, weights_TK, count_E, loss, of_logits, over_E, num_pairs)

    def logits(self, x_TD: Float[Tensor, "t d"]) -> Float[Tensor, "t e"]:
        """Compute x W^T + b in fp32 or wider, for any dtype of x and autocast, saving x only in its
        own dtype."""
        product = Product(self.weight, self.bias, self.weight_gradients)
        return multiply(x_TD, torch.promote_types(x_TD.dtype, torch.float32), product)[0]

    def _experts(self, scores_TE: Tensor) -> Tensor:
        if self._repeated is not None:
            return self._repeated.experts_TK
        replayed_TK = self._replayed_TK
        if replayed_TK is None:
            return self._choose(scores_TE.detach())
        if len(replayed_TK) != len(scores_TE):
            raise ValueError(
                f"replay was given {len(replayed_TK)} tokens, but the batch has {len(scores_TE)}: "
                "give one row per token"
            )
        return replayed_TK.to(scores_TE.device)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        bias_E: Tensor | None = self.e_score_correction_bias
        if bias_E is not None:
            scores_TE = scores_TE + bias_E
        if self.num_groups > 1:
            grouped_TGE = scores_TE.unflatten(-1, (self.num_groups, -1))
            kept_TG = (
                grouped_TGE.amax(-1).topk(self.num_groups_per_tok, dim=-1, sorted=False).indices
            )
            allowed_TG = torch.zeros_like(grouped_TGE[..., 0], dtype=torch.bool).scatter_(
                1, kept_TG, value=True
            )
            scores_TE = grouped_TGE.masked_fill(~allowed_TG.unsqueeze(-1), -torch.inf).flatten(1)
        return scores_TE.topk(self.num_experts_per_tok, dim=-1).indices

    @contextlib.contextmanager
    def recompute(self, routing: Routing) -> Iterator[None]:
        """Inside this context, the router repeats `routing` for the same tokens, as activation
        checkpointing needs in backward.

        The tokens go to the same experts, and the balance loss uses the same row counts, without
        adding them or summing over ranks again."""
        before, self._repeated = self._repeated, routing
        try:
            yield
        finally:
            self._repeated = before

    @contextlib.contextmanager
    def replay(self, experts_TK: Int[Tensor, "t k"]) -> Iterator[None]:
        """Inside this context, tokens go to the given experts, with weights from their scores; for
        tests and benchmarks.

        Raises ValueError if they are not K different experts per token.
        """
        e, k = len(self.weight), self.num_experts_per_tok
        if experts_TK.dim() != 2 or experts_TK.shape[1] != k:
            raise ValueError(
                f"replay got experts of shape {tuple(experts_TK.shape)}: it must be (T, {k}), one "
                "row per token"
            )
        if experts_TK.numel():
            least, most = read(torch.stack(experts_TK.aminmax()), Read.RANGE).tolist()
            if least < 0 or most >= e:
                raise ValueError(f"replay got experts {least} to {most}: they must be 0 to {e - 1}")
        if is_true((experts_TK.sort(-1).values.diff(dim=-1) == 0).any(), Read.WRONG):
            raise ValueError(
                "replay got a token that has the same expert twice: give K different experts per "
                "token"
            )
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
        """After a step whose experts had `count_E` rows, raise the bias of underloaded experts by
        `rate`, and lower that of overloaded ones."""
        if self.e_score_correction_bias is None:
            raise RuntimeError(
                "the router has no correction bias: call enable_loss_free_balancing first"
            )
        load_E = count_E.to(self.e_score_correction_bias)
        self.e_score_correction_bias += rate * (load_E.mean() - load_E).sign()


def _check_router(
    num_experts: int, num_experts_per_tok: int, score: str, num_groups: int, num_groups_per_tok: int
) -> None:
    if score not in SCORES:
        raise ValueError(
            f"score = {score!r} is not valid: use one of {', '.join(map(repr, SCORES))}"
        )
    if num_experts % num_groups:
        raise ValueError(
            f"groups = ({num_groups}, {num_groups_per_tok}) is not valid: the number of groups "
            f"must divide the {num_experts} experts"
        )
    if not 1 <= num_groups_per_tok <= num_groups:
        raise ValueError(
            f"groups = ({num_groups}, {num_groups_per_tok}) is not valid: a token may have from 1 "
            f"to {num_groups} groups"
        )
    reachable = num_experts // num_groups * num_groups_per_tok
    if not 1 <= num_experts_per_tok <= reachable:
        raise ValueError(
            f"num_experts_per_tok = {num_experts_per_tok} is not valid: it must be from 1 to the "
            f"{reachable} experts in reach"
        )


def count_rows(
    experts_TK: Int[Tensor, "t k"],
    num_experts: int,
    padding: Padding | None = None,
) -> Int[Tensor, " e"]:
    """Count how often each expert occurs, -1 left out. (torch.bincount would wait for a CUDA
    device.)"""
    rows_G = experts_TK.flatten()
    if padding is None:
        return rows_G.new_zeros(num_experts).scatter_add_(0, rows_G, torch.ones_like(rows_G))
    is_expert_G = (rows_G >= 0).to(rows_G.dtype)
    return rows_G.new_zeros(num_experts).scatter_add_(0, rows_G.clamp(min=0), is_expert_G)


def z_loss(logits_TE: Float[Tensor, "t e"], padding: Padding | None = None) -> Float[Tensor, ""]:
    """Compute the mean over tokens of logsumexp(logits)^2; 0 for no tokens."""
    square_T = logits_TE.logsumexp(-1).square()
    if padding is None:
        return square_T.sum() / max(len(logits_TE), 1)
    return square_T.masked_fill(padding.mask_T, 0).sum() / max(padding.num_tokens, 1)


def balance_loss(
    scores_TE: Float[Tensor, "t e"],
    count_E: Int[Tensor, " e"],
    padding: Padding | None = None,
) -> Float[Tensor, ""]:
    """Compute DeepSeek-V2's expert-level loss (eq. 23 to 25, without coefficient); differentiable
    through the scores."""
    num_tokens = len(scores_TE) if padding is None else padding.num_tokens
    if padding is not None:
        scores_TE = padding.fill(scores_TE, 0)
    share_E = count_E.to(scores_TE.dtype) / count_E.sum().clamp(min=1)
    mean_score_E = scores_TE.sum(0) / max(num_tokens, 1)
    return len(count_E) * (share_E * mean_score_E).sum()


def sequence_balance_loss(
    scores_TE: Float[Tensor, "t e"],
    experts_TK: Int[Tensor, "t k"],
    num_sequences: int,
    padding: Padding | None = None,
) -> Float[Tensor, ""]:
    """Compute the mean over tokens of their sequence's loss, for sequences of equal length;
    differentiable through the scores.

    A sequence with padding so counts by its tokens, as it does in the cross entropy.
    """
    num_experts = scores_TE.shape[1]
    if len(scores_TE) % num_sequences:
        raise ValueError(
            f"num_sequences = {num_sequences} is not valid: it must divide the {len(scores_TE)} "
            "tokens"
        )
    if padding is not None:
        scores_TE = padding.fill(scores_TE, 0)
    scores_BSE, experts_BG = (
        scores_TE.unflatten(0, (num_sequences, -1)),
        experts_TK.reshape(num_sequences, -1),
    )
    count_BE = torch.zeros(
        num_sequences, num_experts, dtype=scores_TE.dtype, device=scores_TE.device
    )
    if padding is None:
        count_BE.scatter_add_(1, experts_BG, torch.ones_like(experts_BG, dtype=scores_TE.dtype))
        share_BE = count_BE / max(experts_BG.shape[1], 1)
        mean_score_BE = scores_BSE.sum(1) / max(scores_BSE.shape[1], 1)
        return num_experts * (share_BE * mean_score_BE).sum(-1).mean()
    count_BE.scatter_add_(1, experts_BG.clamp(min=0), (experts_BG >= 0).to(scores_TE.dtype))
    share_BE = count_BE / count_BE.sum(1, keepdim=True).clamp(min=1)
    # a sequence's mean score times its number of tokens is the sum of its scores
    return num_experts * (share_BE * scores_BSE.sum(1)).sum() / max(padding.num_tokens, 1)


class LoadBalance:
    """Counts the rows from which the balance loss is computed: those of a micro-batch, each
    sequence, or the global batch.

    Over the global batch, the experts' shares of rows are computed from all micro-batches of the
    step so far, on all ranks of `group`; the scores are those of the micro-batch. `counting_step`
    encloses a step. Autograd may be off in it, as in the forward pass of activation checkpointing.
    Outside a step, in validation, the loss is over the rows of its micro-batch.
    """

    def __init__(self, level: str, group: dist.ProcessGroup | None = None) -> None:
        if level not in BALANCE_LEVELS:
            raise ValueError(
                f"balance level {level!r} is not valid: use one of "
                f"{', '.join(map(repr, BALANCE_LEVELS))}"
            )
        self.level, self.group = level, group
        self._count_E: Tensor | None = None
        self._in_step = False

    def restart(self, *, in_step: bool) -> None:
        """Forget the rows that were counted; `in_step` tells whether a step begins."""
        self._count_E, self._in_step = None, in_step

    def counted(self, count_E: Int[Tensor, " e"], num_sequences: int) -> Int[Tensor, " e"] | None:
        """Add a micro-batch's rows to those of the step; return the counts from which its shares
        are computed. None: from each sequence."""
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
    """Enclose the forward passes of one optimizer step, over which balance losses at the level of
    the global batch count rows."""
    balances = [router.balance for router in routers]
    for balance in balances:
        balance.restart(in_step=True)
    try:
        yield
    finally:
        for balance in balances:
            balance.restart(in_step=False)
