"""A weight in bf16 and its remainder: the two halves of a weight in fp32.

A remainder r is an int16: the bits of the fp32 weight are those of the bf16 weight, moved up by 16,
plus r. The bf16 weight is the nearest to the fp32 weight, away from zero if two are equally near.
(Ties cannot all go to the even neighbor, which would stand for 65,537 fp32 weights, one more than
there are remainders.) Every fp32 number is exactly that of its two halves, except that NaN becomes
torch's NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lather.kernels.backend import fastest
from lather.kernels.remainder import reference
from lather.shapes import Float, Int


@torch.no_grad()
def join(w: Float[Tensor, "*dims"], r: Int[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """Return the fp32 weights of which w are the bf16 weights and r the remainders.

    A weight that was set to zero without its remainder stays near zero: its bits minus something
    would be NaN, so that a negative remainder counts as 0."""
    x = torch.empty_like(w, dtype=torch.float32)
    are_plain = w.is_contiguous() and r.is_contiguous()
    fastest(reference.join, w, r, in_reference=not are_plain)(w, r, x)
    return x


@torch.no_grad()
def split(x: Float[Tensor, "*dims"], w: Float[Tensor, "*dims"], r: Int[Tensor, "*dims"]) -> None:
    """Write the bf16 weights of the fp32 weights x into w, and their remainders into r."""
    are_plain = x.is_contiguous() and w.is_contiguous() and r.is_contiguous()
    fastest(reference.split, x, w, r, in_reference=not are_plain)(x, w, r)
