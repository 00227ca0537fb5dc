"""Weight gradients, computed either in the backward pass or later, when the caller chooses.

The backward of a product y = x W^T computes two gradients: that of x, which the layers before need
at once, and that of W, which only the optimizer needs. A pipeline that defers the second fills
time in which a rank would be idle.

Source: zero-bubble pipelines (Qi et al., arXiv:2401.10241), the split of backward into B (inputs)
and W (weights).

A layer's backward passes the parameter, and a function that computes its gradient, to
`weight_gradient`. A deferred gradient is an entry in a queue. It holds the parameter itself, never
the tensor that autograd saved (with activation checkpointing that is unpacked as another tensor,
and a gradient written there is lost), and the operands of the product. An entry computes the same
product as backward would, and adds it to `.grad` as autograd does; so gradients have the same bits
if the entries of a weight run in the order in which backward made them, and if no graph uses the
weight twice. On a GPU the product's kernel adds to an fp32 `.grad` itself (`Accumulable`), whose
last bits then depend on the kernel that the library chooses.

Besides the parameter, entries hold these tensors until they have run (T rows, letters as in each
layer's file):

    Linear              x (T, I) in the products' dtype, once for all layers that `project` was
                        called with; the output's gradient (T, O)
    GatedMLP            x (T, D); the gradient of gate/up (T, 2F) and the gated product (T, F); the
                        output's gradient (T, D)
    Experts             the same for G rows, but x and the output's gradient as (R, D): they are
                        gathered again; the rows' indices
    Router              x (T, D); the gradient of the logits (T, E)

These inputs and gradients may be the same tensors that other layers read, or that backward passes
on, so they must not be overwritten or freed before the entries have run. The values of the weights
are not needed and may be freed.

Some gradients are never deferred: those of norms, sinks and embeddings, which are not products;
those of weights that multiply the tokens of all context ranks, whose operands are of whole
sequences (`run_those_of`); and that of the head, because the loss computes each tile of the logits'
gradient once for both products, and deferring either would mean saving (T, V) elements or computing
every tile a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from lather.boxes import gradient_dtype, is_dtensor
from lather.device import no_autocast
from lather.profiled import profiled
from lather.shapes import Float


class Accumulable(partial[Tensor]):
    """A function that computes a weight gradient, and has an argument `total`: the sum of earlier
    gradients of the weight, in fp32 and contiguous. Where the product's kernel adds to it (on a
    GPU), the function returns `total` itself, otherwise the gradient alone."""


@dataclass
class DeferredGradient:
    """A weight gradient that has yet to be computed and added to `.grad`."""

    weight: Tensor
    compute: Callable[[], Tensor] | None
    """Set to None after the run, so that a list of entries that have run holds no tensors."""

    @torch.no_grad()
    def run(self) -> None:
        if self.compute is None:
            raise RuntimeError("this weight gradient was run before: run each entry once")
        total, dtype = self.weight.grad, gradient_dtype(self.weight)
        with no_autocast(self.weight):
            if isinstance(self.compute, Accumulable) and _is_total(total):
                gradient = self.compute(total=total)
            else:
                gradient = self.compute()
        self.compute = None
        if gradient is total:
            return  # the product's kernel has added it
        if total is None:
            self.weight.grad = gradient.to(dtype)
        elif torch.promote_types(dtype, gradient.dtype) == dtype:
            # the sum is that of a copy in `dtype`, without its 8 bytes per element
            total.add_(gradient)
        else:
            total.add_(gradient.to(dtype))


def _is_total(grad: Tensor | None) -> TypeGuard[Tensor]:
    """Tell whether there is a gradient to which a product's kernel can add."""
    if grad is None or grad.dtype != torch.float32 or is_dtensor(grad):
        return False
    return grad.is_contiguous()


class WeightGradients:
    """A queue of weight gradients: while `deferring`, backward passes append to it; otherwise
    gradients are computed at once."""

    def __init__(self) -> None:
        self.deferring = False
        self.entries: list[DeferredGradient] = []
        """The queued entries, oldest first."""

    def take(self) -> list[DeferredGradient]:
        """Remove all entries from the queue and return them, oldest first."""
        entries, self.entries = self.entries, []
        return entries

    def run_those_of(self, weights: Collection[Tensor] | None) -> None:
        """Compute the queued gradients of these weights (None: all), oldest first."""
        chosen = None if weights is None else {id(weight) for weight in weights}
        now: list[DeferredGradient] = []
        later: list[DeferredGradient] = []
        for entry in self.take():
            (now if chosen is None or id(entry.weight) in chosen else later).append(entry)
        self.entries = later
        self.run(now)

    @staticmethod
    @profiled("weight_gradients")
    def run(entries: Sequence[DeferredGradient]) -> None:
        """Compute each gradient and add it to `.grad`, in the dtype of gradients of the weight
        (`lather.boxes.gradient_dtype`); an entry then drops its tensors."""
        for entry in entries:
            entry.run()


def weight_gradient(
    queue: WeightGradients | None,
    weight: nn.Parameter | Tensor,
    later: Callable[[], Tensor],
    now: Callable[[], Tensor] | None = None,
) -> Float[Tensor, "..."] | None:
    """Return the value that the backward of an autograd Function must return for `weight`, a tensor
    that requires a gradient.

    This is the gradient, in the dtype of gradients of `weight`; or None, if `later`, which computes
    it, was queued, or if there is a queue that does not defer and the gradient was added to `.grad`
    at once: autograd would add a copy in that dtype. (A weight that is not a leaf has no
    `.grad`, so its gradient is always returned.) Hooks on the weight, or on its gradient
    accumulation, do not run for gradients that are not returned.

    `now` computes the same as `later`, with less work, from tensors that exist during backward but
    would take more memory if deferred."""
    at_once = later if now is None else now
    if queue is not None and weight.is_leaf:
        if queue.deferring:
            queue.entries.append(DeferredGradient(weight, later))
            return None
        if weight.grad is not None:
            DeferredGradient(weight, at_once).run()
            return None
    return at_once().to(gradient_dtype(weight))


class Deferrable:
    """A module whose weight gradients can be deferred: its backward gives them to the queue
    `self.weight_gradients`; None: at once."""

    weight_gradients: WeightGradients | None = None


def defer_weight_gradients(module: nn.Module, queue: WeightGradients | None) -> None:
    """Set the queue of every `Deferrable` layer inside `module`; None, as in a new layer: gradients
    are computed at once.

    This applies to later forward passes. Layers whose memory is "reference" use plain autograd and
    never defer.
    """
    for layer in module.modules():
        if isinstance(layer, Deferrable):
            layer.weight_gradients = queue
