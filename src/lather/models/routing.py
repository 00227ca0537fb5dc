"""The router: scores each token for each expert, and chooses K experts.

Sources: top-k gating (Shazeer et al., arXiv:1701.06538); softmax scores and group-limited top-k
(DeepSeek-V2, arXiv:2405.04434, section 2.2); sigmoid scores and loss-free balancing by a bias that
only affects the choice of experts (Wang et al., arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437).
Scores are computed in fp32 or wider, because bf16 cannot distinguish close scores. `balance` has
the losses that even out the load.

Letters: T tokens, D hidden size, E experts, K experts per token, G groups of experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from lather.device import Read, is_true, read
from lather.models.balance import (
    LoadBalance,
    balance_loss,
    count_rows,
    sequence_balance_loss,
    z_loss,
)
from lather.models.layers import Product, multiply, reset_parameters
from lather.models.saving.weight_gradients import Deferrable
from lather.models.token_positions import Padding
from lather.shapes import Float, Int

SCORES = ("softmax", "sigmoid")
CORRECTION_BIAS = "e_score_correction_bias"
"""Name of the buffer that is added to the scores only for the choice of experts."""
TINY = 1e-20
"""Added to sums of scores, which are 0 if all scores have underflowed; it changes no other fp32
sum."""


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

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """The balance loss, and the z-loss if it is taken."""
        return (self.balance_loss,) if self.z_loss is None else (self.balance_loss, self.z_loss)


@dataclass(frozen=True)
class Choice:
    """How a router chooses a token's experts by their scores."""

    num_groups: int = 1
    """Number of groups of neighboring experts."""
    groups_per_token: int = 1
    """Number of groups, those with the best scores, that a token's experts come from."""
    best_of_group: int = 1
    """A group's score is the sum of those of its so many best experts."""
    correction_bias: bool = False
    """Add the buffer `e_score_correction_bias` (E) to the scores for the choice, not for the
    weights. Only `Router.update_correction_bias` moves it."""


ANY_EXPERT = Choice()


class Router(Deferrable, nn.Module):
    """Scores each token for each expert and chooses the K best.

    Shapes: weight (E, D), optional bias (E). `normalize` makes a token's weights sum to 1, `scale`
    multiplies them."""

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
        choice: Choice = ANY_EXPERT,
    ) -> None:
        super().__init__()
        _check_options(num_experts, num_experts_per_tok, score, choice)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.num_experts_per_tok = num_experts_per_tok
        self.score, self.normalize, self.scale = score, normalize, scale
        self.choice = choice
        self.least_sum = 0.0
        """Weights that are normalized are divided by their sum, or by this if it is greater."""
        self.takes_z_loss = False
        self.balance = LoadBalance("micro_batch")
        """The level of the balance loss; `Decoder.balance_load` sets it for all blocks."""
        self.e_score_correction_bias: Tensor | None
        bias_E = torch.zeros(num_experts) if choice.correction_bias else None
        self.register_buffer(CORRECTION_BIAS, bias_E)
        self._forced_TK: Tensor | None = None
        self._repeated: Routing | None = None
        reset_parameters(self)

    def forward(
        self,
        x_TD: Float[Tensor, "t d"],
        num_sequences: int = 1,
        padding: Padding | None = None,
        repeats_TK: Int[Tensor, "t k"] | None = None,
    ) -> Routing:
        """Route tokens. x consists of `num_sequences` sequences of equal length, which only the
        balance loss at sequence level uses. `repeats_TK`: K different experts of each token that
        take the place of the router's own choice, or -1 in place of all; their weights are still
        those of the router's scores, through which gradients flow."""
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(-1) if self.score == "softmax" else logits_TE.sigmoid()
        experts_TK = self._experts(scores_TE, repeats_TK)
        weights_TK = scores_TE.gather(1, experts_TK if padding is None else experts_TK.clamp(min=0))
        if self.normalize:
            sum_T1 = weights_TK.sum(-1, keepdim=True) + TINY
            if self.least_sum:
                sum_T1 = sum_T1.clamp(min=self.least_sum)
            weights_TK = weights_TK / sum_T1
        if self.scale != 1:
            weights_TK = weights_TK * self.scale
        num_pairs = None
        if padding is not None:
            experts_TK, weights_TK = padding.fill(experts_TK, -1), padding.fill(weights_TK, 0)
            num_pairs = padding.num_tokens * self.num_experts_per_tok
        count_E = count_rows(experts_TK, len(self.weight), padding)
        if self.score == "sigmoid":  # the balance loss needs scores that sum to 1
            scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)
        rest = padding, self.balance.context
        if self._repeated is None:
            balance_count_E = self.balance.add(count_E, num_sequences)
        else:
            balance_count_E = self._repeated.balance_count_E
        if balance_count_E is None:
            balance = sequence_balance_loss(scores_TE, experts_TK, num_sequences, *rest)
        else:
            balance = balance_loss(scores_TE, balance_count_E, *rest)
        z = z_loss(logits_TE, *rest) if self.takes_z_loss else None
        return Routing(experts_TK, weights_TK, count_E, balance, z, balance_count_E, num_pairs)

    def logits(self, x_TD: Float[Tensor, "t d"]) -> Float[Tensor, "t e"]:
        """Compute x W^T + b in fp32 or wider, for any dtype of x and autocast. x is not saved in a
        wider dtype."""
        product = Product(self.weight, self.bias, self.weight_gradients)
        return multiply(x_TD, torch.promote_types(x_TD.dtype, torch.float32), product)[0]

    def _experts(self, scores_TE: Tensor, repeats_TK: Tensor | None) -> Tensor:
        if self._repeated is not None:
            return self._repeated.experts_TK
        if repeats_TK is not None:
            chosen_TK = self._choose(scores_TE.detach())
            return torch.where(repeats_TK[:, :1] < 0, chosen_TK, repeats_TK.to(chosen_TK))
        if self._forced_TK is None:
            return self._choose(scores_TE.detach())
        if len(self._forced_TK) != len(scores_TE):
            raise ValueError(
                f"replay was given {len(self._forced_TK)} tokens, but the batch has "
                f"{len(scores_TE)}: give one row per token"
            )
        return self._forced_TK.to(scores_TE.device)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        bias_E: Tensor | None = self.e_score_correction_bias
        if bias_E is not None:
            scores_TE = scores_TE + bias_E
        choice = self.choice
        if choice.num_groups > 1:
            scores_TGx = scores_TE.unflatten(-1, (choice.num_groups, -1))
            score_TG = scores_TGx.topk(choice.best_of_group, dim=-1, sorted=False).values.sum(-1)
            chosen = score_TG.topk(choice.groups_per_token, dim=-1, sorted=False).indices
            allowed_TG = torch.zeros_like(score_TG, dtype=torch.bool)
            allowed_TG.scatter_(1, chosen, value=True)
            scores_TE = scores_TGx.masked_fill(~allowed_TG.unsqueeze(-1), -torch.inf).flatten(1)
        return scores_TE.topk(self.num_experts_per_tok, dim=-1).indices

    def recompute(self, routing: Routing) -> contextlib.AbstractContextManager[None]:
        """Inside this context, the router repeats `routing` for the same tokens, as activation
        checkpointing needs in backward.

        The tokens go to the same experts, and the balance loss uses the same row counts, without
        adding them or summing over ranks again."""
        return self._with("_repeated", routing)

    def replay(self, experts_TK: Int[Tensor, "t k"]) -> contextlib.AbstractContextManager[None]:
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
        return self._with("_forced_TK", experts_TK)

    @contextlib.contextmanager
    def _with(self, attribute: str, value: Any) -> Iterator[None]:
        before = getattr(self, attribute)
        setattr(self, attribute, value)
        try:
            yield
        finally:
            setattr(self, attribute, before)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert the module, but keep the correction bias in fp32 or wider: bf16 cannot hold its
        small steps."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype.itemsize < 4:
            self.e_score_correction_bias = before.to(after.device)
        return self

    def enable_loss_free_balancing(self) -> None:
        """Create the bias that `update_correction_bias` changes, if the model has none; it is part
        of the state dict."""
        if self.e_score_correction_bias is None:
            self.e_score_correction_bias = torch.zeros(len(self.weight), device=self.weight.device)

    @torch.no_grad()
    def update_correction_bias(self, count_E: Int[Tensor, " e"], rate: float) -> None:
        """After a step whose experts had `count_E` rows, raise the bias of underloaded experts by
        `rate`, and lower the bias of overloaded experts."""
        assert self.e_score_correction_bias is not None, "call enable_loss_free_balancing first"
        load_E = count_E.to(self.e_score_correction_bias)
        self.e_score_correction_bias += rate * (load_E.mean() - load_E).sign()


def _check_options(num_experts: int, num_experts_per_tok: int, score: str, choice: Choice) -> None:
    num_groups, groups_per_token = choice.num_groups, choice.groups_per_token
    if score not in SCORES:
        raise ValueError(
            f"score = {score!r} is not valid: use one of {', '.join(map(repr, SCORES))}"
        )
    if num_experts % num_groups or not 1 <= groups_per_token <= num_groups:
        raise ValueError(
            f"groups = ({num_groups}, {groups_per_token}) is not valid: the number of groups "
            f"must divide the {num_experts} experts, and a token may have from 1 to {num_groups} "
            "groups"
        )
    reachable = num_experts // num_groups * groups_per_token
    if not 1 <= num_experts_per_tok <= reachable:
        raise ValueError(
            f"num_experts_per_tok = {num_experts_per_tok} is not valid: it must be from 1 to the "
            f"{reachable} experts in reach"
        )


@contextlib.contextmanager
def counting_step(routers: Iterable[Router]) -> Iterator[None]:
    """Enclose the forward passes of an optimizer step, over which balance losses at the level of
    the global batch count rows."""
    balances = [router.balance for router in routers]
    for balance in balances:
        balance.restart(in_step=True)
    try:
        yield
    finally:
        for balance in balances:
            balance.restart(in_step=False)
