"""The tape: what is kept between forward and backward, as pieces of autograd graph with cuts between them, and when tensors are given back.

A `Cut` is one segment: a function of detached inputs whose graph ends at its outputs. It keeps the graph's edges, not the outputs: these
live only as long as somebody reads them. `Frees.release` says that nobody will, and gives the storage back at once, whoever still has a
reference; a storage that something else lives in is left alone, which is decided by the storages and not by the configuration.

A segment that is recomputed keeps its inputs alone and runs a second time just before its backward.

Bits: where several cuts read a tensor, whoever runs them adds up its gradients, and each is the sum of one cut's own. That is autograd's
sum for the whole graph, and in its order if each cut has one term and they are added last reader first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Outputs = tuple[Tensor, ...]


class Cut:
    """One segment's graph, from detached inputs to its outputs; `run` it, then `backward` once."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._leaves = [x.detach().requires_grad_() for x in inputs]
        self._edges: list[GradientEdge | None] = []
        """Where the graph of each output ends; None for an output without a gradient."""
        self._again: Callable[..., Outputs] | None = None
        """The work that has to run once more before backward."""

    @classmethod
    def run(
        cls,
        function: Callable[..., Outputs],
        inputs: Sequence[Tensor],
        *,
        recompute: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> tuple[Cut, Outputs]:
        """The cut and the outputs of `function(*inputs)`, detached. Without grad mode nothing is kept.

        With `recompute` the inputs are kept, and the function; the second run is inside the context that it makes.
        """
        cut = cls(inputs)
        if not torch.is_grad_enabled():
            cut._leaves = []
            outputs = function(*inputs)
        elif recompute is None:
            outputs = cut._record(function)
        else:
            with torch.no_grad():
                outputs = function(*inputs)
            cut._again = inside(recompute, function)
        return cut, tuple(x.detach() for x in outputs)

    @property
    def kept_inputs(self) -> list[Tensor]:
        """The inputs that a second run will read again as they are. (What the graph keeps is the graph's.)"""
        return self._leaves if self._again is not None else []

    def _record(self, function: Callable[..., Outputs]) -> Outputs:
        outputs = function(*self._leaves)
        self._edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        return outputs

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs (None: none reached it) from those of the outputs (None: zero); parameters' are added to their `.grad`.

        The graph is gone afterwards.
        """
        if self._again is not None:
            with torch.enable_grad():
                self._record(self._again)
            self._again = None
        pairs = [(edge, grad) for edge, grad in zip(self._edges, gradients, strict=True) if edge is not None and grad is not None]
        self._edges = []
        edges, grads = [edge for edge, _ in pairs], [grad for _, grad in pairs]
        del pairs
        torch.autograd.backward(edges, grads)
        del edges, grads
        leaves, self._leaves = self._leaves, []
        return [leaf.grad for leaf in leaves]


def inside(context: Callable[[], AbstractContextManager[Any]], function: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """The function, inside a context that is made for each call."""

    def run(*inputs: Tensor) -> Outputs:
        with context():
            return function(*inputs)

    return run


@dataclass(frozen=True)
class Frees:
    """Gives back tensors that nobody will read again."""

    enabled: bool = True
    """False: what would be given back is held until its chunk's backward, as in an engine without early frees. For comparison."""
    poison: bool = False
    """Debug mode: what would be given back is filled by `poison_` instead, so that a later reader is found out."""

    def release(self, x: Tensor, *still_read: Tensor, held: list[Tensor]) -> None:
        """Nobody reads x any more, nor anything else in its storage but perhaps `still_read`: if one of these is in it, nothing happens.

        On CUDA whoever reads x on another stream must have been waited for by the current one. `held` is the chunk's.
        """
        if not self.enabled:
            held.append(x)
            return
        storage = x.untyped_storage()
        if not any(storage is other.untyped_storage() for other in still_read):
            self.give_back(x)

    def give_back(self, x: Tensor) -> None:
        """For a buffer that is nobody else's and no chunk's: an exchange's own. Not `enabled`: it goes with its last reference."""
        storage = x.untyped_storage()
        if not self.enabled or not storage.nbytes():
            return
        if self.poison:
            poison_(x)
        else:
            storage.resize_(0)


def poison_(x: Tensor) -> None:
    """In all of x's storage, whatever part of it x shows: NaN, or integers out of every range, whose bits are a NaN, too."""
    value = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    with torch.no_grad():
        torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).fill_(value)
