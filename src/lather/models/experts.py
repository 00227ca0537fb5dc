"""Routed experts that save little memory between forward and backward.

One autograd function computes the whole layer: gather the rows of each expert, gate/up, gate, down, weighted sum per token.

    saved for backward        x (R, D), which the caller saves as well; gate/up (G, 2F); indices and the router's weights
    recomputed in backward    the experts' input rows (gathered), the gated product (from gate/up)
    not needed                the experts' outputs: the gradient of the router's weight of row g is
                              <dy_g, W_down h_g> = <W_down^T dy_g, h_g>, and the left factor is computed anyway

With memory="recompute" gate/up is not saved either, which costs one more gather and product in backward. memory="reference" is the plain
formula in plain autograd, against which the others are tested. Adapters (`lather.models.lora`) save nothing: backward recomputes their
products.

Letters: R tokens on this rank, D hidden size, E experts on this rank, K experts per token, F intermediate size, G rows grouped by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lather.device import no_autocast
from lather.kernels.combine import combine_forward, combine_rows_sum
from lather.kernels.gather import gather_rows
from lather.kernels.route import Route, plan_route
from lather.kernels.swiglu import SWIGLU, Gate, gate_backward, gate_forward
from lather.models.grouped_products import expert_of_row, grouped_sum, grouped_weight_gradient, run_alignment
from lather.models.layers import compute_dtype, without_autocast
from lather.models.lora import AdaptedStack, Adapter
from lather.models.saving.rounded_weights import RoundedWeights, Rounding, to_round
from lather.models.saving.weight_gradients import Deferrable, WeightGradients, weight_gradient
from lather.shapes import Float, Int


class Experts(Deferrable, Rounding, nn.Module):
    """E gated MLPs as stacked weights, with gate and up in one stack: `gate_up_proj` (E, 2F, D), `down_proj` (E, D, F), optional biases.

    `gate` defines the activation and the order of the columns of gate and up. `gate_up_lora` and `down_lora` are the adapters of the two
    stacks, if there are any.
    """

    gate_up_lora: Adapter | None
    down_lora: Adapter | None

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, *, gate: Gate = SWIGLU, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.register_module("gate_up_lora", None)
        self.register_module("down_lora", None)
        self.gate = gate
        self.memory = "saved"
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights as `nn.Linear` does, uniformly within 1 / sqrt(inputs); set biases to 0."""
        for weight in (self.gate_up_proj, self.down_proj):
            weight.uniform_(-1, 1).div_(max(weight.shape[-1], 1) ** 0.5)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()

    def forward(
        self,
        x_RD: Float[Tensor, "r d"],
        experts_RK: Int[Tensor, "r k"],
        weights_RK: Float[Tensor, "r k"],
        num_pairs: int | None = None,
    ) -> Float[Tensor, "r d"]:
        """Compute the sum over k of weights[r, k] * expert[r, k](x[r]); an expert of -1 is on another rank and adds nothing.

        `num_pairs`: number of experts that are not -1, if the host knows it; None: memory for all of them is allocated.
        """
        if self.memory == "reference":
            return self.reference_forward(x_RD, experts_RK, weights_RK)
        dtype = compute_dtype(x_RD)
        plan = plan_route(experts_RK, len(self.down_proj), run_alignment(x_RD.device, dtype), num_pairs)
        adapters = (self.gate_up_lora, self.down_lora)
        scales = tuple(0.0 if adapter is None else adapter.scale for adapter in adapters)
        call = _Call(plan, self.gate, dtype, self.weight_gradients, scales, self.rounded_weights, keep_gate_up=self.memory == "saved")
        weights = (self.gate_up_proj, self.down_proj, self.gate_up_bias, self.down_bias)
        factors = [factor for adapter in adapters for factor in ((None, None) if adapter is None else (adapter.A, adapter.B))]
        with no_autocast(x_RD):
            y_RD: Tensor = _RoutedExperts.apply(x_RD, weights_RK, call, *weights, *factors)  # type: ignore[no-untyped-call]
        return y_RD

    def reference_forward(
        self, x_RD: Float[Tensor, "r d"], experts_RK: Int[Tensor, "r k"], weights_RK: Float[Tensor, "r k"]
    ) -> Float[Tensor, "r d"]:
        """Compute the same in plain autograd, expert by expert."""
        y_RD = torch.zeros_like(x_RD)
        biases = [(None,) * len(self.down_proj) if b is None else b.unbind() for b in (self.gate_up_bias, self.down_bias)]
        gate_up_EHD = self.gate_up_proj if self.gate_up_lora is None else self.gate_up_lora.added_to(self.gate_up_proj)
        down_EDF = self.down_proj if self.down_lora is None else self.down_lora.added_to(self.down_proj)
        weights = zip(gate_up_EHD.unbind(), down_EDF.unbind(), *biases, strict=True)
        for expert, (gate_up_HD, down_DF, gate_up_bias_H, down_bias_D) in enumerate(weights):
            token, slot = (experts_RK == expert).nonzero(as_tuple=True)
            h_NF = plain_gate(F.linear(x_RD[token], gate_up_HD, gate_up_bias_H), self.gate)
            out_ND = F.linear(h_NF, down_DF, down_bias_D)
            weighted_ND = (out_ND * weights_RK[token, slot, None].to(out_ND.dtype)).to(y_RD.dtype)
            y_RD = y_RD.scatter_add(0, token[:, None].expand_as(weighted_ND), weighted_ND)  # index_add would save its operand
        return y_RD


def plain_gate(gate_up_NH: Float[Tensor, "n f2"], gate: Gate) -> Float[Tensor, "n f"]:
    """Compute the activation of gate and up with torch's own operations, in the input's dtype."""
    if gate.interleaved:
        gate_NF, up_NF = gate_up_NH[:, 0::2], gate_up_NH[:, 1::2]
    else:
        gate_NF, up_NF = gate_up_NH.chunk(2, dim=-1)
    if gate.limit is not None:
        gate_NF, up_NF = gate_NF.clamp(max=gate.limit), up_NF.clamp(-gate.limit, gate.limit)
    activated_NF = F.silu(gate_NF) if gate.alpha == 1 else gate_NF * torch.sigmoid(gate.alpha * gate_NF)
    return activated_NF * (up_NF + gate.offset if gate.offset else up_NF)


@dataclass(frozen=True)
class _Call:
    """The inputs of the autograd function that have no gradient."""

    route: Route
    gate: Gate
    dtype: torch.dtype
    queue: WeightGradients | None
    scales: tuple[float, ...]
    """alpha / rank of the adapters of gate/up and of down."""
    kept: RoundedWeights | None = None
    keep_gate_up: bool = False

    def stacks(self, gate_up_EHD: Tensor, down_EDF: Tensor, factors: Sequence[Tensor | None]) -> tuple[AdaptedStack, AdaptedStack]:
        """Return both stacks with their adapters; `factors` are A and B of each."""
        gate_up_a, gate_up_b, down_a, down_b = factors
        end_E, (scale, down_scale) = self.route.end_E, self.scales
        return (
            AdaptedStack(gate_up_EHD, gate_up_a, gate_up_b, scale, end_E, self.kept),
            AdaptedStack(down_EDF, down_a, down_b, down_scale, end_E, self.kept),
        )


class _RoutedExperts(torch.autograd.Function):
    """`parameters`: gate/up (E, 2F, D) and down (E, D, F), their biases or None, then A and B of their adapters or None."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_RK: Tensor, call: _Call, *parameters: Tensor | None) -> Tensor:
        gate_up_EHD, down_EDF, gate_up_bias_EH, down_bias_ED, *factors = parameters
        assert gate_up_EHD is not None
        assert down_EDF is not None
        gate_up, down = call.stacks(gate_up_EHD, down_EDF, factors)
        gate_up_GH = _gate_up(x_RD, gate_up, gate_up_bias_EH, call)
        h_GF = gate_forward(gate_up_GH, call.gate)
        y_GD = _add_bias(down.linear(h_GF), down_bias_ED, call.route)
        del h_GF
        y_RD = combine_forward(y_GD, call.route.row_TK, weights_RK)
        kept_GH = gate_up_GH if call.keep_gate_up else None
        route, ctx.options = call.route, (call.gate, call.dtype, call.queue, call.scales, call.kept)
        ctx.parameters = parameters
        ctx.save_for_backward(x_RD, weights_RK, kept_GH, route.token_G, route.row_TK, route.count_E, route.end_E, *parameters)
        return y_RD.to(x_RD.dtype)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        """dy_g, the gradient of row g's output, is w_g times the gradient of its token; w_g multiplies the factor of size F in each
        product."""
        x_RD, weights_RK, gate_up_GH, *saved = ctx.saved_tensors
        call = _Call(Route(*saved[:4]), *ctx.options)
        gate_up_EHD, down_EDF, gate_up_bias_EH, down_bias_ED, *factors = to_round(call.kept, ctx.parameters, saved[4:])
        assert gate_up_EHD is not None
        assert down_EDF is not None
        route, dtype, queue, end_E = call.route, call.dtype, call.queue, call.route.end_E
        gate_up_stack, down_stack = call.stacks(gate_up_EHD, down_EDF, factors)
        x_RD, grad_RD = x_RD.detach(), grad_RD.to(dtype)
        if gate_up_GH is None:
            gate_up_GH = _gate_up(x_RD, gate_up_stack, gate_up_bias_EH, call)
        gate_up, down, gate_up_bias, down_bias, *_ = ctx.parameters
        needs_x, _, _, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias, *needs_factors = ctx.needs_input_grad
        grad_gate_up = grad_down = grad_gate_up_bias = grad_down_bias = grad_x = None
        of_gate_up_factors: tuple[Tensor | None, Tensor | None] = (None, None)
        of_down_factors: tuple[Tensor | None, Tensor | None] = (None, None)

        grad_GD = gather_rows(grad_RD, route.token_G)
        weight_G = _weight_of_row(weights_RK, route)
        grad_h_GF = down_stack.transposed(grad_GD)
        grad_gate_up_GH, h_GF, dot_G = gate_backward(grad_h_GF, gate_up_GH, call.gate, weight_G)
        assert dot_G is not None
        del grad_h_GF, gate_up_GH
        if needs_down:
            later = partial(_down_gradient, grad_RD, h_GF, route.token_G, end_E)
            grad_down = weight_gradient(queue, down, later, partial(grouped_weight_gradient, grad_GD, h_GF, end_E))
            del later
        if any(needs_factors[2:]):
            of_down_factors = down_stack.factor_gradients(grad_GD, h_GF)
        del h_GF
        if down_bias_ED is not None:
            dot_G = dot_G + (grad_GD * _row_bias(down_bias_ED, route, dtype)).sum(-1, dtype=dot_G.dtype)
            if needs_down_bias:
                grad_down_bias = weight_gradient(queue, down_bias, partial(_down_bias_gradient, grad_RD, weight_G, route.token_G, end_E))
        grad_weights_RK = _rows_to_slots(dot_G, route.row_TK).to(weights_RK.dtype)
        del grad_GD

        if needs_gate_up:
            grad_gate_up = weight_gradient(queue, gate_up, partial(_gate_up_gradient, grad_gate_up_GH, x_RD, route.token_G, end_E))
        if any(needs_factors[:2]):
            of_gate_up_factors = gate_up_stack.factor_gradients(grad_gate_up_GH, gather_rows(x_RD.to(dtype), route.token_G))
        if needs_gate_up_bias:
            grad_gate_up_bias = weight_gradient(queue, gate_up_bias, partial(grouped_sum, grad_gate_up_GH, end_E))
        if needs_x:
            grad_x = combine_rows_sum(gate_up_stack.transposed(grad_gate_up_GH), route.row_TK).to(x_RD.dtype)
        of_weights = (grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias)
        return grad_x, grad_weights_RK, None, *of_weights, *of_gate_up_factors, *of_down_factors


def _down_gradient(grad_RD: Tensor, h_GF: Tensor, token_G: Tensor, end_E: Tensor) -> Tensor:
    return grouped_weight_gradient(gather_rows(grad_RD, token_G), h_GF, end_E)


def _down_bias_gradient(grad_RD: Tensor, weight_G: Tensor, token_G: Tensor, end_E: Tensor) -> Tensor:
    return grouped_sum(gather_rows(grad_RD, token_G).mul_(weight_G.to(grad_RD.dtype).unsqueeze(-1)), end_E)


def _gate_up_gradient(grad_gate_up_GH: Tensor, x_RD: Tensor, token_G: Tensor, end_E: Tensor) -> Tensor:
    return grouped_weight_gradient(grad_gate_up_GH, gather_rows(x_RD.to(grad_gate_up_GH.dtype), token_G), end_E)


def _gate_up(x_RD: Tensor, gate_up: AdaptedStack, gate_up_bias_EH: Tensor | None, call: _Call) -> Tensor:
    rows_GD = gather_rows(x_RD.to(call.dtype), call.route.token_G)
    return _add_bias(gate_up.linear(rows_GD), gate_up_bias_EH, call.route)


def _add_bias(rows_GO: Tensor, bias_EO: Tensor | None, route: Route) -> Tensor:
    return rows_GO if bias_EO is None else rows_GO.add_(_row_bias(bias_EO, route, rows_GO.dtype))


def _row_bias(bias_EO: Tensor, route: Route, dtype: torch.dtype) -> Tensor:
    """Return the bias of each row's expert; for rows without an expert, that of the last expert."""
    expert_G = expert_of_row(route.end_E, len(route.token_G)).clamp_(max=len(bias_EO) - 1)
    return bias_EO.to(dtype).index_select(0, expert_G)


def _weight_of_row(weights_RK: Tensor, route: Route) -> Tensor:
    """Return the router's weight of each row; 0 for padding."""
    g = len(route.token_G)
    row_RK = torch.where(route.row_TK < 0, g, route.row_TK).flatten()
    return weights_RK.new_zeros(g + 1).index_copy_(0, row_RK, weights_RK.flatten())[:g]


def _rows_to_slots(value_G: Tensor, row_TK: Tensor) -> Tensor:
    """Return the value of the row of each (token, slot); 0 where there is no row."""
    if not len(value_G):
        return value_G.new_zeros(row_TK.shape)
    picked = value_G.index_select(0, row_TK.clamp(min=0).flatten()).view(row_TK.shape)
    return picked.masked_fill(row_TK < 0, 0)
