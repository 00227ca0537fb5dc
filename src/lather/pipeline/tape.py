"""The tape: pieces of autograd graph that are kept between forward and backward, and the early
freeing of tensors.

A `Cut` is one segment: a function of detached inputs whose graph ends at its outputs. It keeps the
graph's edges, not the outputs, which live only as long as they are referenced. `Frees.release`
frees the storage of a tensor after its last reader, even if references remain; it never frees a
storage that another live tensor shares, which it decides by comparing storages, not by the
configuration.

A recomputed segment keeps only its inputs and runs a second time just before its backward pass.

Rounding: if several cuts read a tensor, the caller adds their gradients, each of which is the sum
within one cut. The result has the same bits as autograd's sum for the whole graph if each cut
contributes one term and they are added in reverse order of reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Outputs = tuple[Tensor, ...]
MakeContext = Callable[[], AbstractContextManager[Any]]


class Cut:
    """The autograd graph of one segment, from detached inputs to its outputs; call `run`, then
    `backward` once."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.name = "embedding"
        """Name of the segment in profiles of its backward pass; other segments set their own."""
        self._leaves = [x.detach().requires_grad_() for x in inputs]
        self._edges: list[GradientEdge | None] = []
        """Gradient edge of each output; None for an output without a gradient."""
        self._again: Callable[..., Outputs] | None = None
        """The function to run again before backward."""

    @classmethod
    def run(
        cls,
        function: Callable[..., Outputs],
        inputs: Sequence[Tensor],
        *,
        recompute: MakeContext | None = None,
    ) -> tuple[Cut, Outputs]:
        """Run `function(*inputs)`; return the cut and the detached outputs. Without grad mode
        nothing is kept.

        With `recompute` only the inputs and the function are kept; the second run is inside the
        context that `recompute` returns."""
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
        """Inputs that a second run will read; empty if the segment is not recomputed."""
        return self._leaves if self._again is not None else []

    def _record(self, function: Callable[..., Outputs]) -> Outputs:
        outputs = function(*self._leaves)
        self._edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        return outputs

    def repeat(self) -> Outputs:
        """Run the segment a second time now, if it is recomputed, and return the detached
        outputs."""
        assert self._again is not None
        again, self._again = self._again, None
        with torch.enable_grad():
            return tuple(x.detach() for x in self._record(again))

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the gradients of the inputs (None: no gradient) from those of the outputs (None:
        zero); add parameter gradients to `.grad`.

        The graph is freed.
        """
        if self._again is not None:
            self.repeat()
        pairs = [
            (edge, grad)
            for edge, grad in zip(self._edges, gradients, strict=True)
            if edge is not None and grad is not None
        ]
        self._edges = []
        edges, grads = [edge for edge, _ in pairs], [grad for _, grad in pairs]
        del pairs
        torch.autograd.backward(edges, grads)
        del edges, grads
        leaves, self._leaves = self._leaves, []
        return [leaf.grad for leaf in leaves]


def inside(context: MakeContext, function: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """Return the function wrapped in a context that is created for each call. (Around a generator's
    `yield` the context would stay open for other code that runs meanwhile.)"""

    def run(*inputs: Tensor) -> Outputs:
        with context():
            return function(*inputs)

    return run


@dataclass(frozen=True)
class Frees:
    """Frees tensors that will not be read again."""

    enabled: bool = True
    """False: keep the tensors until the chunk's backward pass, as without early frees, for
    comparison."""
    poison: bool = False
    """Debug mode: instead of freeing a tensor, fill it with `poison_`, so that a later read is
    noticed."""

    def release(self, x: Tensor, *still_read: Tensor, held: list[Tensor]) -> None:
        """Free the storage of `x`, which nothing reads any more, unless one of `still_read` shares
        it.

        On CUDA, the current stream must have waited for all other streams that read `x`. `held` is
        the chunk's list of unfreed tensors."""
        if not self.enabled:
            held.append(x)
            return
        storage = x.untyped_storage()
        if not any(storage is other.untyped_storage() for other in still_read):
            self.free_buffer(x)

    def free_buffer(self, x: Tensor) -> None:
        """Free a buffer that belongs to no chunk, such as an exchange's own. If not `enabled`, it
        lives until its last reference is gone."""
        storage = x.untyped_storage()
        if not self.enabled or not storage.nbytes():
            return
        if self.poison:
            poison_(x)
        else:
            storage.resize_(0)


def poison_(x: Tensor) -> None:
    """Fill the whole storage of `x` with NaN, or with the maximal integer, whose bits are a NaN
    too."""
    value = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    with torch.no_grad():
        torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).fill_(value)
