"""Causal attention of given queries, keys and values: torch's fused kernels, whole or in pieces, or
flex attention.

A `lather.models.token_positions.SequenceLayout` says which tokens a token attends to. Plain causal
attention needs no mask. Windows, documents and slices of context ranks are pieces on a CPU, and
flex attention's block mask on CUDA, where cuDNN attends to plain slices if it takes them
(`lather.models.sliced_attention`). A boolean mask of S x T elements remains for short rows on a
CPU; on CUDA with a cache, because flex attention would be compiled again as T grows, and for what
flex attention does not take (fp64, narrow heads). With sinks (GPT-OSS, arXiv:2508.10925) the
softmax includes a learned logit per head that has no value.

Letters: B sequences, S positions, H heads, G key-value heads, N width of a head's query and key, U
width of a head's value, T keys: S, or all slots of a cache, or the tokens of all context ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.device import is_gpu
from lather.models.attention_pieces import attend_in_pieces
from lather.models.flex_attention import FLEX_DTYPES, FLEX_MIN_WIDTH, flexible_attention
from lather.models.fused_attention import fused_attention
from lather.models.saving.recomputed import Make, Recomputation
from lather.models.sliced_attention import attend_in_slices, cudnn_takes_slices
from lather.models.token_positions import SequenceLayout
from lather.shapes import Float


def attend(
    q_BSHN: Float[Tensor, "b s h n"],
    k_BTGN: Float[Tensor, "b t g n"],
    v_BTGU: Float[Tensor, "b t g u"],
    layout: SequenceLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Float[Tensor, " h"] | None = None,
    recipe: Recipe | None = None,
) -> Float[Tensor, "b s h u"]:
    """Compute softmax(scale q k^T) v over the keys that the layout lets each token attend to; H is
    a multiple of G.

    `scale` None means 1 / sqrt(N). With `window` a token attends to itself and to window - 1
    earlier tokens. `sinks_H` are the logits of an additional key per head, whose value is zero. The
    result is computed in the values' dtype, because under autocast norms and biases may have
    widened queries and keys. Queries, keys and values that `recipe` can recompute are not saved for
    backward.
    """
    scale = q_BSHN.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (_by_head(x, v_BTGU.dtype) for x in (q_BSHN, k_BTGN, v_BTGU))
    register = None if recipe is None else recipe.register
    if sinks_H is None and layout.is_plain(window):
        y_BHSU = fused_attention(q, k, v, None, scale, register)
    elif (
        sinks_H is None
        and layout.is_sliced(window)
        and cudnn_takes_slices((q, k, v), starts := [start for _, start in layout.runs()])
    ):
        y_BHSU = attend_in_slices(q, k, v, starts, scale, register)
    elif (
        is_gpu(v)
        and layout.cache is None
        and v.dtype in FLEX_DTYPES
        and min(q.shape[-1], v.shape[-1]) >= FLEX_MIN_WIDTH
    ):
        if register is not None and layout.context is not None:  # it saves the given tensors
            register((q, k, v), lambda x: x)
        y_BHSU = flexible_attention(q, k, v, layout.block_mask(window), scale, sinks_H)
    elif sinks_H is None and (is_gpu(v) or layout.is_short()):
        y_BHSU = fused_attention(q, k, v, layout.mask(window), scale, register)
    elif sinks_H is not None and is_gpu(v):
        y_BHSU = fused_attention(*_with_sink_key(q, k, v, sinks_H, layout.mask(window), scale))
    else:
        pieces = layout.pieces(window, v.dtype)
        y_BHSU = attend_in_pieces(q, k, v, pieces, scale, sinks_H, register)
    return y_BHSU.transpose(1, 2)


@dataclass(frozen=True)
class Recipe:
    """Recomputes queries, keys or values of an attention call in backward."""

    recomputation: Recomputation
    which: tuple[int, ...]
    """The tensors that are recomputed: 0 queries, 1 keys, 2 values."""
    make: Make
    """Computes these tensors, of shape (B, S, heads, width), from `sources`."""
    sources: tuple[Tensor, ...]

    def register(
        self, tensors: tuple[Tensor, Tensor, Tensor], prepare: Callable[[Tensor], Tensor]
    ) -> None:
        """Register the kernel's inputs `tensors` for recomputation: the results of `make`, by head
        and in the values' dtype, through `prepare`."""
        dtype, make = tensors[2].dtype, self.make  # the closure must not hold the sources

        def again(*sources: Tensor) -> tuple[Tensor, ...]:
            return tuple(prepare(_by_head(x, dtype)) for x in make(*sources))

        self.recomputation.add(
            tuple(tensors[number] for number in self.which), again, *self.sources
        )


def _by_head(x_BSHN: Tensor, dtype: torch.dtype) -> Tensor:
    return x_BSHN.to(dtype).transpose(1, 2)


def _with_sink_key(
    q_BHSN: Tensor, k_BGTN: Tensor, v_BGTU: Tensor, sinks_H: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Represent sinks by one more key: its value is zero, and an additional coordinate of it and of
    all queries gives each head's sink as the logit. Return queries, keys, values, mask and
    scale."""
    sink_BHS1 = (sinks_H.to(q_BHSN.dtype) / scale)[:, None, None].expand(
        len(q_BHSN), -1, q_BHSN.shape[2], 1
    )
    q, k = torch.cat((q_BHSN, sink_BHS1), dim=-1), F.pad(k_BGTN, (0, 1, 0, 1))
    unit_row = F.pad(k.new_ones(1, 1), (k.shape[-1] - 1, 0, k.shape[-2] - 1, 0))
    return q, k + unit_row, F.pad(v_BGTU, (0, 0, 0, 1)), F.pad(mask, (0, 1), value=True), scale
