"""The largest attention logit of each head, and what QK-clip needs to keep it below a threshold.

Source: QK-clip (Kimi K2, arXiv:2507.20534, section 2.1). Let S be the largest logit of a head in a
step, the scale of attention included, and gamma = min(1, tau / S). After the optimizer's step the
head's logits are multiplied by gamma, once and for all, in its weights:

    two projections of the head's own   each times sqrt(gamma)
    one of its own, one shared          its own times gamma, the shared one is left as it is

so that no other head changes. Latent attention has both: the parts without rotary embedding are the
head's own, the rotary key is shared by all heads. With grouped queries the heads of a group share a
key, which can take what all of them have in common: it is multiplied by sqrt(max gamma) of its
group, each query by the rest of its gamma. With a key per head that is sqrt(gamma) for both, and
with a head in the group that needs no clipping the key stays as it is.

The largest logit is exact: products of all queries and keys that attend to each other are computed
again, in blocks that take little memory, in the dtype of attention's own. Bounds from norms of
queries and keys would cost less, but are several times too large, and would clip heads that need
none.

Letters: B sequences, S positions, H heads, G key-value heads, R heads per key-value head, N width
of a head's query and key, Q queries of a block, T keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lather.models.token_positions import SequenceLayout
from lather.shapes import Float, Int

BLOCK_LOGITS = 2**22
"""Logits that are computed at a time. Where that is less than the elements of all queries, it is as
many as these: enough to keep a GPU busy, for no more memory than queries take."""


class MeasuredAttention(nn.Module):
    """An attention layer whose largest logits can be measured, and clipped."""

    num_heads: int
    """Number of query heads."""
    scale: float
    """Factor of the products of queries and keys; above 0."""
    window: int | None = None
    """Number of the last tokens that a token attends to; None: all."""
    largest_H: Float[Tensor, " h"] | None = None
    """While logits are measured, the largest of each head so far, updated in place."""

    @torch.no_grad()
    def measure(
        self, q_BSHN: Tensor, k_BSGN: Tensor, v_BSGU: Tensor, layout: SequenceLayout
    ) -> None:
        """Compute the logits of queries and keys, if they are measured; those of padding do not
        count. As in attention, the products are in the values' dtype."""
        if self.largest_H is not None:
            q_BHSN, k_BGSN = (
                x.to(v_BSGU.dtype).transpose(1, 2).contiguous() for x in (q_BSHN, k_BSGN)
            )
            first_BS = layout.first_keys(self.window)
            for queries, start in layout.runs():
                first = None if first_BS is None else first_BS[:, queries]
                products_H = largest_products(
                    q_BHSN[:, :, queries], k_BGSN, first, self.window, start
                )
                logits_H = self.scale * products_H.to(self.largest_H.dtype)
                torch.maximum(self.largest_H, logits_H, out=self.largest_H)

    def clip_factors(self, gamma_H: Float[Tensor, " h"]) -> Mapping[str, Float[Tensor, " x"]]:
        """Return, by name of a projection, the factor of each of its rows that multiplies the
        logits of each head by gamma. Empty if a norm of queries and keys undoes such factors."""
        raise NotImplementedError


def measured_layers(model: nn.Module) -> dict[str, MeasuredAttention]:
    """Return the layers of a model, or of a part of it, whose logits can be measured, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MeasuredAttention)
    }


@contextmanager
def not_measuring(layer: nn.Module) -> Iterator[None]:
    """Inside this context, in which a forward pass is repeated, no logits are measured."""
    if not isinstance(layer, MeasuredAttention):
        yield
        return
    before, layer.largest_H = layer.largest_H, None
    try:
        yield
    finally:
        layer.largest_H = before


def largest_products(
    q_BHSN: Float[Tensor, "b h s n"],
    k_BGTN: Float[Tensor, "b g t n"],
    first_BS: Int[Tensor, "#b s"] | None,
    window: int | None = None,
    offset: int = 0,
) -> Float[Tensor, " h"]:
    """Return the largest product of a query and a key of each head, where query s meets the keys
    from first_BS[:, s] (None: from 0) to `offset` + s, at most `window` of them. H is a multiple of
    G."""
    batch, num_heads, length, width = q_BHSN.shape
    if not q_BHSN.numel():
        return q_BHSN.new_full((num_heads,), -torch.inf)
    q_BGRSN = q_BHSN.unflatten(1, (k_BGTN.shape[1], -1))
    num_keys = offset + length
    of_queries = width * length // num_keys  # as many logits as queries have elements
    size = max(1, of_queries, BLOCK_LOGITS // (batch * num_heads * num_keys))
    largest_GR = q_BHSN.new_full(q_BGRSN.shape[1:3], -torch.inf)
    for start in range(0, length, size):
        end = min(start + size, length)
        stop, begin = offset + end, max(0, offset + start - (window or offset + length) + 1)
        q_BGxN = q_BGRSN[:, :, :, start:end].flatten(2, 3)
        logits_BGxT = q_BGxN @ k_BGTN[:, :, begin:stop].mT
        logits_BGRQT = logits_BGxT.unflatten(2, (-1, end - start))
        key_T = torch.arange(begin, stop, device=q_BHSN.device)
        query_Q = key_T[start - end :]
        logits_BGRQT[..., start - end :].masked_fill_(query_Q > query_Q[:, None], -torch.inf)
        if first_BS is not None:
            hidden_BQT = key_T < first_BS[:, start:end, None]
            logits_BGRQT.masked_fill_(hidden_BQT[:, None, None], -torch.inf)
        largest_GR = torch.maximum(largest_GR, logits_BGRQT.amax((0, 3, 4)))
    return largest_GR.flatten()
