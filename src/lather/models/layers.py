"""Layers shared by the model families: RMSNorm and the gated MLP, each keeping little between forward and backward.

    RMSNorm      keeps its input and one number per row, where plain autograd keeps two more copies, in fp32
    GatedMLP     keeps its input and gate/up, where plain autograd keeps two more of F; the product is recomputed in backward

Source: RMSNorm (Zhang and Sennrich, arXiv:1910.07467).

Letters: T rows, D hidden size, F intermediate size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lather.kernels.swiglu import SWIGLU, gate_backward, gate_forward
from lather.shapes import Float

MEMORY_MODES = ("saved", "recompute", "reference")
"""What a feed-forward layer keeps for backward: gate/up; nothing but its input; whatever plain autograd keeps."""


def check_memory(memory: str) -> None:
    """Raise ValueError unless it is one of `MEMORY_MODES`."""
    if memory not in MEMORY_MODES:
        raise ValueError(f"memory = {memory!r} is not valid: use one of {', '.join(map(repr, MEMORY_MODES))}")


def compute_dtype(x: Tensor) -> torch.dtype:
    """What products of x are computed in: autocast's dtype inside autocast, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and x.dtype != torch.float64 else x.dtype


B = TypeVar("B", bound=Callable[..., Any])


def without_autocast(backward: B) -> B:
    """Of a Function's backward: its products are in the dtypes that it chose, also where the caller runs backward inside autocast."""

    @functools.wraps(backward)
    def run(ctx: Any, grad: Tensor) -> Any:
        with torch.autocast(grad.device.type, enabled=False):
            return backward(ctx, grad)

    return cast(B, run)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        inverse_rms_T1 = torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_TD, weight_D, inverse_rms_T1)
        return weight_D * (wide_TD * inverse_rms_T1).to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D, inverse_rms_T1 = ctx.saved_tensors
        normed_TD = x_TD * inverse_rms_T1
        grad_weight_D = (grad_TD * normed_TD).flatten(0, -2).sum(0)
        scaled_TD = grad_TD * weight_D.to(normed_TD.dtype)
        along_T1 = (scaled_TD * normed_TD).mean(-1, keepdim=True)
        grad_x_TD = scaled_TD.sub_(normed_TD.mul_(along_T1)).mul_(inverse_rms_T1)
        return grad_x_TD.to(x_TD.dtype), grad_weight_D.to(weight_D.dtype), None


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        y: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, dtype: torch.dtype, keep_gate_up: bool) -> Tensor:
        gate_up_TH = _gate_up(x_TD.to(dtype), gate_FD, up_FD)
        ctx.save_for_backward(x_TD, gate_FD, up_FD, down_DF, gate_up_TH if keep_gate_up else None)
        ctx.dtype = dtype
        return gate_forward(gate_up_TH, SWIGLU) @ down_DF.to(dtype).T

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate_FD, up_FD, down_DF, gate_up_TH = ctx.saved_tensors
        needs_x, needs_gate, needs_up, needs_down, _, _ = ctx.needs_input_grad
        x_TD_, grad_TD = x_TD.to(ctx.dtype), grad_TD.to(ctx.dtype)
        if gate_up_TH is None:
            gate_up_TH = _gate_up(x_TD_, gate_FD, up_FD)
        grad_gate_up_TH, h_TF, _ = gate_backward(grad_TD @ down_DF.to(ctx.dtype), gate_up_TH, SWIGLU)
        grad_gate_TF, grad_up_TF = grad_gate_up_TH.chunk(2, dim=-1)
        grad_down = (grad_TD.T @ h_TF).to(down_DF.dtype) if needs_down else None
        grad_gate = (grad_gate_TF.T @ x_TD_).to(gate_FD.dtype) if needs_gate else None
        grad_up = (grad_up_TF.T @ x_TD_).to(up_FD.dtype) if needs_up else None
        grad_x = None
        if needs_x:
            grad_x = (grad_gate_TF @ gate_FD.to(ctx.dtype)).addmm_(grad_up_TF, up_FD.to(ctx.dtype)).to(x_TD.dtype)
        return grad_x, grad_gate, grad_up, grad_down, None, None


def _gate_up(x_TD: Tensor, gate_FD: Tensor, up_FD: Tensor) -> Tensor:
    f = len(gate_FD)
    gate_up_TH = x_TD.new_empty(len(x_TD), 2 * f)
    torch.mm(x_TD, gate_FD.to(x_TD.dtype).T, out=gate_up_TH[:, :f])
    torch.mm(x_TD, up_FD.to(x_TD.dtype).T, out=gate_up_TH[:, f:])
    return gate_up_TH


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): the dense feed-forward layer, and the shared experts."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.memory = "saved"

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        if self.memory == "reference":
            plain: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
            return plain
        weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        dtype = compute_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            y: Tensor = _GatedMLP.apply(x.flatten(0, -2), *weights, dtype, self.memory == "saved")  # type: ignore[no-untyped-call]
        return y.view(x.shape)
