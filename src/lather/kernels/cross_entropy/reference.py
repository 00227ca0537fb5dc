"""Cross entropy per token, and its gradient, which overwrites the logits, in torch: the
specification.

For a row l of logits with label y, in fp32 or wider:

    Z = logsumexp(l)
    loss = Z - l[y] + z_loss Z^2
    dloss/dl = softmax(l) (1 + 2 z_loss Z) - onehot(y)

A row whose label is negative has loss 0 and gradient 0, even if its logits are NaN.

Letters: T tokens, V vocabulary, N rows of a block, C columns. Blocks of a few rows are processed in
turn, so that there is never an fp32 copy of all bf16 logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import blocks, wide_dtype

BLOCK = 2**18
"""Elements of a block, which has at least one row: 1 MiB in fp32, which stays in a core's cache."""


def token_losses(
    logits_TV: Tensor, labels_T: Tensor, scale: Tensor | None = None, *, z_loss: float
) -> Tensor:
    """Return the loss of each token, (T,) in fp32 or wider. With `scale`, a 0-dim tensor, overwrite
    the logits with `scale` times their gradient, rounded once to their dtype; otherwise they are
    not changed."""
    losses_T = logits_TV.new_empty(len(logits_TV), dtype=wide_dtype(logits_TV))
    for rows in blocks(logits_TV, BLOCK):
        tile_NV, labels_N = logits_TV[rows].to(losses_T.dtype), labels_T[rows]
        logsumexp_N = tile_NV.logsumexp(1)
        losses_T[rows] = losses(logsumexp_N, label_logits(tile_NV, labels_N), labels_N, z_loss)
        if scale is not None:
            scale_N = torch.where(labels_N >= 0, scale.to(losses_T.dtype), 0)
            softmax_gradient_(tile_NV, labels_N, logsumexp_N, scale_N, z_loss)
            if logits_TV.dtype != tile_NV.dtype:
                logits_TV[rows] = tile_NV
    return losses_T


def losses(logsumexp_N: Tensor, label_logits_N: Tensor, labels_N: Tensor, z_loss: float) -> Tensor:
    """Return the loss of each row from its logsumexp and the logit of its label; 0 if the label is
    negative."""
    losses_N = logsumexp_N - label_logits_N + z_loss * logsumexp_N.square()
    return torch.where(labels_N >= 0, losses_N, 0)


def label_logits(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return the logit of each row's label; any number if the label is not among the columns."""
    return logits_NC.gather(1, labels_N.clamp(0, logits_NC.shape[1] - 1)[:, None]).squeeze(1)


def softmax_gradient_(
    logits_NC: Tensor, labels_N: Tensor, logsumexp_N: Tensor, scale_N: Tensor, z_loss: float
) -> None:
    """Overwrite columns of the logits with scale (softmax (1 + 2 z_loss Z) - onehot), where Z is
    the logsumexp over all columns.

    Rows with `scale` 0 become exactly 0. The onehot of a label that is not among the columns is
    zero.
    """
    factor_N = scale_N * (1 + 2 * z_loss * logsumexp_N)
    logits_NC.sub_(logsumexp_N[:, None]).exp_().mul_(factor_N[:, None])
    column_N = labels_N.clamp(0, logits_NC.shape[1] - 1)
    logits_NC.scatter_add_(
        1, column_N[:, None], torch.where(column_N == labels_N, -scale_N, 0)[:, None]
    )
    logits_NC.masked_fill_((scale_N == 0)[:, None], 0)
