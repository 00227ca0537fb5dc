"""Gradients of weights, made at once in the backward pass or put off to a moment of the caller's choice.

A product y = x W^T sends two gradients back: that of x, which the layers before it wait for, and that of W, which nobody waits for before
the optimizer. A pipeline that makes the second one later fills time in which a rank would be idle.

Source: zero-bubble pipelines (Qi et al., arXiv:2401.10241), the split of backward into B (inputs) and W (weights).

A layer's backward hands `WeightGradients.give` the parameter and how to compute its gradient. What waits is an entry: the parameter itself,
never a saved copy of it (under activation checkpointing what is saved is unpacked as another tensor, and a gradient written there is
lost), and the tensors of the product. Bits: an entry's product is the one that would have been made at once, and it is added to `.grad`
as autograd adds it; so gradients are the same to the bit if the entries of a weight run in the order in which backward made them, and
if no graph uses the weight twice.

What entries keep until they have run, besides the parameter (T rows, letters as in each layer's file):

    Linear              x (T, I) in the products' dtype, once for all layers that `project` was called with; the output's gradient (T, O)
    GatedMLP            x (T, D); the gradient of gate/up (T, 2F) and the gated product (T, F); the output's gradient (T, D)
    Experts             the same for G rows, but x and the output's gradient as (R, D): they are gathered again; the rows' indices
    Router              x (T, D); the gradient of the logits (T, E)

Inputs and gradients in that list may be the very tensors that other layers read, or that backward hands on: nobody may overwrite them or
free their storage before the entries have run. The weights' values are not needed: they may be gone.

Always at once are norms, sinks and embeddings, which are no products, and the head with the loss: its backward makes each tile of
the logits' gradient once for both products, so that putting one off would mean keeping (T, V) elements or making every tile a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lather.device import no_autocast
from lather.shapes import Float


@dataclass
class DeferredGradient:
    """A gradient that has still to be computed and added to its weight's."""

    weight: Tensor
    compute: Callable[[], Tensor] | None
    """None when done, so that a list of entries keeps no tensors of those that have run."""

    @torch.no_grad()
    def run(self) -> None:
        if self.compute is None:
            raise RuntimeError("this weight gradient was run before: run each entry once")
        with no_autocast(self.weight):
            gradient = self.compute().to(self.weight.dtype)
        self.compute = None
        if self.weight.grad is None:
            self.weight.grad = gradient
        else:
            self.weight.grad += gradient


class WeightGradients:
    """Takes weight gradients from backward passes: at once, or, while `deferring`, for later."""

    def __init__(self) -> None:
        self.deferring = False
        self._entries: list[DeferredGradient] = []

    def __len__(self) -> int:
        """How many wait to be taken."""
        return len(self._entries)

    def give(self, weight: nn.Parameter | Tensor, compute: Callable[[], Tensor]) -> Float[Tensor, "..."] | None:
        """For the backward of a Function: what it returns for `weight`, a leaf that requires a gradient.

        That is the gradient, in `weight`'s dtype; or None, and `compute` waits in the queue. (A weight that is not a leaf has no `.grad` to
        add to: autograd gets its gradient at once.) Hooks on the weight or on its accumulation do not see what is put off.
        """
        if not self.defers(weight):
            return compute().to(weight.dtype)
        self._entries.append(DeferredGradient(weight, compute))
        return None

    def defers(self, weight: nn.Parameter | Tensor) -> bool:
        """Whether `give` would put this weight's gradient off."""
        return self.deferring and weight.is_leaf

    def take(self) -> list[DeferredGradient]:
        """The entries queued since the last take, oldest first; the queue is empty after."""
        taken, self._entries = self._entries, []
        return taken

    @staticmethod
    def run(entries: Sequence[DeferredGradient]) -> None:
        """Compute each and add it to its weight's `.grad`, in the weight's dtype; an entry lets go of its tensors when it is done."""
        for entry in entries:
            entry.run()


def weight_gradient(
    queue: WeightGradients | None, weight: nn.Parameter | Tensor, later: Callable[[], Tensor], now: Callable[[], Tensor] | None = None
) -> Float[Tensor, "..."] | None:
    """`WeightGradients.give`, or without a queue the gradient at once.

    `now` gives the same as `later` from what is at hand while backward runs, for less work, where waiting with it would keep more.
    """
    if queue is not None and queue.defers(weight):
        return queue.give(weight, later)
    return (later if now is None else now)().to(weight.dtype)


class Deferrable:
    """A module whose weights' gradients can be put off: `self.weight_gradients` is what its backward gives them to; None: at once."""

    weight_gradients: WeightGradients | None = None


def defer_weight_gradients(module: nn.Module, queue: WeightGradients | None) -> None:
    """Have every layer inside `module` that can be deferred give its weight gradients to `queue`; None: at once, as a new layer does.

    It holds for forward passes from now on. A layer whose memory is "reference" is plain autograd: at once always.
    """
    for layer in module.modules():
        if isinstance(layer, Deferrable):
            layer.weight_gradients = queue
