"""Differentiates a function of which autograd saves only the inputs: backward computes it again.

It is meant for chains of operations that are cheap to compute and whose intermediate results are
large. (`lather.models.saving.recomputed` makes again tensors that other functions save.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.device import no_autocast


def saving_inputs_only(
    function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None
) -> tuple[Tensor, ...]:
    """Return `function(*inputs)`, which runs without autocast, and again in backward.

    It can be differentiated once, for those inputs that are floating point. A compiler decides by
    itself what is saved."""
    if torch.compiler.is_compiling():
        return function(*inputs)
    outputs: tuple[Tensor, ...] = _InputsOnly.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return outputs


class _InputsOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *inputs: Tensor | None) -> Any:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        with no_autocast(_first(inputs)):
            return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        leaves = [
            None if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip(ctx.saved_tensors, needs, strict=True)
        ]
        with torch.enable_grad(), no_autocast(_first(leaves)):
            outputs = ctx.function(*leaves)
        pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
        results, of_results = zip(*pairs, strict=True)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        gradients = iter(torch.autograd.grad(results, wanted, of_results, allow_unused=True))
        return None, *(next(gradients) if needed else None for needed in needs)


def _first(inputs: Any) -> Tensor:
    return next(x for x in inputs if x is not None)
