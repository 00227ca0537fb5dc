"""The load of the experts: row counts, balance losses, and the rows over which they are taken.

Sources: the expert-level balance loss (DeepSeek-V2, arXiv:2405.04434, eq. 23 to 25); router z-loss
(ST-MoE, arXiv:2202.08906, eq. 5); balance over the global batch (Qiu et al., arXiv:2501.11873).
Losses are without their coefficients. `routing` calls all of this.

Under context parallelism the counts of a micro-batch or of a sequence are those of all context
ranks, and so is the number of tokens by which sums are divided; the sums themselves are over a
rank's tokens, so that the ranks' losses add up to the loss of all tokens.

Letters: T tokens, B sequences, S positions, E experts, K experts per token, G pairs of a token and
an expert.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lather.models.context import Context
from lather.models.token_positions import Padding
from lather.shapes import Float, Int

BALANCE_LEVELS = ("micro_batch", "sequence", "global_batch")


def count_rows(
    experts_TK: Int[Tensor, "t k"], num_experts: int, padding: Padding | None = None
) -> Int[Tensor, " e"]:
    """Count how often each expert occurs, without the -1 of padding. (torch.bincount would wait for
    a CUDA device.)"""
    expert_G = experts_TK.flatten()
    if padding is None:
        return expert_G.new_zeros(num_experts).scatter_add_(0, expert_G, torch.ones_like(expert_G))
    is_expert_G = (expert_G >= 0).to(expert_G.dtype)
    return expert_G.new_zeros(num_experts).scatter_add_(0, expert_G.clamp(min=0), is_expert_G)


def z_loss(
    logits_TE: Float[Tensor, "t e"],
    padding: Padding | None = None,
    context: Context | None = None,
) -> Float[Tensor, ""]:
    """Compute the mean over tokens of logsumexp(logits)^2; 0 for no tokens."""
    square_T = logits_TE.logsumexp(-1).square()
    if padding is not None:
        square_T = square_T.masked_fill(padding.mask_T, 0)
    return square_T.sum() / _divisor(logits_TE, padding, context)


def balance_loss(
    scores_TE: Float[Tensor, "t e"],
    count_E: Int[Tensor, " e"],
    padding: Padding | None = None,
    context: Context | None = None,
) -> Float[Tensor, ""]:
    """Compute DeepSeek-V2's expert-level loss; differentiable through the scores."""
    if padding is not None:
        scores_TE = padding.fill(scores_TE, 0)
    share_E = count_E.to(scores_TE.dtype) / count_E.sum().clamp(min=1)
    mean_score_E = scores_TE.sum(0) / _divisor(scores_TE, padding, context)
    return len(count_E) * (share_E * mean_score_E).sum()


def sequence_balance_loss(
    scores_TE: Float[Tensor, "t e"],
    experts_TK: Int[Tensor, "t k"],
    num_sequences: int,
    padding: Padding | None = None,
    context: Context | None = None,
) -> Float[Tensor, ""]:
    """Compute the mean over tokens of the balance loss of their sequence; differentiable through
    the scores. Sequences have equal lengths, padding included. Collective over context ranks.

    So a sequence with padding counts by its tokens, as it does in the cross entropy.
    """
    num_tokens, num_experts = scores_TE.shape
    if num_tokens % num_sequences:
        raise ValueError(
            f"num_sequences = {num_sequences} is not valid: it must divide the {num_tokens} tokens"
        )
    expert_BG = experts_TK.reshape(num_sequences, -1)
    num_ranks = 1 if context is None else context.size
    count_BE = scores_TE.new_zeros(num_sequences, num_experts)
    if padding is None:
        count_BE.scatter_add_(1, expert_BG, torch.ones_like(expert_BG, dtype=scores_TE.dtype))
    else:
        count_BE.scatter_add_(1, expert_BG.clamp(min=0), (expert_BG >= 0).to(scores_TE.dtype))
    if context is not None:
        count_BE = context.add_up(count_BE)
    if padding is None:
        scores_BSE = scores_TE.unflatten(0, (num_sequences, -1))
        share_BE = count_BE / max(expert_BG.shape[1] * num_ranks, 1)
        mean_score_BE = scores_BSE.sum(1) / max(scores_BSE.shape[1] * num_ranks, 1)
        return num_experts * (share_BE * mean_score_BE).sum(-1).mean()
    scores_BSE = padding.fill(scores_TE, 0).unflatten(0, (num_sequences, -1))
    share_BE = count_BE / count_BE.sum(1, keepdim=True).clamp(min=1)
    # a sequence's mean score times its number of tokens is the sum of its scores
    divisor = _divisor(scores_TE, padding, context)
    return num_experts * (share_BE * scores_BSE.sum(1)).sum() / divisor


def _divisor(x_TE: Tensor, padding: Padding | None, context: Context | None) -> int:
    """Return the number of tokens of all context ranks, without padding, or 1 if there are none."""
    if padding is not None:
        return max(padding.num_tokens_of_all, 1)
    return max(len(x_TE) * (1 if context is None else context.size), 1)


class LoadBalance:
    """Counts the rows from which the balance loss is computed: those of a micro-batch, each
    sequence, or the global batch.

    Over the global batch, the experts' shares of rows are computed from all micro-batches of the
    step so far, on all ranks of `group`; the scores are those of the micro-batch. `counting_step`
    of `routing` encloses a step. Autograd may be off in it, as in the forward pass of activation
    checkpointing. Outside a step, in validation, the loss is over the rows of its micro-batch.
    """

    def __init__(
        self,
        level: str,
        group: dist.ProcessGroup | None = None,
        context: Context | None = None,
    ) -> None:
        """`context`: the context ranks, which are part of `group`."""
        if level not in BALANCE_LEVELS:
            raise ValueError(
                f"balance level {level!r} is not valid: use one of "
                f"{', '.join(map(repr, BALANCE_LEVELS))}"
            )
        self.level, self.group, self.context = level, group, context
        self._count_E: Tensor | None = None
        self._in_step = False

    def restart(self, *, in_step: bool) -> None:
        """Forget the rows that were counted; `in_step` tells whether a step begins."""
        self._count_E, self._in_step = None, in_step

    def add(self, count_E: Int[Tensor, " e"], num_sequences: int) -> Int[Tensor, " e"] | None:
        """Add a micro-batch's rows to those of the step; return the counts from which its shares
        are computed. None: from each sequence."""
        if self.level == "sequence" and num_sequences > 1:
            return None
        if self.level != "global_batch" or not self._in_step:
            return count_E if self.context is None else self.context.add_up(count_E)
        if self.group is not None:
            count_E = count_E.clone()
            dist.all_reduce(count_E, group=self.group)
        self._count_E = count_E = count_E if self._count_E is None else self._count_E + count_E
        return count_E
