"""Cross entropy per token, and its gradient, which overwrites the logits, in Triton: the formulas
of `reference.py`.

There is one program per row. Its first pass keeps a running maximum and sum of exponentials
(Milakov and Gimelshein, arXiv:1805.02867). If the gradient is needed, a second pass overwrites the
row, which is then mostly in the L2 cache (200 KB in bf16 for a large vocabulary). Rows must be
contiguous. The reference handles fp64.
"""

# ruff: noqa: PLR0913, PLR0917 - kernels cannot take structs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lather.kernels.launch import launch

BLOCK = 4096


def token_losses(
    logits_TV: Tensor, labels_T: Tensor, scale: Tensor | None = None, *, z_loss: float
) -> Tensor:
    """Do the same as in `reference.py`."""
    num_tokens, vocabulary = logits_TV.shape
    losses_T = logits_TV.new_empty(num_tokens, dtype=torch.float32)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    factor = losses_T if scale is None else scale.float()  # an unused pointer must still be valid
    arguments = (
        logits_TV,
        logits_TV.stride(0),
        labels_T,
        losses_T,
        factor,
        float(z_loss),
        vocabulary,
    )
    options = {
        "WITH_GRADIENT": scale is not None,
        "BLOCK": block,
        "num_warps": 8 if block >= 2048 else 4,
    }
    launch(_cross_entropy, (num_tokens,), *arguments, **options)
    return losses_T


@triton.jit
def _cross_entropy(
    logits,
    row_stride,
    labels,
    losses,
    scale,
    z_loss,
    vocabulary,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)

    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    label_logit = tl.full((), 0.0, tl.float32)
    for first in range(0, vocabulary, BLOCK):
        inside = first + columns < vocabulary
        x = tl.load(start + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
        label_logit += tl.sum(tl.where(first + columns == label, x, 0.0))
        new_largest = tl.maximum(largest, tl.max(x))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift))
        largest = new_largest
    logsumexp = largest + tl.log(total)
    loss = logsumexp - label_logit + z_loss * logsumexp * logsumexp
    tl.store(losses + row, tl.where(label >= 0, loss, 0.0))

    if WITH_GRADIENT:
        weight = tl.where(label >= 0, tl.load(scale), 0.0)
        factor = weight * (1.0 + 2.0 * z_loss * logsumexp)
        for first in range(0, vocabulary, BLOCK):
            inside = first + columns < vocabulary
            x = tl.load(start + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = factor * tl.exp(x - logsumexp) - tl.where(
                first + columns == label, weight, 0.0
            )
            gradient = tl.where(weight == 0.0, 0.0, gradient)
            tl.store(start + first + columns, gradient.to(logits.dtype.element_ty), mask=inside)
