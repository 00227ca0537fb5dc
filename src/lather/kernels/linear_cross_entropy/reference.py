"""The elementwise work on one tile of logits, in torch: the specification.

A tile has N tokens and C adjacent columns of the vocabulary, the first of which is number `first`.
`update_logsumexp_`, called for all tiles of a row, computes its logsumexp Z and the logit of its
label; `softmax_gradient` then computes the gradient of each tile,

    scale (softmax(l) (1 + 2 z_loss Z) - onehot(label)).

Both overwrite the tile, so that only one tensor of its size is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.cross_entropy.reference import label_logits, softmax_gradient_


def update_logsumexp_(
    max_N: Tensor,
    sum_N: Tensor,
    label_logit_N: Tensor,
    logits_NC: Tensor,
    labels_N: Tensor,
    first: int,
) -> None:
    """Update in place the running maximum, the sum of exponentials relative to it (Milakov and
    Gimelshein, arXiv:1805.02867) and the logit of the label, which start as -inf, 0 and 0.
    `logits_NC` is overwritten.
    """
    column_N = labels_N - first
    inside_N = (column_N >= 0) & (column_N < logits_NC.shape[1])
    label_logit_N.copy_(torch.where(inside_N, label_logits(logits_NC, column_N), label_logit_N))
    new_max_N = torch.maximum(max_N, logits_NC.amax(1))
    shift_N = new_max_N.masked_fill(new_max_N == -torch.inf, 0)
    sum_N.mul_((max_N - shift_N).exp()).add_(logits_NC.sub_(shift_N[:, None]).exp_().sum(1))
    max_N.copy_(new_max_N)


def softmax_gradient(
    logits_NC: Tensor,
    labels_N: Tensor,
    first: int,
    logsumexp_N: Tensor,
    scale_N: Tensor,
    *,
    z_loss: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the tile in `dtype`, exactly 0 in rows whose scale is 0. `logits_NC`
    is overwritten, and returned if it has this dtype."""
    softmax_gradient_(logits_NC, labels_N - first, logsumexp_N, scale_N, z_loss)
    return logits_NC.to(dtype)
