"""The functions that segments run, and the losses from which a backward pass starts.

Letters: T tokens, R rows, K experts per token, B sequences, S positions, D hidden size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lather.kernels.block_scaled import BlockScaled
from lather.kernels.cross_entropy import divided
from lather.kernels.linear_cross_entropy import linear_cross_entropy, linear_token_losses
from lather.models.moe import MoE
from lather.models.mtp import MultiTokenPrediction
from lather.models.saving.embedding_gradient import look_up
from lather.models.scaled_products import Rows
from lather.pipeline.chunk import MicroBatch
from lather.pipeline.tape import Outputs
from lather.shapes import Float


def head_loss(norm: nn.Module, head: nn.Linear, batch: MicroBatch, x_BSD: Tensor) -> Outputs:
    """Return the loss of the labels, and the head's input."""
    x_BSD = norm(x_BSD)
    if batch.weights_BS is None and batch.pairs is None:
        loss = linear_cross_entropy(
            x_BSD, head.weight, batch.labels_BS, normalizer=batch.normalizer, accumulate=True
        )
    else:
        nats_BS = linear_token_losses(x_BSD, head.weight, batch.labels_BS, accumulate=True)
        if batch.pairs is not None:
            loss = batch.pairs.loss(nats_BS, batch.normalizer, batch.layout.context)
        else:
            assert batch.weights_BS is not None
            weighted_BS = nats_BS * batch.weights_BS.to(nats_BS.dtype)
            loss = divided(weighted_BS.flatten().sum(), batch.normalizer)
    return loss, x_BSD


def router_loss_gradients(losses: Outputs, batch: MicroBatch) -> list[Tensor | None]:
    """Return the gradients of `Routing.losses`; None for a loss with weight 0."""
    weights = (batch.balance_weight, batch.z_weight)
    return [
        torch.ones_like(loss).mul_(weight) if isinstance(weight, Tensor) or weight else None
        for loss, weight in zip(losses, weights, strict=False)
    ]


def call(function: Callable[[Tensor], Tensor], x: Tensor) -> Outputs:
    return (function(x),)


def embed_tokens(embedding: nn.Embedding, tokens_BS: Tensor) -> Outputs:
    return (look_up(embedding.weight, tokens_BS),)


def input_of_experts(
    rows: Rows, dtype: torch.dtype
) -> tuple[Float[Tensor, "r d"], BlockScaled | None]:
    """Return the experts' input, whose gradient is in `dtype`. For rows in FP8, whose gradient
    autograd would round, the input is a stand-in with one element of memory, and the rows are
    returned with it."""
    if isinstance(rows, BlockScaled):
        return rows.scales.new_empty((), dtype=dtype).expand(rows.values.shape), rows
    return rows, None


def run_experts(
    moe: MoE,
    experts_RK: Tensor,
    num_pairs: int | None,
    received: BlockScaled | None,
    x_RD: Tensor,
    weights_RK: Tensor,
) -> Outputs:
    return (moe.experts(x_RD, experts_RK, weights_RK, num_pairs, received),)


def combine_embedding(
    embed: Callable[[], Outputs], mtp: MultiTokenPrediction, state_BSD: Tensor
) -> Outputs:
    return (mtp(*embed(), state_BSD),)
