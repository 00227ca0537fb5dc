"""Rounds weights to the dtype of products once per step, not once for each product.

Under autocast every product rounds its weight: in forward and in backward, for every micro-batch.
Inside `RoundedWeights.kept`, which encloses the forward and backward passes of a step, the first
product caches the rounded weight and all others use it. The results have the same bits; the cache
takes 2 bytes per weight until the context ends or `forget` is called.

Only copies of `nn.Parameter`s are cached, with the parameter's version: a weight that has been
written to is rounded again. The version is not sufficient, because FSDP2 gathers into the same
parameters without increasing it; so copies must be dropped after a step, and when FSDP2 frees the
gathered weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RoundedWeights:
    """A cache of weights in the dtype of products."""

    def __init__(self) -> None:
        self._is_keeping = False
        self._copies: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}
        """By id of the weight and dtype: the weight (a reference, so that its id is not reused),
        its version, and the copy."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside this context, copies are cached. A weight may only change there with a new
        version, or if `forget` is called for it."""
        before, self._is_keeping = self._is_keeping, True
        try:
            yield
        finally:
            self._is_keeping = before
            if not before:
                self._copies.clear()

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight.to(dtype)`, without gradient."""
        if weight.dtype == dtype or not self.keeps(weight):
            return weight.detach().to(dtype)
        key = id(weight), dtype
        known = self._copies.get(key)
        if known is None or known[1] != weight._version:
            known = self._copies[key] = (weight, weight._version, weight.detach().to(dtype))
        return known[2]

    def keeps(self, weight: Tensor | None) -> bool:
        """Tell whether a copy of this weight would be cached now."""
        return self._is_keeping and isinstance(weight, nn.Parameter)

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Drop the copies of these weights, whose values are freed or change."""
        gone = {id(weight) for weight in weights}
        self._copies = {key: kept for key, kept in self._copies.items() if key[0] not in gone}

    def copies(self) -> list[Tensor]:
        return [copy for _, _, copy in self._copies.values()]


def rounded(kept: RoundedWeights | None, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight.to(dtype)`, from the cache if there is one."""
    return weight.to(dtype) if kept is None else kept.of(weight, dtype)


def to_round(
    kept: RoundedWeights | None, weights: Sequence[Tensor | None], saved: Sequence[Tensor | None]
) -> list[Any]:
    """Return, in a backward pass, the weights whose copies are cached, and for others the tensors
    that autograd saved (with hooks these may be other objects)."""
    return [
        weight if kept is not None and kept.keeps(weight) else other
        for weight, other in zip(weights, saved, strict=True)
    ]


class Rounding:
    """A module whose products round weights: `self.rounded_weights` is their cache; None: each
    product rounds its weight."""

    rounded_weights: RoundedWeights | None = None


def keep_rounded(module: nn.Module, kept: RoundedWeights | None) -> None:
    """Set the cache of rounded weights of every layer inside `module`; None, as in a new layer:
    each product rounds its weight."""
    for layer in module.modules():
        if isinstance(layer, Rounding):
            layer.rounded_weights = kept
