"""The operations in torch's own: the specification of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lather.kernels.backend import wide_dtype
from lather.shapes import Float


def merge_into(y_BLHU: Tensor, lse_BHL: Tensor, other_BLHU: Tensor, other_lse_BHL: Tensor) -> None:
    """Merge outputs by their log-sum-exps, in place."""
    total_BHL = torch.logaddexp(lse_BHL, other_lse_BHL)
    merged_BLHU = torch.zeros_like(y_BLHU, dtype=lse_BHL.dtype)
    for y, of_y_BHL in ((y_BLHU, lse_BHL), (other_BLHU, other_lse_BHL)):
        share_BHL = (of_y_BHL - total_BHL).exp().masked_fill(of_y_BHL == -torch.inf, 0)
        merged_BLHU += share_BHL.transpose(1, 2).unsqueeze(-1) * y.to(lse_BHL.dtype)
    y_BLHU.copy_(merged_BLHU)
    lse_BHL.copy_(total_BHL)


@dataclass(frozen=True)
class KeyGradients:
    """Gradients of the keys or of the values, by the queries that they come from."""

    own_BSX: Float[Tensor, "b s x"]
    """The part of the rank's own keys, of the early slice and then of the late slice, from the
    queries of the same slice."""
    from_late_BKX: Float[Tensor, "b k x"]
    """The part of the range's keys before the late slice, from the late slice."""
    from_early_BJX: Float[Tensor, "b j x"] | None
    """The part of the range's keys before the early slice, from the early slice; None if the range
    has no such keys."""


def write_key_gradients(
    totals: Sequence[Tensor],
    parts: Sequence[KeyGradients],
    starts: tuple[int, int],
    keys: slice,
) -> None:
    """Write the sums of the gradients of a range of keys, and of the values."""
    for total_BTX, part in zip(totals, parts, strict=True):
        sum_BKX = torch.zeros_like(total_BTX[:, keys], dtype=wide_dtype(total_BTX))
        for x in (part.from_late_BKX, part.from_early_BJX):
            if x is not None:
                sum_BKX[:, : x.shape[1]] += x
        half = part.own_BSX.shape[1] // 2
        for start, own_BLX in zip(starts, part.own_BSX.split(half, dim=1), strict=True):
            first, stop = max(start, keys.start), min(start + half, keys.stop)
            if first < stop:
                inside_BKX = own_BLX[:, first - start : stop - start]
                sum_BKX[:, first - keys.start : stop - keys.start] += inside_BKX
        total_BTX[:, keys] = sum_BKX.to(total_BTX.dtype)
