"""Rotary position embedding: the rotation of each pair of a head's coordinates by the angle of its
position, of whole heads, of a part of each, or of a key that all heads share.

Source: RoPE (Su et al., arXiv:2104.09864); the shared key is that of DeepSeek-V2 (arXiv:2405.04434,
section 2.1.3). Letters: B sequences, S positions, H heads, P pairs, R = 2 P rotary width of a head,
N columns of a head that are not rotated, U width of a head's value.

Autograd keeps only the tables of cosines and sines: backward rotates the gradient by the negative
angles. On a GPU, forward and backward are one kernel each, which reads the heads as slices of wider
tensors and copies the columns that are not rotated in the same pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.kernels.backend import run
from lather.kernels.rotary import reference
from lather.shapes import Float


def rotate(
    x_BSHR: Float[Tensor, "b s h r"],
    cos_BSP: Float[Tensor, "#b s p"],
    sin_BSP: Float[Tensor, "#b s p"],
    *,
    halves: bool,
) -> Float[Tensor, "b s h r"]:
    """Rotate each pair of coordinates of a head by the angle of its position. The result has the
    dtype of x; the computation is in the wider of the dtypes of x and the tables.

    It can be differentiated once, for x. Raises ValueError for shapes that do not match.
    """
    if not torch.compiler.is_compiling():
        validate(x_BSHR, cos_BSP, sin_BSP)
    return rotate_part(x_BSHR, cos_BSP, sin_BSP, halves=halves)


rotate_pairs = functools.partial(rotate, halves=False)
"""Rotates pairs of adjacent coordinates (x_2i, x_2i+1)."""
rotate_halves = functools.partial(rotate, halves=True)
"""Rotates pairs (x_i, x_P+i)."""


def rotate_part(
    x_BSHx: Float[Tensor, "b s h x"],
    cos_BSP: Float[Tensor, "#b s p"],
    sin_BSP: Float[Tensor, "#b s p"],
    *,
    halves: bool,
    last: bool = False,
) -> Float[Tensor, "b s h x"]:
    """Rotate the first R columns of each head as `rotate` does, or with `last` the last R; the
    others are copied."""
    # the compiler fuses the reference with the operations around it
    if torch.compiler.is_compiling():
        return reference.turn(x_BSHx, cos_BSP, sin_BSP, halves=halves, last=last)
    _validate_part(x_BSHx, cos_BSP, sin_BSP)
    return _Turn.apply(x_BSHx, cos_BSP, sin_BSP, halves, last)  # type: ignore[no-untyped-call]


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSHx: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, halves: bool, last: bool
    ) -> Tensor:
        ctx.save_for_backward(cos_BSP, sin_BSP)
        ctx.options = {"halves": halves, "last": last}
        return run(reference.turn, x_BSHx, cos_BSP, sin_BSP, **ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHx: Tensor) -> tuple[Tensor | None, ...]:
        grad = run(reference.turn, grad_BSHx, *ctx.saved_tensors, **ctx.options, back=True)
        return grad, None, None, None, None


def join_shared_key(
    kv_BSHx: Float[Tensor, "b s h x"],
    k_BSR: Float[Tensor, "b s r"],
    cos_BSP: Float[Tensor, "#b s p"],
    sin_BSP: Float[Tensor, "#b s p"],
    *,
    halves: bool,
    size: int,
) -> tuple[Float[Tensor, "b s h n"], Float[Tensor, "b s h u"]]:
    """Return the keys (B, S, H, N + R) and the values of heads that share a rotary key: `kv` has
    N = `size` columns of each head's own key, which come first in the result, and then the columns
    of its value, of which the values are a view. The shared key is rotated as by `rotate`.

    It can be differentiated once, for kv and k; the gradient of the shared key is summed over heads
    in the dtype of the rotation, and rounded once. Raises ValueError for shapes that do not match.
    """
    if torch.compiler.is_compiling() or kv_BSHx.dtype != k_BSR.dtype:
        k_BSHN, v_BSHU = reference.parts(kv_BSHx, size, last=False)
        return reference.join_keys(k_BSHN, k_BSR, cos_BSP, sin_BSP, halves=halves), v_BSHU
    validate_shared_key(kv_BSHx, k_BSR, cos_BSP, sin_BSP, size)
    heads: tuple[Tensor, Tensor] = _JoinSharedKey.apply(  # type: ignore[no-untyped-call]
        kv_BSHx, k_BSR, cos_BSP, sin_BSP, halves, size
    )
    return heads


class _JoinSharedKey(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kv_BSHx: Tensor,
        k_BSR: Tensor,
        cos_BSP: Tensor,
        sin_BSP: Tensor,
        halves: bool,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_BSP, sin_BSP)
        ctx.halves = halves
        k_BSHN, v_BSHU = reference.parts(kv_BSHx, size, last=False)
        k_BSHx = run(reference.join_keys, k_BSHN, k_BSR, cos_BSP, sin_BSP, halves=halves)
        # autograd takes a view of an input for an output like any other; nobody may write to it
        return k_BSHx, v_BSHU

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_k_BSHx: Tensor, grad_v_BSHU: Tensor) -> tuple[Tensor | None, ...]:
        grads = run(
            reference.keys_gradient,
            grad_k_BSHx,
            grad_v_BSHU,
            *ctx.saved_tensors,
            halves=ctx.halves,
        )
        return *grads, None, None, None, None


def validate(x_BSHR: Tensor, cos_BSP: Tensor, sin_BSP: Tensor) -> None:
    """Raise ValueError for shapes that do not match, where whole heads are rotated."""
    _validate_part(x_BSHR, cos_BSP, sin_BSP)
    if x_BSHR.shape[-1] != 2 * cos_BSP.shape[-1]:
        raise _mismatch(x_BSHR, cos_BSP, sin_BSP, "2 P")


def validate_shared_key(
    kv_BSHx: Tensor, k_BSR: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, size: int
) -> None:
    """Raise ValueError for shapes that do not match, where heads share a rotary key."""
    fits = kv_BSHx.dim() == 4 and k_BSR.dim() == 3 and kv_BSHx.shape[:2] == k_BSR.shape[:2]
    fits = fits and k_BSR.shape[-1] == 2 * cos_BSP.shape[-1]
    if not fits or not 0 <= size <= kv_BSHx.shape[-1]:
        raise ValueError(
            f"kv has shape {tuple(kv_BSHx.shape)} with {size} columns of keys and a shared key "
            f"{tuple(k_BSR.shape)}: kv has to be (B, S, H, N + U), with at least as many columns "
            f"as keys have, and the shared key (B, S, 2 P), here P = {cos_BSP.shape[-1]}"
        )
    validate(k_BSR.unsqueeze(-2), cos_BSP, sin_BSP)


def _validate_part(x_BSHx: Tensor, cos_BSP: Tensor, sin_BSP: Tensor) -> None:
    fits = x_BSHx.dim() == 4 and cos_BSP.dim() == 3 and cos_BSP.shape == sin_BSP.shape
    if (
        not fits
        or cos_BSP.shape[:2] not in {(batch, x_BSHx.shape[1]) for batch in (1, len(x_BSHx))}
        or x_BSHx.shape[-1] < 2 * cos_BSP.shape[-1]
    ):
        raise _mismatch(x_BSHx, cos_BSP, sin_BSP, "at least 2 P")


def _mismatch(x: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, width: str) -> ValueError:
    return ValueError(
        f"x has shape {tuple(x.shape)} with tables {tuple(cos_BSP.shape)} and "
        f"{tuple(sin_BSP.shape)}: x has to be (B, S, H, {width}) and both tables (B or 1, S, P)"
    )
