"""The gated MLP: the feed-forward layer of dense blocks, and the shared experts. It saves its input
and gate/up for backward, which recomputes the gated product; plain autograd saves two more tensors
(T, F).

Its weight gradients can be deferred: see `lather.models.saving.weight_gradients`.

Letters: T rows, D hidden size, F intermediate size, H = 2 F gate and up side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lather.boxes import gradient_dtype
from lather.device import no_autocast
from lather.kernels.swiglu import SWIGLU, gate_backward, gate_forward, swiglu
from lather.models.layers import (
    Linear,
    compute_dtype,
    project,
    weight_product,
    without_autocast,
)
from lather.models.saving.recomputed import Recomputation
from lather.models.saving.rounded_weights import RoundedWeights, Rounding
from lather.models.saving.weight_gradients import (
    Accumulable,
    Deferrable,
    WeightGradients,
    weight_gradient,
)
from lather.shapes import Float

MEMORY_MODES = ("saved", "recompute", "reference")
"""Tensors that a feed-forward layer saves for backward: its input and gate/up; only its input;
everything that plain autograd saves."""


@dataclass(frozen=True)
class GatedCall:
    """The inputs of a gated layer's autograd function that are no tensors."""

    dtype: torch.dtype
    """Dtype of the products."""
    keep_gate_up: bool
    """Whether gate/up is saved for backward."""
    queue: WeightGradients | None
    cache: RoundedWeights

    def rounded(self, weight: Tensor) -> Tensor:
        return self.cache.round(weight, self.dtype)


class _GatedMLPFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        gate_FD: Tensor,
        up_FD: Tensor,
        down_DF: Tensor,
        weight_T: Tensor | None,
        call: GatedCall,
    ) -> Tensor:
        gate_up_TH = _gate_up(x_TD.to(call.dtype), gate_FD, up_FD, call)
        ctx.save_for_backward(
            x_TD, gate_FD, up_FD, down_DF, weight_T, gate_up_TH if call.keep_gate_up else None
        )
        ctx.call, ctx.parameters = call, (gate_FD, up_FD, down_DF)
        y_TD = gate_forward(gate_up_TH, SWIGLU) @ call.rounded(down_DF).T
        return y_TD if weight_T is None else y_TD.mul_(weight_T.unsqueeze(-1))

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *saved, weight_T, gate_up_TH = ctx.saved_tensors
        call: GatedCall = ctx.call
        gate_FD, up_FD, down_DF = map(call.cache.in_backward, ctx.parameters, saved)
        # deferred gradients must not keep the graph alive
        x_TD, grad_TD = (
            x_TD.detach(),
            grad_TD.to(call.dtype),
        )
        if gate_up_TH is None:
            gate_up_TH = _gate_up(x_TD.to(call.dtype), gate_FD, up_FD, call)
        grad_gate_up_TH, h_TF, grad_weight_T = gate_backward(
            grad_TD @ call.rounded(down_DF), gate_up_TH, SWIGLU, weight_T
        )
        grad_gate_TF, grad_up_TF = grad_gate_up_TH.chunk(2, dim=-1)
        factors = ((grad_gate_TF, x_TD), (grad_up_TF, x_TD), (grad_TD, h_TF))
        needs_x, *needs = ctx.needs_input_grad[:4]
        grads = [
            weight_gradient(
                call.queue, weight, Accumulable(weight_product, *pair, gradient_dtype(weight))
            )
            if needed
            else None
            for weight, pair, needed in zip(ctx.parameters, factors, needs, strict=True)
        ]
        grad_x = None
        if needs_x:
            grad_x = (
                (grad_gate_TF @ call.rounded(gate_FD))
                .addmm_(grad_up_TF, call.rounded(up_FD))
                .to(x_TD.dtype)
            )
        if grad_weight_T is not None:
            grad_weight_T = grad_weight_T.to(weight_T.dtype)
        return grad_x, *grads, grad_weight_T, None


def _gate_up(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, call: GatedCall) -> Tensor:
    f = len(gate_FD)
    gate_up_TH = x_TD.new_empty(len(x_TD), 2 * f)
    torch.mm(x_TD, call.rounded(gate_FD).T, out=gate_up_TH[:, :f])
    torch.mm(x_TD, call.rounded(up_FD).T, out=gate_up_TH[:, f:])
    return gate_up_TH


class GatedMLP(Deferrable, Rounding, nn.Module):
    """down(silu(gate(x)) * up(x)): the feed-forward layer of dense blocks, and the shared
    experts."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)
        self.memory = "saved"

    @property
    def reads_once(self) -> bool:
        """Whether the input has one gradient, in its own dtype; adapters add others, for which it
        has to be wider."""
        return all(layer.lora is None for layer in (self.gate_proj, self.up_proj, self.down_proj))

    def forward(
        self, x: Float[Tensor, "*batch d"], weight_T: Float[Tensor, " t"] | None = None
    ) -> Float[Tensor, "*batch d"]:
        """Compute the layer; each of the T rows of the output is multiplied by its weight."""
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        is_reference = self.memory == "reference"
        if is_reference or any(layer.lora is not None for layer in layers):
            y = self._reference(x) if is_reference else self._with_adapters(x)
            return y if weight_T is None else y * weight_T.view(*x.shape[:-1], 1)
        weights = (layer.weight for layer in layers)
        call = GatedCall(
            compute_dtype(x), self.memory == "saved", self.weight_gradients, self.rounded_weights
        )
        with no_autocast(x):
            return _GatedMLPFunction.apply(x.flatten(0, -2), *weights, weight_T, call).view(x.shape)  # type: ignore[no-untyped-call]

    def _reference(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def _with_adapters(self, x: Tensor) -> Tensor:
        """Compute the same layer by layer; as in the autograd function, backward recomputes the
        tensors that are not saved."""

        def hidden(x: Tensor) -> tuple[Tensor, Tensor]:
            gate_up = torch.cat(project(x, self.gate_proj, self.up_proj), dim=-1)
            return swiglu(gate_up), gate_up

        recomputation = Recomputation()
        with recomputation.watch():
            h, gate_up = hidden(x)
            if self.memory == "saved":
                recomputation.add((h,), lambda gate_up: (swiglu(gate_up),), gate_up)
            else:
                recomputation.add((h, gate_up), hidden, x)
            return self.down_proj(h)
