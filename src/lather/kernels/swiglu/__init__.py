"""Gated activations of feed-forward layers, with gate and up in the same tensor: SwiGLU and the
clamped form of GPT-OSS.

    h = g * sigmoid(alpha * g) * (u + offset)
    with g = min(gate, limit), u = clamp(up, -limit, limit)

Source: SwiGLU, Shazeer (arXiv:2002.05202); the clamped form is that of OpenAI's GPT-OSS.
Letters: F intermediate size, G rows (of tokens, grouped by expert).

Autograd keeps only `gate_up` (2F numbers per row; the plain formula keeps 4F): backward, which
reads `gate_up` anyway, computes h and the sigmoid again. `gate_backward` also returns that h and,
with a weight per row, the weighted gradients and the gradient of each weight: in one pass,
everything that the backward of an expert layer needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import run, wide_dtype
from lather.kernels.block_scaled import BlockScaled, empty_rows
from lather.kernels.swiglu import reference
from lather.kernels.swiglu.reference import Gate as Gate
from lather.shapes import Float

SWIGLU = Gate()
CLAMPED_SWIGLU = Gate(alpha=1.702, offset=1.0, limit=7.0, interleaved=True)


def swiglu(gate_up: Float[Tensor, "*rows f2"], gate: Gate = SWIGLU) -> Float[Tensor, "*rows f"]:
    """Return h (..., F), by default silu(gate) * up, in the input's dtype; gate is the first half
    of the last dim (2F), and up the second, unless `gate.interleaved` is set. `CLAMPED_SWIGLU` is
    GPT-OSS's activation.

    It can be differentiated once; autograd keeps only `gate_up`. Raises ValueError for an odd last
    dim, TypeError for a dtype that is not floating point.
    """
    return _Gated.apply(gate_up, gate)  # type: ignore[no-untyped-call]


@torch.no_grad()
def gate_forward(gate_up: Float[Tensor, "*rows f2"], gate: Gate) -> Float[Tensor, "*rows f"]:
    """Return h for `gate_up` (..., 2F), in its dtype, without autograd."""
    validate(gate_up)
    return run(reference.gate_forward, gate_up, gate)


@torch.no_grad()
def scaled_gate_forward(gate_up: Float[Tensor, "g f2"], gate: Gate) -> BlockScaled:
    """Return h for `gate_up`, rounded to its dtype and then to FP8, without autograd."""
    validate(gate_up)
    h = empty_rows(gate_up, gate_up.shape[1] // 2)
    run(reference.scaled_gate_forward, gate_up, gate, *h)
    return h


@torch.no_grad()
def gate_backward(
    grad_h: Float[Tensor, "*rows f"],
    gate_up: Float[Tensor, "*rows f2"],
    gate: Gate,
    scale: Float[Tensor, " g"] | None = None,
    in_fp8: BlockScaled | None = None,
) -> tuple[Float[Tensor, "*rows f2"], Float[Tensor, "*rows f"], Float[Tensor, " g"] | None]:
    """Return the gradient of `gate_up`, h, and None, in the dtype of `gate_up`; `grad_h` is the
    gradient of h.

    With `scale`, a weight w_g for each row of a 2-D `gate_up`, `grad_h` is the gradient of w_g * h
    instead. Then return the gradient of `gate_up`, w_g * h, and the gradient of w_g: the sum over F
    of grad_h * h, in fp32 (fp64 for fp64 inputs). `in_fp8`: memory to which the returned gradient
    of a 2-D `gate_up` is written in FP8, too. Raises ValueError for shapes that do not match,
    TypeError for a dtype that is not floating point.
    """
    validate(gate_up, grad_h, scale)
    h = gate_up.new_empty(grad_h.shape)
    dot = None if scale is None else gate_up.new_zeros(len(gate_up), dtype=wide_dtype(gate_up))
    gradient = run(reference.gate_gradient, grad_h, gate_up, gate, scale, h, dot, in_fp8)
    return gradient, h, dot


@torch.no_grad()
def gate_gradient(
    grad_h: Float[Tensor, "*rows f"], gate_up: Float[Tensor, "*rows f2"], gate: Gate
) -> Float[Tensor, "*rows f2"]:
    """Return only the gradient of `gate_up`, in its dtype."""
    validate(gate_up, grad_h)
    return run(reference.gate_gradient, grad_h, gate_up, gate)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gate: Gate) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.gate = gate
        return gate_forward(gate_up, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor, None]:
        return gate_gradient(grad_h, ctx.saved_tensors[0], ctx.gate), None


def validate(gate_up: Tensor, grad_h: Tensor | None = None, scale: Tensor | None = None) -> None:
    """Raise ValueError for shapes that do not match, TypeError for a dtype that is not floating
    point."""
    if not gate_up.is_floating_point():
        raise TypeError(f"gate_up is {gate_up.dtype}: has to be floating point")
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}: its last dim holds gate and up, so it has "
            "to be even"
        )
    expected = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    if grad_h is not None and grad_h.shape != expected:
        raise ValueError(
            f"grad_h has shape {tuple(grad_h.shape)}: gate_up {tuple(gate_up.shape)} needs "
            f"{expected}"
        )
    if scale is not None and (gate_up.dim() != 2 or scale.shape != gate_up.shape[:1]):
        raise ValueError(
            f"scale has shape {tuple(scale.shape)} with gate_up {tuple(gate_up.shape)}: has to be "
            "one number for each row of a 2-D gate_up"
        )
