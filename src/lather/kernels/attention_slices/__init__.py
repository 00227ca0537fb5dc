"""Outputs of attention to two sets of keys, merged, and sums of the gradients of keys and values:
the work beside the kernels that attend in slices (`lather.models.sliced_attention`).

A context rank has two slices of queries, the early and the late one. Each attends to its own keys
and to all earlier keys:

    keys             0 ... early start | early slice | ... late start | late slice | ...
    early queries    earlier             own
    late queries     earlier ......................................     own

Letters: B sequences, L positions of a slice, S = 2 L positions of a rank, T positions of all, K
keys of a range, X elements of all heads, H heads, U width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lather.kernels.attention_slices import reference
from lather.kernels.attention_slices.reference import KeyGradients
from lather.kernels.backend import fastest, run
from lather.shapes import Float

__all__ = ["KeyGradients", "merge_into", "write_key_gradients"]


@torch.no_grad()
def merge_into(
    y_BLHU: Float[Tensor, "b l h u"],
    lse_BHL: Float[Tensor, "b h l"],
    other_BLHU: Float[Tensor, "b l h u"],
    other_lse_BHL: Float[Tensor, "b h l"],
) -> None:
    """Make of outputs and log-sum-exps of some keys, in place, those of these and other keys
    together. Computed in the dtype of the log-sum-exps, and rounded once. Without any key, which a
    log-sum-exp of -inf says, an output is 0."""
    run(reference.merge_into, y_BLHU, lse_BHL, other_BLHU, other_lse_BHL)


@torch.no_grad()
def write_key_gradients(
    totals: Sequence[Tensor],
    parts: Sequence[KeyGradients],
    starts: tuple[int, int],
    keys: slice,
) -> None:
    """Write into a range of keys the sums of their gradients, for two tensors (B, T, X), of keys
    and of values. A key without queries gets 0; no key has more than two parts, whose sum is
    rounded once. `starts` are the first keys of the two slices."""
    write = fastest(reference.write_key_gradients, *totals)
    write(totals, parts, starts, keys)
