"""Routed experts that save little memory between forward and backward.

One autograd function computes the whole layer: gather the rows of each expert, gate/up, gate, down,
weighted sum per token.

    saved for backward        x (R, D), which the caller saves as well; gate/up (G, 2F); indices and
                              the router's weights
    recomputed in backward    the experts' input rows (gathered again), the gated product (from
                              gate/up)
    not needed                the experts' outputs: the gradient of the router's weight of row g is
                              <dy_g, W_down h_g> = <W_down^T dy_g, h_g>, and the left factor is
                              computed anyway

With `in_fp8` the products are in FP8 (`lather.models.scaled_products`). If x was received in FP8,
that is what is saved; otherwise x is, and backward rounds it again. With memory="recompute" gate/up
is not saved either, which costs another gather and product in backward. memory="reference" is the
plain formula in plain autograd, against which the others are tested. Adapters
(`lather.models.lora`) save nothing: backward recomputes their products.

Letters: R tokens on this rank, D hidden size, E experts on this rank, K experts per token, F
intermediate size, G rows grouped by expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lather.boxes import gradient_dtype
from lather.device import Read, no_autocast, positions
from lather.kernels.block_scaled import BlockScaled, empty_rows, scaled_rows
from lather.kernels.combine import combine_forward
from lather.kernels.route import Route, plan_route, rows_from_slots, slots_from_rows
from lather.kernels.swiglu import SWIGLU, Gate, gate_backward, gate_forward, scaled_gate_forward
from lather.models.gated_mlp import GatedCall
from lather.models.grouped_products import (
    grouped_sum,
    grouped_weight_gradient,
    rows_of,
    run_alignment,
)
from lather.models.layers import compute_dtype, reset_parameters, without_autocast
from lather.models.lora import AdaptedStack, Adapter, merged
from lather.models.saving.rounded_weights import Rounding
from lather.models.saving.weight_gradients import (
    Accumulable,
    Deferrable,
    WeightGradients,
    weight_gradient,
)
from lather.models.scaled_products import Rows, ScaledStack, scaled_weight_gradient
from lather.shapes import Float, Int


class Experts(Deferrable, Rounding, nn.Module):
    """E gated MLPs as stacked weights, with gate and up in the same stack: `gate_up_proj` (E, 2F,
    D), `down_proj` (E, D, F), optional biases.

    `gate` defines the activation and the order of the columns of gate and up. `gate_up_lora` and
    `down_lora` are the adapters of the two stacks, if there are any.
    """

    products_read = ("gate_up_proj", "down_proj")
    in_fp8 = False
    """Whether gate/up, down and the gradients of their inputs are products in FP8 with block
    scales; only without adapters, and not with memory="reference"."""
    gate_up_lora: Adapter | None
    down_lora: Adapter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        gate: Gate = SWIGLU,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.gate_up_bias = (
            nn.Parameter(torch.empty(num_experts, 2 * intermediate_size)) if bias else None
        )
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.register_module("gate_up_lora", None)
        self.register_module("down_lora", None)
        self.gate = gate
        self.memory = "saved"
        reset_parameters(self)

    def forward(
        self,
        x_RD: Float[Tensor, "r d"],
        experts_RK: Int[Tensor, "r k"],
        weights_RK: Float[Tensor, "r k"],
        num_pairs: int | None = None,
        received: BlockScaled | None = None,
    ) -> Float[Tensor, "r d"]:
        """Compute the sum over k of weights[r, k] * expert[r, k](x[r]); an expert of -1 is on
        another rank and adds nothing.

        `num_pairs`: number of experts that are not -1, if the host knows it; None: memory for all
        of them is allocated. `received`: x in FP8; `x_RD` then only has the dtype of x
        and takes its gradient, and its values are not read.
        """
        if self.memory == "reference":
            assert received is None
            return self.reference_forward(x_RD, experts_RK, weights_RK)
        dtype = torch.bfloat16 if self.in_fp8 else compute_dtype(x_RD)
        route = plan_route(
            experts_RK, len(self.down_proj), run_alignment(x_RD.device, dtype), num_pairs
        )
        parameters: list[Tensor | None] = []
        scales = []
        for weight, bias, adapter in (
            (self.gate_up_proj, self.gate_up_bias, self.gate_up_lora),
            (self.down_proj, self.down_bias, self.down_lora),
        ):
            factors = (None, None) if adapter is None else (adapter.A, adapter.B)
            parameters += [weight, bias, *factors]
            scales.append(0.0 if adapter is None else adapter.scale)
        call = _Call(
            dtype,
            self.memory == "saved",
            self.weight_gradients,
            self.rounded_weights,
            self.gate,
            tuple(scales),
            self.in_fp8,
        )
        with no_autocast(x_RD):
            return _RoutedExperts.apply(x_RD, weights_RK, received, call, route, *parameters)  # type: ignore[no-untyped-call]

    def rounded_input(self, x_RD: Float[Tensor, "r d"]) -> Rows:
        """Return x in the format in which it is sent to experts on other ranks; products of it have
        the bits of those of x."""
        return scaled_rows(x_RD.to(torch.bfloat16)) if self.in_fp8 else x_RD

    def reference_forward(
        self,
        x_RD: Float[Tensor, "r d"],
        experts_RK: Int[Tensor, "r k"],
        weights_RK: Float[Tensor, "r k"],
    ) -> Float[Tensor, "r d"]:
        """Compute the same in plain autograd, expert by expert."""
        y_RD = torch.zeros_like(x_RD)
        biases = [
            (None,) * len(self.down_proj) if b is None else b.unbind()
            for b in (self.gate_up_bias, self.down_bias)
        ]
        stacks = (
            merged(self.gate_up_proj, self.gate_up_lora),
            merged(self.down_proj, self.down_lora),
        )
        weights = zip(*(stack.unbind() for stack in stacks), *biases, strict=True)
        for expert, (gate_up_HD, down_DF, gate_up_bias_H, down_bias_D) in enumerate(weights):
            token, slot = positions(experts_RK == expert, Read.EXPERT_ROWS)
            h_NF = plain_gate(F.linear(x_RD[token], gate_up_HD, gate_up_bias_H), self.gate)
            out_ND = F.linear(h_NF, down_DF, down_bias_D)
            weighted_ND = (out_ND * weights_RK[token, slot, None].to(out_ND.dtype)).to(y_RD.dtype)
            # index_add would save its operand
            y_RD = y_RD.scatter_add(0, token[:, None].expand_as(weighted_ND), weighted_ND)
        return y_RD


def plain_gate(gate_up_NH: Float[Tensor, "n f2"], gate: Gate) -> Float[Tensor, "n f"]:
    """Compute the activation of gate and up with torch's operations, in the input's dtype."""
    if gate.interleaved:
        gate_NF, up_NF = gate_up_NH[:, 0::2], gate_up_NH[:, 1::2]
    else:
        gate_NF, up_NF = gate_up_NH.chunk(2, dim=-1)
    if gate.limit is not None:
        gate_NF, up_NF = gate_NF.clamp(max=gate.limit), up_NF.clamp(-gate.limit, gate.limit)
    activated_NF = (
        F.silu(gate_NF) if gate.alpha == 1 else gate_NF * torch.sigmoid(gate.alpha * gate_NF)
    )
    return activated_NF * (up_NF + gate.offset if gate.offset else up_NF)


@dataclass(frozen=True)
class _Call(GatedCall):
    """The inputs of the experts' autograd function that are no tensors, but for the route."""

    gate: Gate
    scales: tuple[float, ...]
    """alpha / rank of the adapters of gate/up and of down."""
    in_fp8: bool

    def operand(self, x: Rows) -> Rows:
        """Round rows for the products that read them."""
        if isinstance(x, BlockScaled):
            return x
        x = x.to(self.dtype)
        return scaled_rows(x) if self.in_fp8 else x

    def gate_gradients(
        self, grad_h_GF: Tensor, gate_up_GH: Tensor, weight_G: Tensor
    ) -> tuple[Tensor, Rows, Tensor, Tensor]:
        """Return the gradient of gate/up, the same as the product of the input's gradient reads it,
        h, and the gradient of the rows' weights."""
        in_fp8 = empty_rows(gate_up_GH, gate_up_GH.shape[1]) if self.in_fp8 else None
        grad_GH, h_GF, dot_G = gate_backward(grad_h_GF, gate_up_GH, self.gate, weight_G, in_fp8)
        assert dot_G is not None
        return grad_GH, grad_GH if in_fp8 is None else in_fp8, h_GF, dot_G

    def saved_input(self, x_RD: Tensor, scales: Tensor | None) -> Rows:
        """Return the layer's input, which deferred weight gradients may keep, in backward."""
        if scales is not None:
            return BlockScaled(x_RD, scales)
        return self.operand(x_RD.detach()) if self.in_fp8 else x_RD.detach()

    def stacks(self, end_E: Tensor, parameters: Sequence[Any]) -> tuple[AdaptedStack, AdaptedStack]:
        """Return the stacks of gate/up and of down for the parameters of the autograd function."""
        kind = ScaledStack if self.in_fp8 else AdaptedStack
        gate_up, down = (
            kind(weight, bias, a, b, scale, end_E, self.cache)
            for (weight, bias, a, b), scale in zip(
                (parameters[:4], parameters[4:]), self.scales, strict=True
            )
        )
        return gate_up, down


class _RoutedExperts(torch.autograd.Function):
    """`parameters`: gate/up (E, 2F, D), its bias or None, A and B of its adapter or None; then the
    same of down (E, D, F)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weights_RK: Tensor,
        received: BlockScaled | None,
        call: _Call,
        route: Route,
        *parameters: Tensor | None,
    ) -> Tensor:
        gate_up, down = call.stacks(route.end_E, parameters)
        x = call.operand(x_RD) if received is None else received
        gate_up_GH = gate_up.linear(x, route.token_G)
        activation = scaled_gate_forward if call.in_fp8 else gate_forward
        y_GD = down.linear(activation(gate_up_GH, call.gate))
        y_RD = combine_forward(y_GD, route.row_TK, weights_RK)
        saved_GH = gate_up_GH if call.keep_gate_up else None
        ctx.call, ctx.parameters, ctx.dtype = call, parameters, x_RD.dtype
        ctx.save_for_backward(
            *((x_RD, None) if received is None else received),
            weights_RK,
            saved_GH,
            route.token_G,
            route.row_TK,
            route.count_E,
            route.end_E,
            *parameters,
        )
        return y_RD.to(x_RD.dtype)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        """dy_g, the gradient of row g's output, is w_g times the gradient of its token; w_g
        multiplies the factor of size F in each product."""
        x_RD, scales, weights_RK, gate_up_GH, token_G, row_RK, _, end_E, *saved = ctx.saved_tensors
        call: _Call = ctx.call
        parameters = list(map(call.cache.in_backward, ctx.parameters, saved))
        gate_up, down = call.stacks(end_E, parameters)
        x, grad_RD = call.saved_input(x_RD, scales), grad_RD.to(call.dtype)
        if gate_up_GH is None:
            gate_up_GH = gate_up.linear(call.operand(x), token_G)
        needs_x, _, _, _, _, *needs = ctx.needs_input_grad
        gradient = partial(_gradient, call.queue, ctx.parameters, needs)
        of_gate_up: list[Tensor | None] = [None] * 4
        of_down: list[Tensor | None] = [None] * 4

        # products in FP8 look up rows by number
        gathers = not call.in_fp8 or down.bias_EO is not None
        grad_GD: Any = rows_of(grad_RD, token_G) if gathers else None
        weight_G = rows_from_slots(weights_RK, row_RK, len(token_G))
        grad_h_GF = (
            down.transposed(call.operand(grad_RD), token_G)
            if call.in_fp8
            else down.transposed(grad_GD)
        )
        grad_gate_up_GH, rows, h_GF, dot_G = call.gate_gradients(grad_h_GF, gate_up_GH, weight_G)
        del grad_h_GF, gate_up_GH
        product = partial(_product, ctx.parameters[4], end_E)
        at_once = product(grad_GD, h_GF) if gathers else None
        of_down[0] = gradient(4, product(grad_RD, h_GF, g_rows=token_G), at_once)
        if any(needs[6:]):
            of_down[2:] = down.factor_gradients(grad_GD, h_GF)
        del h_GF, at_once
        if down.bias_EO is not None:
            dot_G = dot_G + (grad_GD * down.bias_of_rows(grad_GD)).sum(-1, dtype=dot_G.dtype)
        of_down[1] = gradient(5, partial(_down_bias_gradient, grad_RD, weight_G, token_G, end_E))
        grad_weights_RK = slots_from_rows(dot_G, row_RK).to(weights_RK.dtype)
        del grad_GD

        grad_x_RD = None
        if needs_x:
            grad_x_GD = gate_up.transposed(rows)
            del rows
            grad_x_RD = combine_forward(grad_x_GD, row_RK).to(ctx.dtype)
            del grad_x_GD
        product = partial(_product, ctx.parameters[0], end_E)
        of_gate_up[0] = gradient(0, product(grad_gate_up_GH, x, x_rows=token_G))
        if any(needs[2:4]):
            assert isinstance(x, Tensor)
            x_GD = rows_of(x.to(call.dtype), token_G)
            of_gate_up[2:] = gate_up.factor_gradients(grad_gate_up_GH, x_GD)
            del x_GD
        of_gate_up[1] = gradient(1, partial(grouped_sum, grad_gate_up_GH, end_E))
        return grad_x_RD, grad_weights_RK, None, None, None, *of_gate_up, *of_down


def _gradient(
    queue: WeightGradients | None,
    parameters: Sequence[Any],
    needs: Sequence[bool],
    number: int,
    later: Callable[[], Tensor],
    now: Callable[[], Tensor] | None = None,
) -> Tensor | None:
    """Return `weight_gradient` of the parameter with this number, if it needs a gradient."""
    return weight_gradient(queue, parameters[number], later, now) if needs[number] else None


def _product(weight_EOI: Tensor, end_E: Tensor, g: Tensor, x: Rows, **rows: Tensor) -> Accumulable:
    """Return the function that computes the gradient of a stack of weights from these operands."""
    compute = scaled_weight_gradient if isinstance(x, BlockScaled) else grouped_weight_gradient
    return Accumulable(compute, g, x, end_E, dtype=gradient_dtype(weight_EOI), **rows)


def _down_bias_gradient(
    grad_RD: Tensor, weight_G: Tensor, token_G: Tensor, end_E: Tensor
) -> Tensor:
    return grouped_sum(
        rows_of(grad_RD, token_G).mul_(weight_G.to(grad_RD.dtype).unsqueeze(-1)), end_E
    )
