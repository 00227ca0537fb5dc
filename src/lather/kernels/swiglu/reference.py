"""The gated activation in plain torch: the specification of triton.py, and the implementation for
CPUs.

    h = g * sigmoid(alpha * g) * (u + offset)
    with g = min(gate, limit), u = clamp(up, -limit, limit)

Letters: R rows (all leading dims), F intermediate size. Everything is computed in fp32 (fp64 for
fp64 inputs) and rounded once to the dtype of the input. Backward processes blocks of rows that stay
in the cache, so that it reads and writes memory once and needs only a few hundred KiB of temporary
memory for any R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.kernels.backend import blocks, wide_dtype
from lather.kernels.block_scaled import BlockScaled
from lather.kernels.block_scaled.reference import scale_rows

BLOCK = 2**16
"""Elements of h in a block of rows."""


@dataclass(frozen=True)
class Gate:
    """Parameters of a gated activation, and the layout of gate and up in the last dim."""

    alpha: float = 1.0
    """Steepness of the sigmoid."""
    offset: float = 0.0
    """Number added to up, after clamping."""
    limit: float | None = None
    """Limit for clamping: the gate from above, up from both sides; None: no clamping."""
    interleaved: bool = False
    """True: even columns are the gate, odd ones up. False: the first half of the columns is the
    gate, the second is up."""

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit={self.limit}: has to be above 0, or None for no clamping")


def gate_forward(gate_up: Tensor, gate: Gate) -> Tensor:
    g, u = _clamped_halves(gate_up, gate)
    activated = F.silu(g) if gate.alpha == 1 else g * torch.sigmoid(gate.alpha * g)
    return (activated * (u + gate.offset if gate.offset else u)).to(gate_up.dtype)


def scaled_gate_forward(
    gate_up_RH: Tensor, gate: Gate, values_RF: Tensor, scales_RB: Tensor
) -> None:
    scale_rows(gate_forward(gate_up_RH, gate), values_RF, scales_RB)


def gate_gradient(
    grad_h: Tensor,
    gate_up: Tensor,
    gate: Gate,
    scale: Tensor | None = None,
    h: Tensor | None = None,
    dot: Tensor | None = None,
    in_fp8: BlockScaled | None = None,
) -> Tensor:
    """Return the gradient of `gate_up`; write it to `in_fp8`, h to `h`, and with `scale` the
    gradients of the weights to `dot`, unless they are None."""
    grad_gate_up = gate_up.new_empty(gate_up.shape)
    grad_RF, gate_up_R2F, h_RF = _rows(grad_h), _rows(gate_up), None if h is None else _rows(h)
    out_g, out_u = _halves(_rows(grad_gate_up), gate)
    for block in blocks(grad_RF, BLOCK):
        grad = grad_RF[block].to(wide_dtype(gate_up))
        activated, u, d_gate, d_up = _factors(gate_up_R2F[block], gate)
        if scale is not None and h_RF is not None and dot is not None:
            product, weight = activated * u, scale[block].to(grad.dtype).unsqueeze(-1)
            dot[block] = torch.linalg.vecdot(grad, product)
            torch.mul(product, weight, out=h_RF[block])
            grad = grad * weight
        elif h_RF is not None:
            torch.mul(activated, u, out=h_RF[block])
        torch.mul(d_gate, grad, out=out_g[block])
        torch.mul(d_up, grad, out=out_u[block])
    if in_fp8 is not None:
        scale_rows(grad_gate_up, *in_fp8)
    return grad_gate_up


def _factors(gate_up_R2F: Tensor, gate: Gate) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return g * sigmoid(alpha * g) and u + offset, whose product is h, and dh/d(gate) and
    dh/d(up), in fp32 or wider."""
    g, u = _clamped_halves(gate_up_R2F, gate)
    sigmoid = torch.sigmoid(g if gate.alpha == 1 else gate.alpha * g)
    activated = g * sigmoid
    if gate.offset:
        u = u + gate.offset
    d_gate = torch.addcmul(sigmoid, activated, 1 - sigmoid, value=gate.alpha).mul_(u)
    d_up = activated
    if gate.limit is not None:
        raw_g, raw_u = _halves(gate_up_R2F, gate)
        d_gate.masked_fill_(raw_g > gate.limit, 0)
        d_up = activated.masked_fill(raw_u.abs() > gate.limit, 0)
    return activated, u, d_gate, d_up


def _clamped_halves(gate_up: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    g, u = (half.to(wide_dtype(gate_up)) for half in _halves(gate_up, gate))
    if gate.limit is None:
        return g, u
    return g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)


def _halves(gate_up: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    if gate.interleaved:
        return gate_up[..., 0::2], gate_up[..., 1::2]
    gate_columns, up_columns = gate_up.chunk(2, dim=-1)
    return gate_columns, up_columns


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
