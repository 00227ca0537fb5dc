"""Context parallelism: several ranks compute the tokens of the same sequences.

Source of the slices: zigzag, as in Llama 3 (arXiv:2407.21783, section 3.3.2). A sequence of T
tokens is cut into 2 C slices of equal length for C context ranks, of which rank r computes number r
and number 2 C - 1 - r, one after the other. Under causal attention, where later tokens see more
keys, this gives all ranks equal work:

    C = 2, T = 8     tokens 0 1 | 2 3 | 4 5 | 6 7     rank 0: 0 1 6 7     rank 1: 2 3 4 5

Everything but attention computes its rank's tokens by itself; attention gathers what keys and
values are made of from all ranks, and linear attention how each slice changes its state.

Letters: B sequences, S positions of this rank, T = C * S positions of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.models.pending import Pending
from lather.shapes import Int


@dataclass(frozen=True)
class Context:
    """A rank's slices of the sequences, and its exchange with the ranks that have the others."""

    rank: int
    size: int
    """Number of context ranks, C."""
    keeps_gathered: bool = field(default=False, kw_only=True)
    """Attention keeps for the backward pass what it gathered, rather than gather it again."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank = {self.rank} is not valid: it must be one of the {self.size} context "
                f"ranks, 0 to {self.size - 1}"
            )

    def length_of(self, length: int) -> int:
        """Return S, this rank's number of tokens of a sequence of `length`. Raises ValueError if
        the slices would not be equal."""
        if length % (2 * self.size):
            raise ValueError(
                f"sequences of {length} tokens cannot be cut into two equal slices for each of "
                f"{self.size} context ranks: make the length a multiple of {2 * self.size}"
            )
        return length // self.size

    def slices(self, length: int) -> tuple[slice, slice]:
        """Return this rank's two slices of a sequence of `length` tokens."""
        half = self.length_of(length) // 2
        numbers = self.rank, 2 * self.size - 1 - self.rank
        first, last = (slice(number * half, (number + 1) * half) for number in numbers)
        return first, last

    def local(self, x_BT: Tensor) -> Tensor:
        """Return this rank's positions of a tensor (B, T, ...) over all of them, as (B, S, ...)."""
        return torch.cat([x_BT[:, of_slice] for of_slice in self.slices(x_BT.shape[1])], dim=1)

    def indices(self, length: int, device: torch.device) -> Int[Tensor, " s"]:
        """Return the index of each of this rank's tokens in sequences of `length` tokens."""
        return self.local(torch.arange(length, device=device).unsqueeze(0)).squeeze(0)

    def gather(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors of all positions, (B, T, ...) each, from those of every rank's, (B, S,
        ...), which have one dtype. Differentiable: the gradients of a position are summed over the
        ranks.

        Collective over the context ranks, in the forward pass and in the backward pass.
        """
        gathered: tuple[Tensor, ...] = _GatherPositions.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return gathered

    def start_gather(self, tensors: Sequence[Tensor]) -> Pending[tuple[Tensor, ...]]:
        """Start to gather, without autograd. Collective."""
        raise NotImplementedError

    def start_sum(self, grads: Sequence[Tensor]) -> Pending[tuple[Tensor, ...]]:
        """Start to sum gradients of gathered tensors, (B, T, ...), over the ranks, in fp32 or
        wider, rank 0 first; the result has those of this rank's positions, (B, S, ...). Collective.
        """
        raise NotImplementedError

    def add_up(self, counts: Tensor) -> Tensor:
        """Return the sum of the ranks' numbers, in their dtype. Collective."""
        raise NotImplementedError


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: Context, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.context = context
        return context.start_gather(tensors).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        context: Context = ctx.context
        return None, *context.start_sum(grads).wait()
