"""Weights rounded to the dtype of products once in a step, not once for each product.

Under autocast a weight is rounded where it is multiplied: in forward and in backward, for every micro-batch. Inside `RoundedWeights.kept`,
which is a step of forward and backward passes, the first product keeps its copy and all others take that: the same bits, 2 bytes per
weight until the block ends or `forget` is told that the weights go.

Kept are copies of `nn.Parameter`s alone, under the object and its version: a weight that is written to meanwhile is rounded again. Versions
alone would not do: FSDP2 gathers into the same parameters without counting, so that copies must not outlive a step, or what was gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RoundedWeights:
    """Copies of weights in the dtype of products, while they are kept."""

    def __init__(self) -> None:
        self._is_keeping = False
        self._copies: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}
        """By weight and dtype: the weight, whose place in memory must not become another's, its version, and the copy."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside the block copies are kept; no weight may change there without a new version, but for those that `forget` is told of."""
        before, self._is_keeping = self._is_keeping, True
        try:
            yield
        finally:
            self._is_keeping = before
            if not before:
                self._copies.clear()

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight.to(dtype)`, without gradient."""
        if weight.dtype == dtype or not self.keeps(weight):
            return weight.detach().to(dtype)
        key = id(weight), dtype
        known = self._copies.get(key)
        if known is None or known[1] != weight._version:
            known = self._copies[key] = (weight, weight._version, weight.detach().to(dtype))
        return known[2]

    def keeps(self, weight: Tensor | None) -> bool:
        """Whether a copy of this would be kept now."""
        return self._is_keeping and isinstance(weight, nn.Parameter)

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Drop the copies of these, whose values go or change."""
        gone = {id(weight) for weight in weights}
        for key in [key for key in self._copies if key[0] in gone]:
            del self._copies[key]

    def copies(self) -> list[Tensor]:
        return [copy for _, _, copy in self._copies.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self.copies())


def rounded(kept: RoundedWeights | None, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight.to(dtype)`, by way of the kept copies if there are any."""
    return weight.to(dtype) if kept is None else kept.of(weight, dtype)


def to_round(kept: RoundedWeights | None, weights: Sequence[Tensor | None], saved: Sequence[Tensor | None]) -> list[Any]:
    """In a backward pass: the weights whose copies are kept, and in place of others what autograd saved, under hooks another object."""
    return [weight if kept is not None and kept.keeps(weight) else other for weight, other in zip(weights, saved, strict=True)]


class Rounding:
    """A module whose products take rounded weights: `self.rounded_weights` keeps them; None: each product rounds its own."""

    rounded_weights: RoundedWeights | None = None


def keep_rounded(module: nn.Module, kept: RoundedWeights | None) -> None:
    """Have every layer inside `module` take its rounded weights from `kept`; None: each product rounds its own, as in a new layer."""
    for layer in module.modules():
        if isinstance(layer, Rounding):
            layer.rounded_weights = kept
