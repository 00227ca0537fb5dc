"""The rotation of rotary position embedding in torch's own operations: the specification of the
kernels.

    (x, y) -> (x cos - y sin, x sin + y cos)    and with -sin for the inverse

Letters: B sequences, S positions, H heads, P pairs, R = 2 P rotary width of a head, N columns of a
head that are not rotated, U width of a head's value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn(
    x_BSHx: Tensor,
    cos_BSP: Tensor,
    sin_BSP: Tensor,
    *,
    halves: bool,
    back: bool = False,
    last: bool = False,
) -> Tensor:
    """Rotate the first R columns of each head, or with `last` the last R; the others are copied.
    The pairs are (x_i, x_P+i) if `halves`, otherwise (x_2i, x_2i+1). With `back`, rotate by the
    negative angle."""
    turned_BSHR, rest_BSHN = parts(x_BSHx, 2 * cos_BSP.shape[-1], last=last)
    turned_BSHR = _turned(turned_BSHR, cos_BSP, sin_BSP, halves=halves, back=back)
    if rest_BSHN.shape[-1] == 0:
        return turned_BSHR
    return torch.cat((rest_BSHN, turned_BSHR) if last else (turned_BSHR, rest_BSHN), dim=-1)


def join_keys(
    k_BSHN: Tensor, k_BSR: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, *, halves: bool
) -> Tensor:
    """Return the keys (B, S, H, N + R): behind the columns of each head's own key, the key that all
    heads share, rotated."""
    turned_BS1R = _turned(k_BSR.unsqueeze(2), cos_BSP, sin_BSP, halves=halves)
    return torch.cat((k_BSHN, turned_BS1R.expand(-1, -1, k_BSHN.shape[2], -1)), dim=-1)


def keys_gradient(
    grad_k_BSHx: Tensor, grad_v_BSHU: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, *, halves: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient (B, S, H, N + U) of the heads' own keys and of their values, side by
    side, and that of the shared key (B, S, R): the sum over heads, rotated back and rounded
    once."""
    grad_BSHR, grad_BSHN = parts(grad_k_BSHx, 2 * cos_BSP.shape[-1], last=True)
    dtype = torch.promote_types(grad_BSHR.dtype, cos_BSP.dtype)
    sum_BS1R = grad_BSHR.sum(2, keepdim=True, dtype=dtype)
    turned_BS1R = _turned(sum_BS1R, cos_BSP, sin_BSP, halves=halves, back=True)
    grad_k_BSR = turned_BS1R.squeeze(2).to(grad_BSHR.dtype)
    return torch.cat((grad_BSHN, grad_v_BSHU), dim=-1), grad_k_BSR


def parts(x_BSHx: Tensor, size: int, *, last: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first `size` columns of each head, or with `last` of the last, and of the
    others."""
    others = x_BSHx.shape[-1] - size
    if last:
        rest, part = x_BSHx.split((others, size), dim=-1)
    else:
        part, rest = x_BSHx.split((size, others), dim=-1)
    return part, rest


def _turned(
    x_BSHR: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, *, halves: bool, back: bool = False
) -> Tensor:
    wide_BSHR = x_BSHR.to(torch.promote_types(x_BSHR.dtype, cos_BSP.dtype))
    x, y = wide_BSHR.chunk(2, dim=-1) if halves else wide_BSHR.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_BSP.unsqueeze(-2), sin_BSP.unsqueeze(-2)
    turned = (
        (x * cos + y * sin, y * cos - x * sin) if back else (x * cos - y * sin, x * sin + y * cos)
    )
    joined = torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)
    return joined.to(x_BSHR.dtype)
